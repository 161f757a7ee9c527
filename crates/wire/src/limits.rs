//! Limits on input that are shared, or that bound what is allocated for it; they are checked before
//! the allocation. A limit that only one parser needs is defined there.

use std::time::Duration;

/// Longest frame on a Unix socket, and longest line on the long-lived stream, in bytes.
pub const FRAME_BYTES_MAX: usize = 1 << 20;
/// Longest frame between an agent and its guard, in bytes. The kernel accepts at most 6 MiB of
/// arguments and environment; bytes that are not UTF-8 take up to four times their size in a frame.
pub const LAUNCH_FRAME_BYTES_MAX: usize = 64 << 20;
/// Longest key of the process-group store, in bytes.
pub const STORE_KEY_BYTES_MAX: u64 = 1 << 16;
/// Longest value of the process-group store, in bytes, also after an append.
pub const STORE_VALUE_BYTES_MAX: u64 = 64 << 20;
/// Most keys in one request to the process-group store.
pub const STORE_KEYS_MAX: u64 = 1 << 16;
/// Longest manifest of a checkpoint, in bytes.
pub const MANIFEST_BYTES_MAX: u64 = 64 << 20;
/// Most forks in the lineage of a checkpoint; older ones are dropped.
pub const LINEAGE_FORKS_MAX: usize = 256;
/// Highest turn in the lineage of a checkpoint. Training takes the next turn whenever it continues
/// in another branch.
pub const LINEAGE_TURN_MAX: u64 = 1 << 53;
/// Longest header of a safetensors file, in bytes (the format's own limit).
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Longest side index of a slot, in bytes.
pub const INDEX_BYTES_MAX: u64 = 256 << 20;
/// Longest region of a shard, in any tier, in bytes.
pub const REGION_BYTES_MAX: u64 = 1 << 44;
/// Most dimensions of a tensor in a checkpoint.
pub const TENSOR_DIMENSIONS_MAX: usize = 64;
/// Longest name of a job or node, in bytes.
pub const NAME_BYTES_MAX: usize = 63;
/// Most bytes of events that the coordinator keeps in memory while they cannot be written.
pub const EVENTS_KEPT_BYTES_MAX: usize = 4 << 20;
/// Time after which a connection attempt is given up.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest file that a user names in an option, in bytes: rules, settings, models.
pub const USER_FILE_BYTES_MAX: u64 = 64 << 20;
/// Longest token, in bytes.
pub const TOKEN_BYTES_MAX: u64 = 4096;
/// Longest small file of everstep's own (in checkpoints or elsewhere) that is read whole, in bytes.
pub const NOTE_BYTES_MAX: u64 = 1 << 20;
/// Most unauthenticated connections of one other user of this machine, per port.
pub const UNPROVEN_PER_USER: usize = 16;
/// Most unauthenticated connections of one other machine, per port. A node's ranks connect at the
/// same time.
pub const UNPROVEN_PER_MACHINE: usize = 256;
/// Most unauthenticated connections of all other users and machines together, per port.
pub const UNPROVEN_TOTAL: usize = 1024;
/// Time after which a connection is closed unless it has authenticated.
pub const PROOF_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest first frame of a replica stream, which contains the token, in bytes.
pub const HELLO_BYTES_MAX: usize = 8 << 10;
/// Most replica streams to one node, regardless of who opened them.
pub const REPLICA_STREAMS_MAX: usize = 8192;
/// Most bytes of headers in one HTTP request.
pub const HTTP_HEADER_BYTES_MAX: usize = 16 << 10;
/// Most concurrent requests on one HTTP/2 connection.
pub const HTTP_STREAMS_MAX: u32 = 64;
/// Most bytes in a process-group store: all keys and values, pending waits for keys, and data in
/// transit.
pub const STORE_BYTES_MAX: u64 = 4 << 30;
/// Most bytes of keys in one request to the process-group store.
pub const STORE_REQUEST_BYTES_MAX: u64 = 64 << 20;
/// Time after which a client of the process-group store is given up that neither completes its
/// request nor takes the answer. By then, torch's clients give up, too.
pub const STORE_REQUEST_TIMEOUT: Duration = Duration::from_mins(5);
/// Most concurrent clients of the process-group store.
pub const STORE_CLIENTS_MAX: usize = 1 << 17;
/// Most concurrent connections that the process-group store forwards to the coordinator.
pub const STORE_FORWARDED_MAX: usize = 1 << 16;
/// Most concurrent connections of workers to their agent.
pub const WORKER_CONNECTIONS_MAX: usize = 4096;
/// Most slots that a worker may request.
pub const SLOTS_MAX: u32 = 8;
/// Most steps that a rank may offer to restore.
pub const OFFERS_MAX: usize = 4096;
/// Most copies, or shards of a group, that a worker may request.
pub const REDUNDANCY_MAX: u32 = 99;
/// Largest step number.
pub const STEP_MAX: u64 = u64::MAX >> 1;
/// Longest slot that a worker may request, in bytes.
pub const SLOT_BYTES_MAX: u64 = REGION_BYTES_MAX + INDEX_BYTES_MAX + (1 << 20);
/// Most steps from one snapshot to the next.
pub const SNAPSHOT_EVERY_MAX: u64 = (1 << 20) - 1;
