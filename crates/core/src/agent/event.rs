//! Everything that can happen to an agent: a closed list.

use super::observation::Observation;
use crate::id::{Epoch, Generation, Rank, Step};
use crate::message::{
    Checked, ExitReason, Holdings, Order, Outcome, RankOffers, Redundancy, ShardWritten, Sign, SnapshotInterval,
    Unreadable,
};

/// What a process reported about its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// The exception or the last line on stderr, shortened, for people.
    pub message: String,
    /// All that is kept of its output: the exception with the traceback, and the last lines on
    /// stderr.
    pub text: String,
}

/// Prefixes of what the C++ runtime and Python print when a process crashes.
const OF_A_CRASH: [&str; 2] = ["terminate called", "Fatal Python error"];

impl Words {
    /// Removes what a crash printed, for a process that ended for another reason.
    #[must_use]
    pub fn without_crash(self) -> Self {
        let kept = |text: &str| {
            let lines = text.lines().filter(|l| !OF_A_CRASH.iter().any(|c| l.starts_with(c)));
            lines.collect::<Vec<_>>().join("\n")
        };
        Words { message: kept(&self.message), text: kept(&self.text) }
    }
}

impl From<String> for Words {
    /// Uses the message as the full text, too.
    fn from(message: String) -> Self {
        Words { text: message.clone(), message }
    }
}

/// The end of a worker process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerExit {
    /// Rank of the worker on this node.
    pub local_rank: u32,
    /// Process id of the worker.
    pub pid: u32,
    /// Exit code or signal of the process.
    pub outcome: Outcome,
    /// Whether it had been asked to end, by a signal.
    pub asked: bool,
    /// What it reported about its end.
    pub words: Words,
}

/// An input of [`super::Agent::handle`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A connection to a coordinator is open, and the driver has sent [`super::Agent::hello`] on
    /// it.
    Connected,
    /// The connection was lost. The driver keeps trying to open another one.
    Disconnected,
    /// The coordinator's process exists on this machine but does not run (it is stopped or frozen),
    /// so it decides nothing.
    CoordinatorStuck,
    /// An order from the coordinator arrived.
    Order {
        /// Life of the coordinator that sent it.
        epoch: Epoch,
        /// The order to carry out.
        order: Order,
    },
    /// Something happened to the workers of this generation, or one of them asked for something.
    Crew(Generation, CrewEvent),
    /// The machine shows a problem: a line in the kernel log, or an event of a device.
    Signed(Sign),
    /// [`super::command::Command::Check`] has completed.
    Checked(Checked),
    /// Something outside refuses this job, such as a checkpoint directory that another job owns.
    Refused(ExitReason),
    /// The agent process received a signal.
    Signal {
        /// Number of the signal.
        signal: i32,
    },
    /// The deadline of the agent has passed.
    Tick,
}

/// What can happen to the workers of one generation. An event of a generation that is gone changes
/// nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CrewEvent {
    /// A worker process ended. Occurs exactly once per worker.
    WorkerExited(WorkerExit),
    /// A worker raised an exception that is not caught: it is shutting itself down.
    WorkerRaised {
        /// Its rank on this node.
        local_rank: u32,
        /// Process id of the worker.
        pid: u32,
        /// The exception, with its traceback.
        words: Words,
    },
    /// A worker process could not be started.
    SpawnFailed {
        /// Its rank on this node.
        local_rank: u32,
        /// Why it could not be started.
        message: String,
    },
    /// No process of this generation is left on the node, nor any that such a process started.
    WorkersGone {
        /// Port of a fresh process-group store.
        store_port: u16,
    },
    /// What the step board and /proc show of a worker.
    Sample {
        /// Its rank on this node.
        local_rank: u32,
        /// Process id of the worker.
        pid: u32,
        /// State of the worker at this time.
        seen: Observation,
    },
    /// The contents of this node's memory at the start of the generation.
    Holds(Holdings),
    /// The shards that a worker could restore.
    Offers(RankOffers),
    /// A rank could not read the shard that it was told to restore.
    RestoreFailed(Rank, Unreadable),
    /// A rank could not fetch the shard that it was told to restore; it may be intact.
    FetchFailed(Rank, Unreadable),
    /// A worker has sealed a step in memory.
    Sealed {
        /// Its rank on this node.
        local_rank: u32,
        /// The step that was sealed.
        step: Step,
        /// The redundancy wanted in addition to the worker's own shard.
        wish: Redundancy,
    },
    /// [`super::command::CrewCommand::Replicate`] has completed.
    Replicated {
        /// The step that now has all its replicas; `None`: replication failed.
        step: Option<Step>,
        /// Digest of each rank's state by local rank, where all ranks should hold the same.
        digests: Vec<(u32, u64)>,
        /// Round of the command.
        round: u64,
    },
    /// A worker's shard is on durable storage.
    ShardWritten(ShardWritten),
    /// This node made the checkpoint of this step visible.
    Published(Step),
    /// A worker reports that a durable checkpoint is due.
    PersistDue,
    /// A worker reports that the interval between snapshots should change.
    SnapshotEvery(SnapshotInterval),
}
