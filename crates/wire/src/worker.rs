//! What a worker and its agent say to each other on the agent's unix socket, as frames.
//! The worker asks, the agent answers each request exactly once.

use everstep_core::id::{Generation, Rank, RunId, Step};
use everstep_core::message::{Offer, Redundancy, Tier};
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
        /// shards, newest first
        offers: Vec<Offer>,
        /// every rank holds the same
        shared: bool,
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
