//! The state of this machine, the memory a job needs, and the classes of error messages.

use crate::raw::Raw;
use everstep_core::severity::{Scope, Severity};
use schemars::JsonSchema;
use serde::Serialize;

/// What `everstep doctor --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Doctor {
    /// Version of this document: 1.
    pub version: u32,
    /// The shared memory that holds checkpoints.
    pub shm: SharedMemory,
    /// Number of files that a process may open; null: unlimited.
    pub open_files: Option<u64>,
    /// What jobs that are no longer running left in shared memory.
    pub leftovers: Vec<Leftover>,
    /// Whether the leftovers were removed (`--clean`).
    pub cleaned: bool,
    /// What needs attention, for people.
    pub findings: Vec<String>,
}

/// A file system in memory.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SharedMemory {
    /// Where it is mounted.
    pub path: Raw,
    /// Its size in bytes.
    pub total: u64,
    /// Free bytes.
    pub free: u64,
}

/// The memory of a node whose job is no longer running.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Leftover {
    /// Its directory.
    pub path: Raw,
    /// Its size in bytes.
    pub bytes: u64,
}

/// What `everstep memory --json` prints. Sizes are per node, except that of a slot.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MemoryNeed {
    /// Version of this document: 1.
    pub version: u32,
    /// Size of one slot, which holds one step of one rank.
    pub slot_bytes: u64,
    /// Memory for the steps of the node's own ranks.
    pub own_bytes: u64,
    /// Memory for the copies, or the parity, that it keeps for other nodes.
    pub replica_bytes: u64,
    /// The total, including the agent.
    pub need_bytes: u64,
    /// Free shared memory on this machine.
    pub free_bytes: u64,
    /// Whether the total fits into the free memory.
    pub fits: bool,
    /// For 1 to 6 nodes lost at once, the probability that every step survives.
    pub survival: Vec<(u64, f64)>,
    /// Seconds that a failure wastes on average if memory survives it; null without `--step-time`.
    pub wasted_seconds: Option<f64>,
}

/// What `everstep classify --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Classified {
    /// Version of this document: 1.
    pub version: u32,
    /// Name of the class; null: no line of the text matches.
    pub class: Option<String>,
    /// The other fields; missing if no line matches.
    #[serde(flatten)]
    pub known: Option<KnownClass>,
}

/// The class of an error message.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct KnownClass {
    /// What is at fault.
    pub scope: Scope,
    /// Decides what is done about it.
    pub severity: Severity,
    /// Whether it usually follows from a failure elsewhere.
    pub follows: bool,
    /// What happened, for people.
    pub what: String,
    /// What helps, for people.
    pub advice: String,
    /// The line that matches.
    pub line: String,
    /// Source of the rule.
    pub source: String,
}
