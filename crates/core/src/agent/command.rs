//! Everything an agent may ask of its node: a closed list.

use crate::id::{Generation, Rank, Step};
use crate::message::{Partner, Place, Replication, Report, ShardFile, Source};
use crate::time::Time;
use std::time::Duration;

/// An output of [`super::Agent::poll`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Say something to the coordinator; lost when there is no connection.
    Send(Report),
    /// Start this node's workers.
    Spawn {
        /// their generation
        generation: Generation,
        /// this node's part in the world
        place: Place,
        /// restarts used so far
        restarts: u32,
        /// restarts allowed
        max_restarts: u32,
    },
    /// End every process of this generation: TERM, after `grace` KILL, until none is left of
    /// whatever the workers started; then [`super::event::Event::WorkersGone`].
    Kill {
        /// their generation
        generation: Generation,
        /// time between TERM and KILL
        grace: Duration,
    },
    /// Ask the workers where they are, and tell the coordinator.
    Stacks {
        /// their generation
        generation: Generation,
    },
    /// Show that this machine works; then [`super::event::Event::Checked`].
    Check {
        /// which check
        check: Time,
        /// its round
        round: u32,
        /// measure the machine first
        measure: bool,
        /// then run a collective with each of these, at the same time
        partners: Vec<Partner>,
    },
    /// Pass a signal to the workers.
    Forward {
        /// its number
        signal: i32,
    },
    /// The job is stopping: workers that ask may go on to the end of this step.
    StopAt {
        /// number of the signal behind it
        signal: i32,
        /// the step; `None`: stop at once
        step: Option<Step>,
    },
    /// Workers persist the snapshot of this step.
    PersistAt {
        /// the step
        step: Step,
    },
    /// Workers capture multiples of `every` from this step on.
    SnapshotEvery {
        /// first step
        from: Step,
        /// steps
        every: u64,
    },
    /// Workers wait at the end of this step for the next world; `None`: they go on.
    HoldAt {
        /// the step
        step: Option<Step>,
    },
    /// Show people a sentence.
    Say {
        /// the sentence
        what: String,
    },
    /// Have a process with torch imported ready for the next start.
    Warm,
    /// Tell the workers which step to restore.
    Restore {
        /// their generation
        generation: Generation,
        /// the step
        step: Option<Step>,
        /// where to read it, by local rank
        sources: Vec<Source>,
        /// make it durable, too
        persist: bool,
    },
    /// Bring the keepers the first step from `from` on that all workers have sealed, or compute its parity; answer with
    /// `Replicated`. Other steps of this generation need not stay, but for `base`.
    Replicate {
        /// generation that captured it
        generation: Generation,
        /// the step
        from: Step,
        /// to whom, or of whose shards
        plan: Replication,
        /// the step that everybody would go back to now: the newest that is held by all, or what was restored
        base: Option<Step>,
        /// goes into the answer
        round: u64,
    },
    /// This step is held by all nodes with all its replicas: it stays, older ones need not.
    Committed {
        /// generation that captured it
        generation: Generation,
        /// the step
        step: Step,
        /// ranks whose replicas stay on this node
        keeps: Vec<Rank>,
        /// stripes whose parity shards stay on this node
        keeps_parity: Vec<u32>,
    },
    /// Write a manifest and make a checkpoint visible; answer with `Published`.
    Publish {
        /// generation that wrote the shards
        generation: Generation,
        /// the step
        step: Step,
        /// the user's directory
        directory: String,
        /// one per rank
        shards: Vec<ShardFile>,
    },
    /// A checkpoint is durable: release its slots and whoever waits for it.
    Durable {
        /// generation that wrote it
        generation: Generation,
        /// the step
        step: Step,
    },
    /// End this agent.
    Exit {
        /// exit code
        code: i32,
        /// what happened, for the user
        why: String,
        /// memory checkpoints of the job are of no use any more
        discard_memory: bool,
    },
}
