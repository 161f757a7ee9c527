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
