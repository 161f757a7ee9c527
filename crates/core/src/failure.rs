//! What fails, and the evidence for it.

use crate::id::{Rank, Step};
use crate::severity::Verdict;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A sign this long before a failure or a silence may still explain it.
pub(crate) const SIGN_BEFORE: Duration = Duration::from_mins(1);
/// How long further failures are collected after the first one of an incident.
pub(crate) const BLAME_WINDOW: Duration = Duration::from_secs(2);
/// Number of signs that a node and a job remember.
pub(crate) const SIGNS_KEPT: usize = 64;

/// How a worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Outcome {
    /// Exit code; 0 is success.
    Code(i32),
    /// Number of the signal that ended the process.
    Signal(i32),
}

/// Evidence that a silent worker hangs. Silence alone is never enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum HangEvidence {
    /// The process is in the stopped state (SIGSTOP, a debugger).
    Stopped,
    /// The process uses CPU time, but its interpreter lock has not been free during the whole
    /// silence.
    InterpreterHeld,
    /// The process uses CPU time on the same line of Python.
    Spinning,
    /// The process has used no CPU time for the duration of many steps.
    NoCpu,
    /// A section exceeded the timeout that the script set for it.
    SectionTimeout,
    /// The machine reported a failure: a line in the kernel log, or an event of a device.
    MachineSign,
}

/// What failed in a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Cause {
    /// The process ended.
    Exited(Outcome),
    /// The process exists but makes no progress.
    Hung {
        /// What shows it.
        evidence: HangEvidence,
        /// How long it has been silent, in milliseconds.
        silence_ms: u64,
    },
    /// The launched process exited with 0, but the process that trained in its place had ended
    /// before its last step, without Python's normal exit.
    TrainerVanished {
        /// Process id of the one that trained.
        pid: u32,
    },
    /// The process could not be started.
    NotStarted,
    /// An earlier coordinator ended the process because of a failure that this coordinator has not
    /// received.
    Fenced,
}

/// How far a worker's training has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Steps completed; `None` if the worker does not report steps.
    pub step: Option<Step>,
    /// Steps that the script is to complete in all, if it says so (`ckpt.steps(N)`).
    pub total: Option<Step>,
    /// Backward passes since the last completed step.
    pub passes: u64,
}

impl Extent {
    /// Returns whether a worker that crashed here had done what another one did before it ended at
    /// `end`: the same last step, no backward pass more, and all steps that either is to complete.
    #[must_use]
    pub fn is_the_end(self, end: Extent) -> bool {
        self.step.is_some() && self.step == end.step && self.passes <= end.passes && self.missing(end.total).is_none()
    }

    /// Returns the steps to complete in all, by this worker's own account or by another's, if it
    /// has not completed them.
    #[must_use]
    pub fn missing(self, other: Option<Step>) -> Option<Step> {
        self.total.max(other).filter(|total| self.step.is_some_and(|step| step < *total))
    }
}

/// A worker's failure as its agent saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Failure {
    /// Global rank.
    pub rank: Rank,
    /// Rank on its node.
    pub local_rank: u32,
    /// Process id on its node; 0 if it never started.
    pub pid: u32,
    /// What happened.
    pub cause: Cause,
    /// The exception or the last lines on stderr, shortened.
    pub message: String,
    /// Steps that the worker had completed.
    pub step: Option<Step>,
    /// Steps that its script is to complete in all, if it says so (`ckpt.steps(N)`).
    #[serde(default)]
    pub total: Option<Step>,
    /// Backward passes since the last completed step: the worker had begun the next one.
    #[serde(default)]
    pub passes: u64,
    /// Whether the worker had completed a step that it did not restore.
    pub progressed: bool,
    /// The class of the failure, with its severity, scope and advice.
    pub verdict: Verdict,
}

impl Failure {
    /// Returns how far the worker's training had come.
    #[must_use]
    pub fn extent(&self) -> Extent {
        Extent { step: self.step, total: self.total, passes: self.passes }
    }
}

/// A worker whose script is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Ended {
    /// Global rank.
    pub rank: Rank,
    /// Steps that it had completed; `None` if it reports no steps.
    pub step: Option<Step>,
    /// Steps that its script was to complete in all, if it said so (`ckpt.steps(N)`).
    #[serde(default)]
    pub total: Option<Step>,
    /// Backward passes since the last completed step.
    #[serde(default)]
    pub passes: u64,
    /// How far its process has come.
    pub how: HowEnded,
}

impl Ended {
    /// Returns how far the worker's training had come.
    #[must_use]
    pub fn extent(&self) -> Extent {
        Extent { step: self.step, total: self.total, passes: self.passes }
    }
}

/// How far the process of a finished script has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum HowEnded {
    /// Its interpreter is shutting down.
    ShuttingDown,
    /// It exited with 0.
    Exited,
    /// It exited with 0, but the process that trained in its place had ended without Python's
    /// normal exit. Whether the training had finished is not known.
    Unconfirmed {
        /// Process id of the one that trained.
        pid: u32,
    },
    /// It crashed, or hung, while its interpreter was shutting down.
    Crashed(Box<Failure>),
}

/// A problem that shows on a machine without a process having ended: a line in the kernel log, or
/// an event of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Sign {
    /// The class of the problem, and the line that shows it.
    pub verdict: Verdict,
    /// The process concerned, if the line names one.
    pub pid: Option<u32>,
    /// The device concerned (PCI address or UUID), or empty.
    pub device: String,
}
