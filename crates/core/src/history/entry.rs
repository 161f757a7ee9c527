//! Recorded facts, as the event log stores them and as they are read.

use crate::coordinator::command::Fact;
use crate::id::JobId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One line of a coordinator's event log, `events.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LogLine {
    /// Time in seconds since 1970. It never decreases from line to line.
    pub ts: f64,
    /// The job.
    pub job: JobId,
    /// What happened.
    pub fact: Fact,
}

/// One recorded fact about a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Time in microseconds since 1970.
    pub at: u64,
    /// What happened.
    pub fact: Fact,
}

impl From<LogLine> for Entry {
    fn from(line: LogLine) -> Self {
        Entry { at: (line.ts * 1e6).round() as u64, fact: line.fact }
    }
}
