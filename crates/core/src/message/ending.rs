//! How a job, or an agent, ends.

use crate::id::Step;
use serde::{Deserialize, Serialize};

/// Why `everstep run` ends, or refuses to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitReason {
    /// Exit code of `everstep run`.
    pub code: i32,
    /// A sentence for the user, cause first.
    pub why: String,
}

/// A stop of the job that a user or a signal has requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stop {
    /// Number of the signal.
    pub signal: i32,
    /// Step at whose end all ranks stop together; `None`: as soon as possible.
    pub at: Option<Step>,
}

impl Stop {
    /// Returns how a job that was stopped ends.
    #[must_use]
    pub fn end(self) -> ExitReason {
        ExitReason { code: 128 + self.signal, why: format!("stopped by signal {}", self.signal) }
    }
}
