//! What happened, reconstructed from recorded facts: an incident from its first sign until all that
//! it cost is made good.
//!
//! ```text
//!  last progress    declared    world formed    restore decided    first new step    caught up
//!       │ detect       │ regroup     │ start           │ load and a step  │ recompute      │
//!       ▼              ▼             ▼                 ▼                  ▼                ▼
//!  ─────●──────────────●─────────────●─────────────────●──────────────────●────────────────●────
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

/// The progress of all ranks, which the coordinator's driver records from time to time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Their generation.
    pub generation: u64,
    /// Steps that all ranks had completed.
    pub step: u64,
    /// Median duration of a step, in microseconds.
    pub step_us: u64,
}

/// One recorded line about a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Time in microseconds since 1970.
    pub at: u64,
    /// What was recorded.
    pub what: What,
}

/// The content of an [`Entry`].
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// A fact recorded by the coordinator.
    Fact(Fact),
    /// The progress of all ranks.
    Progress(Progress),
    /// Where the time of a node went.
    Spent {
        /// The node.
        node: NodeId,
        /// Life of its agent.
        incarnation: Incarnation,
        /// The account of one generation.
        account: Account,
    },
    /// Where the workers of a node are.
    Stacks {
        /// Their generation.
        generation: u64,
        /// Stacks by rank.
        stacks: BTreeMap<u32, Stack>,
    },
}

/// A [`What::Stacks`] as it is serialized.
#[derive(Deserialize)]
struct Stacks {
    generation: u64,
    stacks: BTreeMap<u32, Stack>,
}

/// A [`What::Spent`] as it is serialized.
#[derive(Deserialize)]
struct Spent {
    node: NodeId,
    incarnation: Incarnation,
    account: Account,
}

impl Entry {
    /// Parses a line from its time in seconds and its fact as JSON. Returns `None` if this version
    /// does not know the fact.
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
