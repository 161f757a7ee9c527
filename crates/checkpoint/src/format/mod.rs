//! Meaning of the bytes: pure, no I/O.

pub mod digest;
pub mod dtype;
pub mod index;
pub mod manifest;
pub mod mark;
pub mod readable;
pub mod shard;
pub mod tensor_parts;
