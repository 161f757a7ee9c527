//! Every limit on input, checked before anything is allocated.

use std::time::Duration;

/// Longest frame on a unix socket, and longest line on a held stream, in bytes.
pub const FRAME_BYTES_MAX: usize = 1 << 20;
/// Longest frame between an agent and its guard, in bytes. The kernel takes 6 MiB of arguments and environment at most;
/// bytes that are not UTF-8 take up to four times their size in a frame.
pub const LAUNCH_FRAME_BYTES_MAX: usize = 64 << 20;
/// Longest key of the process-group store, in bytes.
pub const STORE_KEY_BYTES_MAX: u64 = 1 << 16;
/// Longest value of the process-group store, in bytes.
pub const STORE_VALUE_BYTES_MAX: u64 = 64 << 20;
/// Most keys in one request to the process-group store.
pub const STORE_KEYS_MAX: u64 = 1 << 16;
/// Longest manifest of a checkpoint, in bytes.
pub const MANIFEST_BYTES_MAX: u64 = 64 << 20;
/// Most forks in the lineage of a checkpoint; older ones are forgotten.
pub const LINEAGE_FORKS_MAX: usize = 256;
/// Longest header of a safetensors file, in bytes (the format's own limit).
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Longest side index of a slot, in bytes.
pub const INDEX_BYTES_MAX: u64 = 256 << 20;
/// Longest region of a shard, wherever it is, in bytes.
pub const REGION_BYTES_MAX: u64 = 1 << 44;
/// Tensors in a checkpoint have no more dimensions.
pub const TENSOR_DIMENSIONS_MAX: usize = 64;
/// Longest name of a job or node.
pub const NAME_BYTES_MAX: usize = 63;
/// Events that a coordinator keeps in memory while they cannot be written, in bytes.
pub const EVENTS_KEPT_BYTES_MAX: usize = 4 << 20;
/// A connection attempt is given up after this.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest token, in bytes.
pub const TOKEN_BYTES_MAX: u64 = 4096;
/// Longest small file of everstep's own that is read whole, beside checkpoints or elsewhere, in bytes.
pub const NOTE_BYTES_MAX: u64 = 1 << 20;
/// Connections of one other user of this machine that have proven nothing yet, per port.
pub const UNPROVEN_PER_USER: usize = 16;
/// The same of one other machine: a node's ranks come at once.
pub const UNPROVEN_PER_MACHINE: usize = 256;
/// The same of all users and machines but this user, per port.
pub const UNPROVEN_TOTAL: usize = 1024;
/// A connection that has not proven by then that it may be here is closed.
pub const PROOF_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest first frame of a replica stream, with the token, in bytes.
pub const HELLO_BYTES_MAX: usize = 8 << 10;
/// Replica streams of one holder, whoever has opened them.
pub const REPLICA_STREAMS_MAX: usize = 8192;
/// Bytes of headers of one HTTP request.
pub const HTTP_HEADER_BYTES_MAX: usize = 16 << 10;
/// Requests under way on one HTTP/2 connection.
pub const HTTP_STREAMS_MAX: u32 = 64;
/// Bytes of all keys and values of a process-group store, of those that wait for keys, and of what is on its way.
pub const STORE_BYTES_MAX: u64 = 4 << 30;
/// Bytes of the keys of one request to the process-group store.
pub const STORE_REQUEST_BYTES_MAX: u64 = 64 << 20;
/// Clients of the process-group store at once.
pub const STORE_CLIENTS_MAX: usize = 1 << 17;
/// Connections of workers to their agent at once.
pub const WORKER_CONNECTIONS_MAX: usize = 4096;
/// Slots that a worker may ask for.
pub const SLOTS_MAX: u32 = 8;
/// Steps that a rank may offer to restore.
pub const OFFERS_MAX: usize = 4096;
/// Copies, or shards of a group, that a worker may ask for.
pub const REDUNDANCY_MAX: u32 = 99;
/// Largest step number.
pub const STEP_MAX: u64 = u64::MAX >> 1;
/// Longest slot that a worker may ask for, in bytes.
pub const SLOT_BYTES_MAX: u64 = REGION_BYTES_MAX + INDEX_BYTES_MAX + (1 << 20);
/// Most steps from one snapshot to the next.
pub const SNAPSHOT_EVERY_MAX: u64 = (1 << 20) - 1;
