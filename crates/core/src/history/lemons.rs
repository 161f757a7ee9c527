//! Nodes that fail repeatedly, counted over all runs of a job: one failure proves little, but the
//! third of the same card proves enough.

use super::{Entry, Incident, incidents};
use crate::coordinator::command::Fact;
use crate::id::NodeId;
use crate::severity::{Scope, Table};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// A node's record of failures.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Lemon {
    /// The node.
    pub node: NodeId,
    /// Failures blamed on the node, except the script's own and those that follow from another
    /// failure.
    pub failures: u32,
    /// Those that are failures of the machine itself.
    pub of_machine: u32,
    /// Failures by class.
    pub classes: BTreeMap<String, u32>,
    /// Failures by device, where the kernel's line names one (its PCI address).
    pub devices: BTreeMap<String, u32>,
    /// Rank-seconds during these failures in which nothing new was computed.
    pub rank_seconds: f64,
    /// When the latest one was declared, in microseconds since 1970.
    pub latest: u64,
}

impl Lemon {
    fn new(node: NodeId) -> Self {
        let (classes, devices) = (BTreeMap::new(), BTreeMap::new());
        Lemon { node, failures: 0, of_machine: 0, classes, devices, rank_seconds: 0.0, latest: 0 }
    }
}

/// Returns the nodes that were blamed for failures, worst first.
#[must_use]
pub fn lemons(entries: &[Entry]) -> Vec<Lemon> {
    let mut found: BTreeMap<NodeId, Lemon> = BTreeMap::new();
    for incident in runs(entries).into_iter().flat_map(incidents) {
        let class = incident.class();
        if incident.verdict().is_some_and(|v| v.scope == Scope::User || v.follows) {
            continue;
        }
        let node = incident.at_fault().clone();
        let of = found.entry(node.clone()).or_insert_with(|| Lemon::new(node));
        of.failures += 1;
        of.of_machine += u32::from(incident.verdict().is_none_or(crate::severity::Verdict::is_of_machine));
        *of.classes.entry(class.to_owned()).or_default() += 1;
        if let Some(device) = device(&incident) {
            *of.devices.entry(device).or_default() += 1;
        }
        of.rank_seconds += incident.rank_seconds().unwrap_or(0.0);
        of.latest = of.latest.max(incident.opened);
    }
    let mut all: Vec<Lemon> = found.into_values().collect();
    all.sort_by_key(|l| std::cmp::Reverse((l.of_machine, l.failures, l.latest)));
    all
}

/// Splits the entries of a job into its runs, in order.
fn runs(entries: &[Entry]) -> Vec<&[Entry]> {
    let mut found = Vec::new();
    let (mut from, mut over) = (0, false);
    for (at, entry) in entries.iter().enumerate() {
        match &entry.fact {
            Fact::Ended { .. } => over = true,
            Fact::GenerationStarted { restarts: 0, .. } if over => {
                found.extend(entries.get(from..at));
                (from, over) = (at, false);
            }
            _ => {}
        }
    }
    found.extend(entries.get(from..));
    found
}

/// Returns the device named in the kernel's line.
fn device(of: &Incident) -> Option<String> {
    Some(Table::built_in().sign(&of.verdict()?.line)?.device).filter(|d| !d.is_empty())
}
