//! Reasons for which a node refuses data from another node.

use std::io;

/// Reason of a refusal, whose text is sent to the other node.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The index of a shard is not valid.
    #[error("index: {0}")]
    Index(#[from] serde_json::Error),
    /// The index describes another region.
    #[error("the index does not fit its region")]
    Region,
    /// The shard is of another run.
    #[error("it belongs to another run; give all nodes of a job the same checkpoint directory")]
    OtherRun,
    /// A later generation has begun.
    #[error("generation {0} is over")]
    Over(u64),
    /// The parity shard is longer than any may be.
    #[error("a parity shard over the limit")]
    ParityTooLong,
    /// This node has no directory for slots.
    #[error("no memory on this node")]
    NoMemory,
    /// All slots are needed for the step that all ranks would go back to.
    #[error("no slot")]
    NoSlot,
    /// The slot is in use.
    #[error("the slot is still needed")]
    SlotNeeded,
    /// There is not enough memory.
    #[error("a replica of {} MiB does not fit into this node's shared memory ({} MiB free)", need >> 20, free >> 20)]
    TooLittleMemory {
        /// bytes of the slot
        need: u64,
        /// bytes that are free
        free: u64,
    },
    /// The shard is longer than its slot.
    #[error("the shard is larger than its slot")]
    ShardTooLong,
    /// The parity shard is longer than its slot.
    #[error("the parity shard is larger than its slot")]
    ParityLongerThanSlot,
    /// Parts of a parity shard have not arrived, or differ from its description.
    #[error("the parity shard is not complete")]
    Incomplete,
    /// More chunks than this machine can count.
    #[error(transparent)]
    Length(#[from] std::num::TryFromIntError),
    /// The slot, or a description for it, cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A thread that held the lock of the arriving shards has panicked.
    #[error("{0}")]
    Poisoned(String),
}

impl<T> From<std::sync::PoisonError<T>> for Refusal {
    fn from(e: std::sync::PoisonError<T>) -> Self {
        Refusal::Poisoned(e.to_string())
    }
}
