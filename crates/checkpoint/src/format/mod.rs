//! What the bytes mean: pure, no I/O.

pub mod digest;
pub mod manifest;
pub mod mark;
pub mod shard;
