//! Why a node refuses what another node sends.

use std::io;

/// See the module. The other node is sent its text.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The index of a shard is no index.
    #[error("index: {0}")]
    Index(#[from] serde_json::Error),
    /// The index describes another region.
    #[error("the index does not fit its region")]
    Region,
    /// It is of another run.
    #[error("it belongs to another run; give all nodes of a job the same checkpoint directory")]
    OtherRun,
    /// A later generation has begun.
    #[error("generation {0} is over")]
    Over(u64),
    /// A parity shard is longer than any may be.
    #[error("a parity shard over the limit")]
    ParityTooLong,
    /// This node has no directory for slots.
    #[error("no memory on this node")]
    NoMemory,
    /// All slots hold the step to go back to.
    #[error("no slot")]
    NoSlot,
    /// Somebody uses the slot.
    #[error("the slot is still needed")]
    SlotNeeded,
    /// Memory is short.
    #[error("a replica of {} MiB does not fit into this node's shared memory ({} MiB free)", need >> 20, free >> 20)]
    TooLittleMemory {
        /// Bytes of the slot.
        need: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// A shard is longer than its slot.
    #[error("the shard is larger than its slot")]
    ShardTooLong,
    /// A parity shard is longer than its slot.
    #[error("the parity shard is larger than its slot")]
    ParityLongerThanSlot,
    /// Parts of a parity shard have not come, or are not what its description says.
    #[error("the parity shard is not complete")]
    Incomplete,
    /// More chunks than this machine can count.
    #[error(transparent)]
    Length(#[from] std::num::TryFromIntError),
    /// The slot, or a description that is to go into it.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A thread that had the list of what arrives has panicked.
    #[error("{0}")]
    Poisoned(String),
}

impl<T> From<std::sync::PoisonError<T>> for Refusal {
    fn from(e: std::sync::PoisonError<T>) -> Self {
        Refusal::Poisoned(e.to_string())
    }
}
