//! What a worker and its agent say to each other on the agent's unix socket, as frames.
//! The worker asks, the agent answers each request exactly once.

use crate::limits::{OFFERS_MAX, REDUNDANCY_MAX, SLOT_BYTES_MAX, SLOTS_MAX, SNAPSHOT_EVERY_MAX, STEP_MAX};
use everstep_core::id::{Generation, Rank, RunId, Step};
use everstep_core::message::{Offers, Redundancy, Tier};
use serde::{Deserialize, Serialize};

/// From a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Make room in the arena: slots of this size, pre-faulted.
    Reserve {
        /// who
        generation: Generation,
        /// rank on the node
        local_rank: u32,
        /// bytes per slot, superblock included
        slot_bytes: u64,
        /// number of slots
        slots: u32,
    },
    /// Which step do all ranks restore?
    Restore {
        /// who
        generation: Generation,
        /// global rank
        rank: Rank,
        /// shards
        offers: Offers,
    },
    /// These chunks of a slot are damaged: bring them back from a copy.
    Heal {
        /// who
        generation: Generation,
        /// global rank
        rank: Rank,
        /// the slot's file
        path: String,
        /// numbers of the chunks
        chunks: Vec<usize>,
    },
    /// What was to be restored cannot be read.
    RestoreFailed {
        /// who
        generation: Generation,
        /// global rank
        rank: Rank,
        /// the step
        step: Step,
        /// where it was to come from
        tier: Tier,
    },
    /// This worker seals steps in memory, of which other nodes are to keep copies.
    Replicas {
        /// who
        generation: Generation,
        /// rank on the node
        local_rank: u32,
        /// what the slots' labels are made of: the directory's identity, and the kind of state
        run: String,
        /// what is to be kept of them
        wish: Redundancy,
    },
    /// Wait until this step is on durable storage.
    AwaitDurable {
        /// who
        generation: Generation,
        /// the step
        step: Step,
    },
    /// Where and how this rank's sealed slots are persisted.
    Persist {
        /// who
        generation: Generation,
        /// rank on the node
        local_rank: u32,
        /// global rank
        rank: Rank,
        /// the user's directory
        directory: String,
        /// its identity
        run: RunId,
        /// published checkpoints that are kept: so many of the newest
        keep: u32,
        /// and the first of every so many seconds; 0 for none
        keep_every: u64,
        /// and those of epoch boundaries
        keep_epochs: bool,
        /// bytes per second at most; 0 is no limit
        bandwidth: u64,
        /// under the very names that the user gave, in no branch
        #[serde(default)]
        exactly: bool,
    },
    /// Time for a durable checkpoint.
    PersistDue {
        /// who
        generation: Generation,
    },
    /// Snapshots have come to cost more or less: so many steps from one to the next.
    SnapshotEvery {
        /// who
        generation: Generation,
        /// steps
        every: u64,
    },
    /// An exception left the training function.
    Error {
        /// who
        generation: Generation,
        /// rank on the node
        local_rank: u32,
        /// type and text, one line
        message: String,
        /// with its traceback, if nobody catches it: the process takes itself down
        #[serde(default)]
        uncaught: Option<String>,
    },
}

impl Request {
    /// Every number is within its limit; before anything is done for it.
    ///
    /// # Errors
    /// A sentence.
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

/// From the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Done.
    Done,
    /// Slot files, ready to be mapped.
    Slots {
        /// paths
        paths: Vec<String>,
        /// set when memory was too small and a directory on disk is used instead
        warning: Option<String>,
    },
    /// The common step; `None` is a fresh start.
    Restore {
        /// the step
        step: Option<Step>,
        /// where this rank reads it
        tier: Option<Tier>,
        /// the slot that the agent has fetched it into
        path: Option<String>,
    },
    /// Not possible; the text says what to do.
    Refused {
        /// a sentence for the user
        why: String,
    },
}
