//! What an agent and its guard say to each other, as frames on a socket pair.

use everstep_core::message::Outcome;
use everstep_wire::raw::Raw;
use serde::{Deserialize, Serialize};

/// One worker to start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Launch {
    /// Its generation.
    pub generation: u64,
    /// Its rank on this node.
    pub local_rank: u32,
    /// Program and arguments.
    pub argv: Vec<Raw>,
    /// How a process that has torch imported runs the same; `None`: only a new process can.
    pub warm: Option<Warm>,
    /// The whole environment.
    pub env: Vec<(Raw, Raw)>,
    /// Processors that it may use; empty: all.
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
    /// A module, as in `python -m`; else a file.
    pub module: bool,
    /// The file or module, and its arguments.
    pub argv: Vec<Raw>,
}

/// A process that imports torch and then waits to become a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Template {
    /// The interpreter and the program.
    pub argv: Vec<Raw>,
    /// Its environment.
    pub env: Vec<(Raw, Raw)>,
}

/// Where one stream of a worker goes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Output {
    /// Log file; always written.
    pub file: Raw,
    /// The user asked for the file: it is never cut.
    pub asked: bool,
    /// Also to the console.
    pub console: bool,
    /// Whole lines with the prefix on the console, instead of the bytes as they come.
    pub prefixed: bool,
    /// Lines with one of `needles` also go there, with the prefix.
    pub filtered: Option<Raw>,
    /// What makes a line interesting.
    pub needles: Vec<String>,
}

/// From the agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Start a worker.
    Launch(Box<Launch>),
    /// Have a process with torch imported ready.
    Warm(Template),
    /// The one there is, if any, must not be used: why.
    Cool,
    /// Pass a signal to every worker's process group.
    Signal {
        /// its number
        signal: i32,
    },
    /// TERM now, KILL after the grace, until nothing is left.
    End {
        /// named in the answer
        generation: u64,
        /// 0: KILL at once
        grace_ms: u64,
    },
}

/// From the guard.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Event {
    /// A worker runs.
    Launched {
        /// its generation
        generation: u64,
        /// its rank on this node
        local_rank: u32,
        /// its process id
        pid: u32,
    },
    /// A worker could not be started.
    NotLaunched {
        /// its generation
        generation: u64,
        /// its rank on this node
        local_rank: u32,
        /// why
        why: String,
    },
    /// A worker ended.
    Exited {
        /// its generation
        generation: u64,
        /// its rank on this node
        local_rank: u32,
        /// its process id
        pid: u32,
        /// how
        outcome: Outcome,
        /// end of its standard error
        last_lines: String,
    },
    /// A process with torch imported is ready, or cannot be had: why.
    Warmed {
        /// `None`: ready
        why_not: Option<String>,
    },
    /// Nothing is left of what was to be ended.
    Gone {
        /// as in the request
        generation: u64,
    },
}
