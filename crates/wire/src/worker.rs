//! Messages between a worker and its agent, as frames on the agent's Unix socket. The agent answers
//! each of the worker's requests exactly once.

use crate::limits::{OFFERS_MAX, REDUNDANCY_MAX, SLOT_BYTES_MAX, SLOTS_MAX, SNAPSHOT_EVERY_MAX, STEP_MAX};
use everstep_core::id::{Generation, Rank, RunId, Step};
use everstep_core::message::{Offers, Redundancy, Tier};
use serde::{Deserialize, Serialize};

/// A request from a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Reserve pre-faulted slots in the arena.
    Reserve {
        /// Generation of the worker.
        generation: Generation,
        /// Rank on the node.
        local_rank: u32,
        /// Bytes per slot, superblock included.
        slot_bytes: u64,
        /// Number of slots.
        slots: u32,
    },
    /// Decide which step all ranks restore.
    Restore {
        /// Generation of the worker.
        generation: Generation,
        /// Global rank.
        rank: Rank,
        /// Shards that this rank could restore.
        offers: Offers,
    },
    /// Repair damaged chunks of a slot from a copy.
    Heal {
        /// Generation of the worker.
        generation: Generation,
        /// Global rank.
        rank: Rank,
        /// File of the slot.
        path: String,
        /// Indices of the damaged chunks.
        chunks: Vec<usize>,
    },
    /// Report that the step to restore could not be read.
    RestoreFailed {
        /// Generation of the worker.
        generation: Generation,
        /// Global rank.
        rank: Rank,
        /// The step.
        step: Step,
        /// The tier it was to be read from.
        tier: Tier,
    },
    /// Announce that this worker seals steps in memory, and that other nodes should keep copies.
    Replicas {
        /// Generation of the worker.
        generation: Generation,
        /// Rank on the node.
        local_rank: u32,
        /// What the slots' labels are derived from: the directory's identity and the kind of state.
        run: String,
        /// The redundancy to maintain.
        wish: Redundancy,
    },
    /// Wait until a step is on durable storage.
    AwaitDurable {
        /// Generation of the worker.
        generation: Generation,
        /// The step.
        step: Step,
    },
    /// Set where and how this rank's sealed slots are persisted.
    Persist {
        /// Generation of the worker.
        generation: Generation,
        /// Rank on the node.
        local_rank: u32,
        /// Global rank.
        rank: Rank,
        /// The user's checkpoint directory.
        directory: String,
        /// Identity of the directory.
        run: RunId,
        /// Number of newest published checkpoints to keep.
        keep: u32,
        /// Also keep the first checkpoint of every such span, in seconds; 0 for none.
        keep_every: u64,
        /// Also keep the checkpoints of epoch boundaries.
        keep_epochs: bool,
        /// Most bytes per second; 0 for no limit.
        bandwidth: u64,
        /// Use exactly the names that the user gave, without a branch.
        #[serde(default)]
        exactly: bool,
    },
    /// Report that a durable checkpoint is due.
    PersistDue {
        /// Generation of the worker.
        generation: Generation,
    },
    /// Change the snapshot interval, because the cost of snapshots has changed.
    SnapshotEvery {
        /// Generation of the worker.
        generation: Generation,
        /// Steps from one snapshot to the next.
        every: u64,
    },
    /// Report an exception that left the training function.
    Error {
        /// Generation of the worker.
        generation: Generation,
        /// Rank on the node.
        local_rank: u32,
        /// Type and text of the exception, on one line.
        message: String,
        /// The traceback, if the exception is uncaught and the process will end.
        #[serde(default)]
        uncaught: Option<String>,
    },
}

impl Request {
    /// Returns the generation of the worker that asks.
    #[must_use]
    pub fn generation(&self) -> Generation {
        match self {
            Request::Reserve { generation, .. }
            | Request::Restore { generation, .. }
            | Request::AwaitDurable { generation, .. }
            | Request::Persist { generation, .. }
            | Request::PersistDue { generation }
            | Request::SnapshotEvery { generation, .. }
            | Request::Heal { generation, .. }
            | Request::RestoreFailed { generation, .. }
            | Request::Replicas { generation, .. }
            | Request::Error { generation, .. } => *generation,
        }
    }

    /// Checks that every number is within its limit, before the request is carried out.
    ///
    /// # Errors
    /// A message that names the number and its limit.
    pub fn check(&self) -> Result<(), String> {
        let within = |what: &str, value: u64, most: u64| {
            if value <= most { Ok(()) } else { Err(format!("{what} {value} is over the limit of {most}")) }
        };
        match self {
            Request::Reserve { slot_bytes, slots, .. } => {
                within("the number of slots", u64::from(*slots), u64::from(SLOTS_MAX))?;
                within("a slot's length", *slot_bytes, SLOT_BYTES_MAX)
            }
            Request::Restore { offers, .. } => {
                within("the number of offers", offers.held.len() as u64, OFFERS_MAX as u64)?;
                let steps = offers.held.iter().map(|o| o.step).chain(offers.wanted);
                steps.into_iter().try_for_each(|step| within("step", step.0, STEP_MAX))
            }
            Request::Replicas { wish, .. } => {
                within("the number of copies", u64::from(wish.replicas), u64::from(REDUNDANCY_MAX))?;
                within("the number of shards", u64::from(wish.data), u64::from(REDUNDANCY_MAX))
            }
            Request::RestoreFailed { step, .. } | Request::AwaitDurable { step, .. } => {
                within("step", step.0, STEP_MAX)
            }
            Request::SnapshotEvery { every, .. } => within("the number of steps", *every, SNAPSHOT_EVERY_MAX),
            Request::Heal { .. } | Request::Persist { .. } | Request::PersistDue { .. } | Request::Error { .. } => {
                Ok(())
            }
        }
    }
}

/// A reply from the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The request was carried out.
    Done,
    /// The slots are reserved and ready to be mapped.
    Slots {
        /// Files of the slots.
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
        /// Some rank has found checkpoints: without a step, nobody starts fresh.
        #[serde(default)]
        found: bool,
    },
    /// The request is not possible.
    Refused {
        /// The reason and the remedy, for the user.
        why: String,
    },
}
