//! Everything that can happen to an agent: a closed list.

use super::observation::Observation;
use crate::id::{Epoch, Generation, Rank, Step};
use crate::message::{Checked, Holding, Offers, Order, Outcome, Parity, Redundancy, ShardFile, Sign, Tier};

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
        /// The order.
        order: Order,
    },
    /// A worker process ended. Occurs exactly once per worker.
    WorkerExited {
        /// Generation of the worker.
        generation: Generation,
        /// Its rank on this node.
        local_rank: u32,
        /// Its process id.
        pid: u32,
        /// How it ended.
        outcome: Outcome,
        /// It had been asked to end, by a signal.
        asked: bool,
        /// What it reported about its end.
        words: Words,
    },
    /// A worker raised an exception that is not caught: it is shutting itself down.
    WorkerRaised {
        /// Generation of the worker.
        generation: Generation,
        /// Its rank on this node.
        local_rank: u32,
        /// Its process id.
        pid: u32,
        /// The exception.
        words: Words,
    },
    /// The machine shows a problem: a line in the kernel log, or an event of a device.
    Signed(Sign),
    /// [`super::command::Command::Check`] has completed.
    Checked(Checked),
    /// A worker process could not be started.
    SpawnFailed {
        /// Generation of the worker.
        generation: Generation,
        /// Its rank on this node.
        local_rank: u32,
        /// Why it could not be started.
        message: String,
    },
    /// No process of this generation is left on the node, nor any that such a process started.
    WorkersGone {
        /// Generation of the workers.
        generation: Generation,
        /// Port of a fresh process-group store.
        store_port: u16,
    },
    /// What the step board and /proc show of a worker.
    Sample {
        /// Generation of the worker.
        generation: Generation,
        /// Its rank on this node.
        local_rank: u32,
        /// Its process id.
        pid: u32,
        /// The observation.
        seen: Observation,
    },
    /// The contents of this node's memory at the start of a generation.
    Holds {
        /// The generation.
        generation: Generation,
        /// Shards of its own ranks, and copies of others'.
        held: Vec<Holding>,
        /// Parity shards.
        parity: Vec<Parity>,
    },
    /// The shards that a worker could restore.
    Offers {
        /// Generation of the worker.
        generation: Generation,
        /// Its global rank.
        rank: Rank,
        /// Its offers.
        offers: Offers,
    },
    /// A rank could not read the shard that it was told to restore.
    RestoreFailed {
        /// Generation of the rank.
        generation: Generation,
        /// The rank.
        rank: Rank,
        /// The step to restore.
        step: Step,
        /// The tier it was to be read from.
        tier: Tier,
    },
    /// A worker has sealed a step in memory.
    Sealed {
        /// Generation of the worker.
        generation: Generation,
        /// Its rank on this node.
        local_rank: u32,
        /// The step.
        step: Step,
        /// The redundancy wanted in addition to the worker's own shard.
        wish: Redundancy,
    },
    /// [`super::command::Command::Replicate`] has completed.
    Replicated {
        /// Generation that captured the step.
        generation: Generation,
        /// The step that now has all its replicas; `None`: replication failed.
        step: Option<Step>,
        /// Digest of each rank's state by local rank, where all ranks should hold the same.
        digests: Vec<(u32, u64)>,
        /// Round of the command.
        round: u64,
    },
    /// A worker's shard is on durable storage.
    ShardWritten {
        /// Generation of the worker.
        generation: Generation,
        /// State after this many steps.
        step: Step,
        /// The user's directory.
        directory: String,
        /// The shard's file.
        shard: ShardFile,
    },
    /// This node made a checkpoint visible.
    Published {
        /// Generation that wrote it.
        generation: Generation,
        /// Step of the checkpoint.
        step: Step,
    },
    /// A worker reports that a durable checkpoint is due.
    PersistDue {
        /// Generation of the worker.
        generation: Generation,
    },
    /// A worker reports a new interval between snapshots.
    SnapshotEvery {
        /// Generation of the worker.
        generation: Generation,
        /// The interval in steps.
        every: u64,
    },
    /// Something outside refuses this job, such as a checkpoint directory that another job owns.
    Refused {
        /// Exit code.
        code: i32,
        /// A sentence for the user.
        why: String,
    },
    /// The agent process received a signal.
    Signal {
        /// Number of the signal.
        signal: i32,
    },
    /// The deadline passed.
    Tick,
}
