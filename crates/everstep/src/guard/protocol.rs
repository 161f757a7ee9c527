//! What an agent and its guard say to each other, as frames on a socket pair.

use everstep_core::message::Outcome;
use serde::{Deserialize, Serialize};

/// One worker to start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Launch {
    /// Its generation.
    pub generation: u64,
    /// Its rank on this node.
    pub local_rank: u32,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: Vec<(String, String)>,
    /// Where standard output goes.
    pub stdout: Output,
    /// Where standard error goes.
    pub stderr: Output,
    /// Prefix of teed lines.
    pub prefix: String,
}

/// Where one stream of a worker goes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Output {
    /// Log file; always written.
    pub file: String,
    /// The user asked for the file: it is never cut.
    pub asked: bool,
    /// Also to the console.
    pub console: bool,
    /// Whole lines with the prefix on the console, instead of the bytes as they come.
    pub prefixed: bool,
}

/// From the agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Start a worker.
    Launch(Box<Launch>),
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
    /// Nothing is left of what was to be ended.
    Gone {
        /// as in the request
        generation: u64,
    },
}
