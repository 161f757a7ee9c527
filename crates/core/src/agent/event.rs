//! Everything that can happen to an agent: a closed list.

use super::watch::Observation;
use crate::id::{Epoch, Generation, Rank, Step};
use crate::message::{Checked, Holding, Offers, Order, Outcome, Parity, Redundancy, ShardFile, Sign, Tier};

/// What a process that has ended said of its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// Its exception or last line on stderr, shortened, for people.
    pub message: String,
    /// All that is kept of what it said: its exception with the traceback, its last lines on stderr.
    pub text: String,
}

/// How the C++ runtime and Python begin what they print when a process crashes.
const OF_A_CRASH: [&str; 2] = ["terminate called", "Fatal Python error"];

impl Words {
    /// Without what a crash printed that is not the reason of the end.
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
    /// A message that is all there is.
    fn from(message: String) -> Self {
        Words { text: message.clone(), message }
    }
}

/// An input of [`super::Agent::handle`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A connection to a coordinator is open; the driver has sent [`super::Agent::hello`] on it.
    Connected,
    /// The connection is gone; the driver keeps trying to open another one.
    Disconnected,
    /// The coordinator's process is on this machine and does not run (it is stopped or frozen): it decides nothing.
    CoordinatorStuck,
    /// The coordinator says something.
    Order {
        /// life of the coordinator that says it
        epoch: Epoch,
        /// what
        order: Order,
    },
    /// A worker process ended. Fires exactly once per worker.
    WorkerExited {
        /// its generation
        generation: Generation,
        /// its rank on this node
        local_rank: u32,
        /// its process id
        pid: u32,
        /// how
        outcome: Outcome,
        /// what it said of its end
        words: Words,
    },
    /// A worker has met an exception that nobody catches: it is taking itself down.
    WorkerRaised {
        /// its generation
        generation: Generation,
        /// its rank on this node
        local_rank: u32,
        /// its process id
        pid: u32,
        /// the exception
        words: Words,
    },
    /// The machine tells something of itself: a line in the kernel's log, an event of a device.
    Signed(Sign),
    /// [`super::command::Command::Check`] is done.
    Checked(Checked),
    /// A worker process could not be started.
    SpawnFailed {
        /// its generation
        generation: Generation,
        /// its rank on this node
        local_rank: u32,
        /// why
        message: String,
    },
    /// No process of this generation is left on the node, nor any that such a process started.
    WorkersGone {
        /// the generation
        generation: Generation,
        /// port of a fresh process-group store
        store_port: u16,
    },
    /// What the step board and /proc show of a worker.
    Sample {
        /// its generation
        generation: Generation,
        /// its rank on this node
        local_rank: u32,
        /// its process id
        pid: u32,
        /// what was seen
        seen: Observation,
    },
    /// What this node's memory holds, at the start of a generation.
    Holds {
        /// the generation
        generation: Generation,
        /// shards: its own ranks', copies of others'
        held: Vec<Holding>,
        /// parity shards
        parity: Vec<Parity>,
    },
    /// A worker says what it could restore.
    Offers {
        /// its generation
        generation: Generation,
        /// its rank
        rank: Rank,
        /// which
        offers: Offers,
    },
    /// A rank could not read what it was told to restore.
    RestoreFailed {
        /// its generation
        generation: Generation,
        /// its rank
        rank: Rank,
        /// the step
        step: Step,
        /// where it was to come from
        tier: Tier,
    },
    /// A worker has sealed a step in memory.
    Sealed {
        /// its generation
        generation: Generation,
        /// its rank on this node
        local_rank: u32,
        /// the step
        step: Step,
        /// what is to be kept of it beside its own
        wish: Redundancy,
    },
    /// [`super::command::Command::Replicate`] has ended.
    Replicated {
        /// its generation
        generation: Generation,
        /// the step that has all its replicas now; `None`: it could not be done
        step: Option<Step>,
        /// by local rank what tells its state from another, where ranks hold the same
        digests: Vec<(u32, u64)>,
        /// the command's
        round: u64,
    },
    /// A worker's shard is on durable storage.
    ShardWritten {
        /// its generation
        generation: Generation,
        /// the step
        step: Step,
        /// the user's directory
        directory: String,
        /// the file
        shard: ShardFile,
    },
    /// This node made a checkpoint visible.
    Published {
        /// generation that wrote it
        generation: Generation,
        /// its step
        step: Step,
    },
    /// A worker says that it is time for a durable checkpoint.
    PersistDue {
        /// its generation
        generation: Generation,
    },
    /// A worker says how many steps snapshots should be apart.
    SnapshotEvery {
        /// its generation
        generation: Generation,
        /// steps
        every: u64,
    },
    /// The agent process received a signal.
    Signal {
        /// its number
        signal: i32,
    },
    /// The deadline passed.
    Tick,
}
