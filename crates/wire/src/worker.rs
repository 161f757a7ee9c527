//! What a worker and its agent say to each other on the agent's unix socket, as frames.
//! The worker asks, the agent answers each request exactly once.

use everstep_core::id::{Generation, Rank, Step};
use everstep_core::message::{Offer, Tier};
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
        /// verified shards, newest first
        offers: Vec<Offer>,
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
        /// published checkpoints that are kept
        keep: u32,
    },
    /// Time for a durable checkpoint.
    PersistDue {
        /// who
        generation: Generation,
    },
    /// An exception left the training function.
    Error {
        /// who
        generation: Generation,
        /// rank on the node
        local_rank: u32,
        /// type and text, one line
        message: String,
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
    },
    /// Not possible; the text says what to do.
    Refused {
        /// a sentence for the user
        why: String,
    },
}
