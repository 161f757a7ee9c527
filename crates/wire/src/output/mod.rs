//! The documents that commands print with `--json`, one type for each. Their JSON schemas are
//! checked in under `docs/schema`, and `everstep schema` prints them.
//!
//! New versions only add fields. If a field is removed or changes its meaning, the document's
//! `version` increases.

mod checkpoints;
mod detector;
mod history;
mod machine;
mod planning;
mod replay;
mod status;

pub use checkpoints::{CheckpointList, CheckpointRow, ForeignEntry};
pub use detector::{Alarm, Detected, Evaluated};
pub use history::{Explained, Goodput, IncidentList, IncidentReport, JobGoodput, JobNodes, NodeFailures, Stacks};
pub use machine::{Classified, Doctor, KnownClass, Leftover, MemoryNeed, SharedMemory};
pub use planning::{LayoutSeconds, Moved, OtherPlan, Plan, PlannedJob, SizeThroughput, Throughput};
pub use replay::{
    Accounts, Down, Interval, PolicyResult, RepairDays, Simulated, Sized, SizedForAvailability, SizedForGoodput,
    TraceFit, Tried,
};
pub use status::{
    Approval, Approved, CoordinatorAddress, CoordinatorStatus, InjectAnswer, JobStatus, NodeStatus, Phase,
    RequestStatus, RunningJob, Status,
};

use everstep_core::history::LogLine;
use schemars::{Schema, schema_for};

/// The version of documents whose fields have not changed since they were first published.
pub const FIRST: u32 = 1;

/// A document and its schema.
pub struct Documented {
    /// Name of the document, and of its file in `docs/schema`.
    pub name: &'static str,
    /// The command that prints it, or the file that contains it.
    pub printed_by: &'static str,
    /// The JSON schema.
    pub schema: Schema,
}

/// Returns the schemas of all documents, by name.
#[must_use]
pub fn schemas() -> Vec<Documented> {
    let of = |name, printed_by, schema| Documented { name, printed_by, schema };
    vec![
        of("checkpoints", "ckpt ls --json", schema_for!(CheckpointList)),
        of("classify", "classify --json", schema_for!(Classified)),
        of("detect-eval", "detect eval --json", schema_for!(Evaluated)),
        of("detect-run", "detect run --json", schema_for!(Detected)),
        of("doctor", "doctor --json", schema_for!(Doctor)),
        of("events", "each line of events.jsonl", schema_for!(LogLine)),
        of("explain", "explain --json", schema_for!(Explained)),
        of("goodput", "goodput --json", schema_for!(Goodput)),
        of("incidents", "incidents ls --json", schema_for!(IncidentList)),
        of("inject", "inject --json", schema_for!(InjectAnswer)),
        of("memory", "memory --json", schema_for!(MemoryNeed)),
        of("nodes", "incidents nodes --json", schema_for!(NodeFailures)),
        of("plan", "plan --json", schema_for!(Plan)),
        of("simulate", "simulate --json", schema_for!(Simulated)),
        of("size", "size --json", schema_for!(Sized)),
        of("stacks", "stacks --json", schema_for!(Stacks)),
        of("status", "status --json", schema_for!(Status)),
        of("throughput", "plan throughput --json", schema_for!(Throughput)),
        of("trace-fit", "trace fit --json", schema_for!(TraceFit)),
    ]
}
