//! What happened, told from the facts that were written down: an incident from its first sign to where all that it cost is made good.
//!
//! ```text
//!  last progress    declared     world formed    all told what      first new step   where the job had been
//!       │ detect       │ regroup       │ start           │ load and a step │ recompute       │
//!       ▼              ▼               ▼                 ▼                 ▼                 ▼
//!  ─────●──────────────●───────────────●─────────────────●─────────────────●─────────────────●────
//! ```

mod incident;
mod lemons;
mod record;
mod tell;

pub use incident::{Began, Incident, Outcome, Restore, incidents};
pub use lemons::{Lemon, lemons};
pub use record::{Record, Span, lines, records};
pub use tell::tell;

use crate::coordinator::command::Fact;
use crate::id::{Incarnation, NodeId};
use crate::ledger::Account;
use crate::stacks::Stack;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How far all ranks were, as the coordinator's driver notes it now and then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Their generation.
    pub generation: u64,
    /// Steps that all ranks had completed.
    pub step: u64,
    /// Median time of a step, in microseconds.
    pub step_us: u64,
}

/// One line of what was written down about a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// When, in microseconds since 1970.
    pub at: u64,
    /// What.
    pub what: What,
}

/// A fact, or how far the job was.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// Something happened.
    Fact(Fact),
    /// How far all ranks were.
    Progress(Progress),
    /// Where the time of a node's places went.
    Spent {
        /// the node
        node: NodeId,
        /// life of its agent
        incarnation: Incarnation,
        /// one generation's
        account: Account,
    },
    /// Where the workers of a node are.
    Stacks {
        /// their generation
        generation: u64,
        /// by rank
        stacks: BTreeMap<u32, Stack>,
    },
}

/// A [`What::Stacks`] as it is written.
#[derive(Deserialize)]
struct Stacks {
    generation: u64,
    stacks: BTreeMap<u32, Stack>,
}

/// A [`What::Spent`] as it is written.
#[derive(Deserialize)]
struct Spent {
    node: NodeId,
    incarnation: Incarnation,
    account: Account,
}

impl Entry {
    /// Reads a line: its time in seconds, and its fact as JSON. `None` for what this version does not know.
    #[must_use]
    pub fn read(seconds: f64, fact: &serde_json::Value) -> Option<Entry> {
        let at = (seconds * 1e6).round() as u64;
        let what = if let Some(progress) = fact.get("Progress") {
            What::Progress(serde_json::from_value(progress.clone()).ok()?)
        } else if let Some(spent) = fact.get("Spent") {
            let Spent { node, incarnation, account } = serde_json::from_value(spent.clone()).ok()?;
            What::Spent { node, incarnation, account }
        } else if let Some(stacks) = fact.get("Stacks") {
            let Stacks { generation, stacks } = serde_json::from_value(stacks.clone()).ok()?;
            What::Stacks { generation, stacks }
        } else {
            What::Fact(serde_json::from_value(fact.clone()).ok()?)
        };
        Some(Entry { at, what })
    }
}
