//! Messages between a worker and its agent, as frames on the agent's Unix socket. The agent answers
//! each of the worker's requests exactly once.

use crate::limits::{OFFERS_MAX, REDUNDANCY_MAX, SLOT_BYTES_MAX, SLOTS_MAX, SNAPSHOT_EVERY_MAX, STEP_MAX};
use everstep_core::id::{Generation, Rank, RunId, Step};
use everstep_core::message::{Offers, Redundancy, SnapshotInterval, Tier, Unreadable};
use serde::{Deserialize, Serialize};

/// A request from a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The worker that sends the request.
    pub from: WorkerId,
    /// The request itself.
    pub ask: Ask,
}

/// A worker, as it introduces itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerId {
    /// Generation of the worker.
    pub generation: Generation,
    /// Global rank of the worker.
    pub rank: Rank,
    /// Rank of the worker on its node.
    pub local_rank: u32,
}

/// What a worker asks for, or reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Reserve pre-faulted slots in the arena.
    Reserve {
        /// Bytes per slot, superblock included.
        slot_bytes: u64,
        /// Number of slots.
        slots: u32,
    },
    /// Decide which step all ranks restore. These are the shards that this rank could restore.
    Restore(Offers),
    /// Repair damaged chunks of a slot from a copy.
    Heal {
        /// Path of the slot's file.
        path: String,
        /// Indices of the damaged chunks.
        chunks: Vec<usize>,
    },
    /// Report that the step to restore could not be read.
    RestoreFailed(Unreadable),
    /// Announce that this worker seals steps in memory, and that other nodes should keep copies.
    Replicas {
        /// What the slots' labels are derived from: the directory's identity and the kind of state.
        run: String,
        /// The redundancy to maintain.
        wish: Redundancy,
    },
    /// Wait until this step is on durable storage.
    AwaitDurable(Step),
    /// Set where and how this rank's sealed slots are persisted.
    Persist(Persist),
    /// Report that a durable checkpoint is due.
    PersistDue,
    /// Change the snapshot interval, because the cost of snapshots has changed.
    SnapshotEvery(SnapshotInterval),
    /// Report an exception that left the training function.
    Error {
        /// Type and text of the exception, on one line.
        message: String,
        /// The traceback, if the exception is uncaught and the process will end.
        #[serde(default)]
        uncaught: Option<String>,
    },
}

/// A number in a request that is over its limit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {value} is over the limit of {most}")]
pub struct OverLimit {
    what: &'static str,
    value: u64,
    most: u64,
}

/// Where and how a rank's sealed slots are persisted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Persist {
    /// Path or URL of the user's checkpoint directory.
    pub directory: String,
    /// Identity of the directory.
    pub run: RunId,
    /// Number of newest published checkpoints to keep.
    pub keep: u32,
    /// Also keep the first checkpoint of every such span, in seconds; 0 for none.
    pub keep_every: u64,
    /// Also keep the checkpoints of epoch boundaries.
    pub keep_epochs: bool,
    /// Most bytes per second; 0 for no limit.
    pub bandwidth: u64,
    /// Use exactly the names that the user gave, without a branch.
    #[serde(default)]
    pub exactly: bool,
}

impl Ask {
    /// Checks that every number is within its limit, before the request is carried out.
    ///
    /// # Errors
    /// [`OverLimit`].
    pub fn check(&self) -> Result<(), OverLimit> {
        let within = |what: &'static str, value: u64, most: u64| {
            if value <= most { Ok(()) } else { Err(OverLimit { what, value, most }) }
        };
        match self {
            Ask::Reserve { slot_bytes, slots } => {
                within("the number of slots", u64::from(*slots), u64::from(SLOTS_MAX))?;
                within("a slot's length", *slot_bytes, SLOT_BYTES_MAX)
            }
            Ask::Restore(offers) => {
                within("the number of offers", offers.held.len() as u64, OFFERS_MAX as u64)?;
                let steps = offers.held.iter().map(|o| o.step).chain(offers.wanted);
                steps.into_iter().try_for_each(|step| within("step", step.0, STEP_MAX))
            }
            Ask::Replicas { wish, .. } => {
                within("the number of copies", u64::from(wish.replicas), u64::from(REDUNDANCY_MAX))?;
                within("the number of shards", u64::from(wish.data), u64::from(REDUNDANCY_MAX))
            }
            Ask::RestoreFailed(Unreadable { step, .. }) | Ask::AwaitDurable(step) => within("step", step.0, STEP_MAX),
            Ask::SnapshotEvery(every) => within("the number of steps", every.0, SNAPSHOT_EVERY_MAX),
            Ask::Heal { .. } | Ask::Persist(_) | Ask::PersistDue | Ask::Error { .. } => Ok(()),
        }
    }
}

/// A reply from the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The request was carried out.
    Done,
    /// This job owns the directory to write checkpoints to.
    Owned {
        /// Which ownership of the directory it is.
        epoch: u64,
    },
    /// The slots are reserved and ready to be mapped.
    Slots {
        /// Paths of the slots' files.
        paths: Vec<String>,
        /// Set if memory was too small and a directory on disk is used instead.
        warning: Option<String>,
    },
    /// The step that all ranks restore.
    Restore {
        /// The step; `None`: there is none that all ranks can restore.
        step: Option<Step>,
        /// The tier from which this rank reads it.
        tier: Option<Tier>,
        /// The slot into which the agent has fetched it, if any.
        path: Option<String>,
        /// Whether some rank has found checkpoints: without a step, no rank starts fresh.
        #[serde(default)]
        found: bool,
    },
    /// The request is not possible.
    Refused {
        /// The reason and the remedy, for the user.
        why: String,
    },
}
