//! Messages between an agent and its guard, as frames on a socket pair.

use everstep_core::id::Generation;
use everstep_core::message::Outcome;
use everstep_wire::raw::Raw;
use serde::{Deserialize, Serialize};

/// Identifies a worker on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalWorker {
    /// Generation of the worker.
    pub generation: Generation,
    /// Rank of the worker on this node.
    pub local_rank: u32,
}

/// One worker to start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Launch {
    /// The worker.
    pub worker: LocalWorker,
    /// Program and arguments.
    pub argv: Vec<Raw>,
    /// How a warm process can run the same, or `None` if only a new process can.
    pub warm: Option<Warm>,
    /// The complete environment.
    pub env: Vec<(Raw, Raw)>,
    /// Processors that the worker may use; all if empty.
    pub cpus: Vec<u32>,
    /// Where standard output goes.
    pub stdout: Output,
    /// Where standard error goes.
    pub stderr: Output,
    /// Prefix of teed lines.
    pub prefix: String,
}

/// A Python entry point.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Warm {
    /// A module, as in `python -m`, rather than a file.
    pub module: bool,
    /// The file or module, and its arguments.
    pub argv: Vec<Raw>,
}

/// A process that imports torch and then waits to become a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Template {
    /// The interpreter and the program.
    pub argv: Vec<Raw>,
    /// The complete environment.
    pub env: Vec<(Raw, Raw)>,
}

/// Where one stream of a worker goes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Output {
    /// Log file, which is always written.
    pub file: Raw,
    /// The user requested the file, so it is never truncated.
    pub asked: bool,
    /// The stream also goes to the console.
    pub console: bool,
    /// The console shows whole lines with the prefix, instead of the bytes as they come.
    pub prefixed: bool,
    /// Where lines that contain one of `needles` also go, with the prefix.
    pub filtered: Option<Raw>,
    /// Texts that select a line.
    pub needles: Vec<String>,
}

/// A request from the agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Start a worker.
    Launch(Box<Launch>),
    /// Have a warm process ready.
    Warm(Template),
    /// End the warm process, if there is one: it must not be used.
    Cool,
    /// Pass a signal to every worker's process group.
    Signal {
        /// Signal number.
        signal: i32,
    },
    /// Send TERM now and KILL after the grace period, until nothing is left.
    End {
        /// Returned in the answer.
        generation: Generation,
        /// Grace period in milliseconds; 0 for KILL at once.
        grace_ms: u64,
    },
}

/// An event from the guard.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Event {
    /// A worker was started or exited.
    Worker {
        /// The worker.
        worker: LocalWorker,
        /// What happened to it.
        what: WorkerEvent,
    },
    /// A warm process is ready, or cannot be had.
    Warmed {
        /// Why not; `None` if it is ready.
        why_not: Option<String>,
    },
    /// Everything that was to be ended is gone.
    Gone {
        /// As in the request.
        generation: Generation,
    },
}

/// What happened to a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum WorkerEvent {
    /// It was started.
    Launched {
        /// Process id.
        pid: u32,
    },
    /// It could not be started.
    NotLaunched {
        /// A sentence for the user.
        why: String,
    },
    /// It exited.
    Exited(ProcessExit),
}

/// How the process of a worker exited.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProcessExit {
    /// Process id.
    pub pid: u32,
    /// Exit code or signal.
    pub outcome: Outcome,
    /// The guard had sent it a signal.
    pub asked: bool,
    /// End of its standard error.
    pub last_lines: String,
}
