//! Everything an agent may ask its driver to do: a closed list.

use super::first_error::FirstError;
use crate::id::{Generation, Rank, Step};
use crate::message::{Check, ExitReason, Publish, Replication, Report, Restore, Round, SnapshotEvery, Start, Stop};
use std::time::Duration;

/// An output of [`super::Agent::poll`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Send a report to the coordinator. It is lost if there is no connection.
    Send(Report),
    /// Do something for the workers of this generation.
    Crew(Generation, CrewCommand),
    /// Test this machine. Answer with [`super::event::Event::Checked`].
    Check(Check),
    /// Pass a signal to the workers.
    Forward {
        /// Number of the signal that the agent process received.
        signal: i32,
    },
    /// Print a message for people.
    Say {
        /// One sentence for the node's console.
        what: String,
    },
    /// Keep a process with torch imported ready for the next start.
    Warm,
    /// End this agent.
    Exit {
        /// Exit code and cause of the end.
        reason: ExitReason,
        /// Whether the job's checkpoints in memory are no longer needed.
        discard_memory: bool,
        /// The error that is passed on, if a worker of this node has failed.
        first_error: Option<FirstError>,
    },
}

/// An action for the workers of one generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CrewCommand {
    /// Start this node's workers.
    Spawn(Start),
    /// End every process of the generation with TERM, then KILL after `grace`, until nothing that
    /// the workers started is left. Answer with [`super::event::CrewEvent::WorkersGone`].
    Kill {
        /// Time between TERM and KILL.
        grace: Duration,
    },
    /// Collect the workers' stacks and send them to the coordinator.
    Stacks,
    /// The job is stopping: workers that ask may continue to the end of the step.
    StopAt(Stop),
    /// Tell the workers to persist the snapshot of this step.
    PersistAt(Step),
    /// Tell the workers to change the interval between snapshots.
    SnapshotEvery(SnapshotEvery),
    /// Tell the workers to wait at the end of this step for the next world; `None`: to continue.
    HoldAt(Option<Step>),
    /// Tell the workers which step to restore. Without a step, they start fresh, unless checkpoints
    /// were found.
    Restore(Restore),
    /// Send the step of a round to the keepers, or compute its parity. Answer with `Replicated`.
    /// Other steps of this generation may be dropped, except `base`.
    Replicate {
        /// Where to send replicas, or which stripes to compute.
        plan: Replication,
        /// Number of the round, and the step to replicate in it.
        round: Round,
        /// The step to which all ranks would go back now: the newest committed one, or the restored
        /// one.
        base: Option<Step>,
    },
    /// All nodes hold this step with all its replicas: keep it; older ones may be dropped.
    Committed {
        /// The newest step that all nodes have with its replicas.
        step: Step,
        /// Ranks whose replicas this node keeps.
        keeps: Vec<Rank>,
        /// Stripes whose parity shards this node keeps.
        keeps_parity: Vec<u32>,
    },
    /// All nodes hold this step, whether or not this node's workers are gone already: it is what is
    /// persisted if the job ends now.
    HeldByAll(Step),
    /// Write a manifest and make a checkpoint visible. Answer with `Published`.
    Publish(Publish),
    /// The checkpoint of this step is durable: release its slots and those who wait for it.
    Durable(Step),
}
