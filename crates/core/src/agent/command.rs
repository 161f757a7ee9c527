//! Everything an agent may ask its driver to do: a closed list.

use crate::id::{Generation, Rank, Step};
use crate::message::{Partner, Place, Replication, Report, ShardFile, Source};
use crate::time::Time;
use std::time::Duration;

/// An output of [`super::Agent::poll`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Send a report to the coordinator. It is lost if there is no connection.
    Send(Report),
    /// Start this node's workers.
    Spawn {
        /// Generation of the workers.
        generation: Generation,
        /// This node's place in the world.
        place: Place,
        /// Restarts used so far.
        restarts: u32,
        /// Restarts allowed.
        max_restarts: u32,
    },
    /// End every process of this generation with TERM, then KILL after `grace`, until nothing that
    /// the workers started is left. Answer with [`super::event::Event::WorkersGone`].
    Kill {
        /// Generation of the workers.
        generation: Generation,
        /// Time between TERM and KILL.
        grace: Duration,
    },
    /// Collect the workers' stacks and send them to the coordinator.
    Stacks {
        /// Generation of the workers.
        generation: Generation,
    },
    /// Test this machine. Answer with [`super::event::Event::Checked`].
    Check {
        /// The check, named by the time at which it began.
        check: Time,
        /// Round of the check.
        round: u32,
        /// Measure the machine first.
        measure: bool,
        /// Then run a collective with each of these nodes, all at the same time.
        partners: Vec<Partner>,
    },
    /// Pass a signal to the workers.
    Forward {
        /// Number of the signal.
        signal: i32,
    },
    /// The job is stopping: workers that ask may continue to the end of this step.
    StopAt {
        /// Number of the signal that stops the job.
        signal: i32,
        /// The step; `None`: stop at once.
        step: Option<Step>,
    },
    /// Tell the workers to persist the snapshot of this step.
    PersistAt {
        /// The step.
        step: Step,
    },
    /// Tell the workers to capture the multiples of `every` from this step on.
    SnapshotEvery {
        /// First step.
        from: Step,
        /// Interval in steps.
        every: u64,
    },
    /// Tell the workers to wait at the end of this step for the next world; `None`: to continue.
    HoldAt {
        /// The step.
        step: Option<Step>,
    },
    /// Print a message for people.
    Say {
        /// A sentence.
        what: String,
    },
    /// Keep a process with torch imported ready for the next start.
    Warm,
    /// Tell the workers which step to restore.
    Restore {
        /// Generation of the workers.
        generation: Generation,
        /// The step; `None`: a fresh start, unless checkpoints were found.
        step: Option<Step>,
        /// Sources to read it from, by local rank.
        sources: Vec<Source>,
        /// Also make it durable.
        persist: bool,
        /// Some rank has found checkpoints.
        found: bool,
    },
    /// Send the first step from `from` on that all workers have sealed to the keepers, or compute
    /// its parity. Answer with `Replicated`. Other steps of this generation may be dropped, except
    /// `base`.
    Replicate {
        /// Generation that captured the step.
        generation: Generation,
        /// First step that qualifies.
        from: Step,
        /// Where to send replicas, or which stripes to compute.
        plan: Replication,
        /// The step to which all ranks would go back now: the newest committed one, or the restored
        /// one.
        base: Option<Step>,
        /// Copied into the answer.
        round: u64,
    },
    /// All nodes hold this step with all its replicas: keep it; older ones may be dropped.
    Committed {
        /// Generation that captured the step.
        generation: Generation,
        /// The step.
        step: Step,
        /// Ranks whose replicas this node keeps.
        keeps: Vec<Rank>,
        /// Stripes whose parity shards this node keeps.
        keeps_parity: Vec<u32>,
    },
    /// Write a manifest and make a checkpoint visible. Answer with `Published`.
    Publish {
        /// Generation that wrote the shards.
        generation: Generation,
        /// The step.
        step: Step,
        /// The user's directory.
        directory: String,
        /// One file per rank.
        shards: Vec<ShardFile>,
    },
    /// A checkpoint is durable: release its slots and those who wait for it.
    Durable {
        /// Generation that wrote it.
        generation: Generation,
        /// The step.
        step: Step,
    },
    /// End this agent.
    Exit {
        /// Exit code.
        code: i32,
        /// What happened, for the user.
        why: String,
        /// The job's checkpoints in memory are no longer needed.
        discard_memory: bool,
    },
}
