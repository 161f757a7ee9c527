//! What fails, and what shows it.

use crate::id::{Rank, Step};
use crate::severity::Verdict;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a machine has told this long before may explain a failure, or a silence.
pub(crate) const SIGN_BEFORE: Duration = Duration::from_secs(60);
/// Signs that are remembered, by a node and by a job.
pub(crate) const SIGNS_KEPT: usize = 64;

/// How a worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Exit code; 0 is success.
    Code(i32),
    /// Number of the signal that ended it.
    Signal(i32),
}

/// Why a silent worker is held to be hung. Silence alone is never enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum HangEvidence {
    /// The process is in the stopped state (SIGSTOP, a debugger).
    Stopped,
    /// The process burns CPU but its interpreter lock has not been free for the whole silence.
    InterpreterHeld,
    /// The process burns CPU on one and the same line of Python.
    Spinning,
    /// The process has used no CPU for many steps' time.
    NoCpu,
    /// A section outlasted the timeout that the script gave for it.
    SectionTimeout,
    /// Its machine has told of a failure: a line in the kernel's log, an event of a device.
    MachineSign,
}

/// What failed in a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// The process ended.
    Exited(Outcome),
    /// The process is there but makes no progress.
    Hung {
        /// what shows it
        evidence: HangEvidence,
        /// how long it has been silent
        silence_ms: u64,
    },
    /// The process could not be started.
    NotStarted,
    /// An earlier coordinator had it ended, for a failure that this one has not heard of.
    Fenced,
}

/// One worker's failure as its agent saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Global rank.
    pub rank: Rank,
    /// Rank on its node.
    pub local_rank: u32,
    /// Process id on its node, 0 when it never started.
    pub pid: u32,
    /// What happened.
    pub cause: Cause,
    /// The exception or the last lines on stderr, shortened.
    pub message: String,
    /// Steps that the worker had completed.
    pub step: Option<Step>,
    /// It had completed a step that it did not restore.
    pub progressed: bool,
    /// What it is held to be.
    pub verdict: Verdict,
}

/// A worker whose script is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Global rank.
    pub rank: Rank,
    /// Steps that it had completed; `None` when it reports no steps.
    pub step: Option<Step>,
    /// How far it is with its end.
    pub how: HowEnded,
}

/// How far a worker is whose script is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HowEnded {
    /// Its interpreter is shutting down.
    ShuttingDown,
    /// It exited with 0.
    Exited,
    /// It crashed, or hung, while its interpreter was shutting down.
    Crashed(Box<Failure>),
}

/// Something that shows on a machine without a process having ended: a line in the kernel's log, an event of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sign {
    /// What it is held to be, and the line that says so.
    pub verdict: Verdict,
    /// The process that it is about, if it names one.
    pub pid: Option<u32>,
    /// The device that it is about (PCI address, UUID), or empty.
    pub device: String,
}
