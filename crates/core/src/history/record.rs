//! Failures in a format for later questions ("what would it have cost with …"): one line each, the
//! same for real and for simulated runs.

use super::{Entry, incidents, sums};
use crate::coordinator::command::Fact;
use crate::ledger::Category;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// One failure. All times are in seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Time from the beginning of the history.
    pub t_s: f64,
    /// Name of the node at fault.
    pub node: String,
    /// `sev1`: the node failed; `sev2`: a process failed; `sev3`: a problem that may pass without
    /// action (Unicron, table 1).
    pub kind: String,
    /// Class of the failure, as in the failure table.
    #[serde(default)]
    pub cause: String,
    /// Time until the node was back; `None`: it did not come back, or nothing was wrong with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair_s: Option<f64>,
    /// Time until the failure was detected.
    #[serde(default)]
    pub detect_s: f64,
    /// Time from detection until a new step was complete; `None`: the job did not continue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_s: Option<f64>,
    /// Time spent on repeating work.
    #[serde(default)]
    pub lost_s: f64,
    /// Ranks that trained before and after (in a simulation: nodes).
    #[serde(default)]
    pub world: (u32, u32),
}

/// The cluster and the period that a set of records covers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Always `cluster`.
    pub kind: String,
    /// Number of nodes in the cluster.
    pub nodes: u32,
    /// Length of the period, in seconds.
    pub length_s: f64,
    /// Share of the training time for which checkpoints stalled it.
    #[serde(default)]
    pub checkpoint_share: f64,
    /// Spares at the beginning, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spares: Option<u32>,
}

impl Span {
    /// Creates a span of `length_s` seconds with `nodes` nodes.
    #[must_use]
    pub fn new(nodes: u32, length_s: f64) -> Span {
        Span { kind: "cluster".into(), nodes, length_s, checkpoint_share: 0.0, spares: None }
    }
}

/// Formats the span and then the records as JSON, one per line.
pub fn lines<'a>(span: &Span, records: impl IntoIterator<Item = &'a Record>) -> String {
    let line = |value: serde_json::Result<String>| value.unwrap_or_default() + "\n";
    let first = line(serde_json::to_string(span));
    records.into_iter().fold(first, |text, record| text + &line(serde_json::to_string(record)))
}

/// Extracts the records of failures from a job's history.
#[must_use]
pub fn records(entries: &[Entry]) -> (Span, Vec<Record>) {
    let (first, last) = (entries.first().map_or(0, |e| e.at), entries.last().map_or(0, |e| e.at));
    let mut nodes = BTreeSet::new();
    let mut back: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for Entry { at, fact } in entries {
        if let Fact::NodeJoined { node, again } = fact {
            nodes.insert(node.0.as_str());
            if !*again {
                back.entry(node.0.as_str()).or_default().push(*at);
            }
        }
    }
    let seconds = |micros: u64| micros as f64 / 1e6;
    let of = |i: &super::Incident| {
        let node = i.at_fault().0.clone();
        let gone =
            i.excluded.is_some() || (i.failure.is_none() && i.blamed.as_ref().is_none_or(|b| b.failure.is_none()));
        let hung = i.silence().is_some();
        let until = back.get(node.as_str()).and_then(|all| all.iter().find(|at| **at > i.opened));
        let stepped = i.stepped.map(|(at, _)| at);
        Record {
            t_s: seconds(i.opened.saturating_sub(i.silence().unwrap_or(0)).saturating_sub(first)),
            kind: if gone {
                "sev1"
            } else if hung {
                "sev3"
            } else {
                "sev2"
            }
            .into(),
            cause: i.class().to_owned(),
            repair_s: gone.then(|| until.map(|at| seconds(at - i.opened))).flatten(),
            detect_s: seconds(i.silence().unwrap_or(0)),
            restart_s: stepped.map(|at| seconds(at.saturating_sub(i.opened))),
            lost_s: i.caught_up.zip(stepped).map_or(0.0, |(until, at)| seconds(until.saturating_sub(at))),
            world: (i.world.0, i.world.1.unwrap_or(0)),
            node,
        }
    };
    let mut span = Span::new(u32::try_from(nodes.len()).unwrap_or(u32::MAX), seconds(last - first));
    let spent = sums(entries, None).total();
    let stalled = spent.of(Category::CheckpointStall);
    let trained =
        [Category::Productive, Category::Degraded, Category::Recompute].map(|c| spent.of(c)).iter().sum::<u64>();
    span.checkpoint_share = stalled as f64 / (stalled + trained).max(1) as f64;
    (span, incidents(entries).iter().map(of).collect())
}
