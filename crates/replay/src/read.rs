//! Reads traces of real clusters, and reads and writes this project's own format.

use super::failures::{DAY, Failure, Failures, ImpossibleError, Kind, micros, seconds};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Most nodes that are simulated.
const NODES_MAX: u32 = 1 << 20;

/// A trace that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("the trace is not a JSON list of faults: {0}")]
    NotFaults(#[source] serde_json::Error),
    #[error("event {event} of the trace is neither fault_start nor fault_end")]
    EventType { event: usize },
    #[error("event {event} of the trace has no node_id, or no event_time of 0 days or more")]
    EventFields { event: usize },
    /// More nodes fail than the user says that there are.
    #[error("{failing} nodes fail in the trace, more than --nodes {nodes}")]
    MoreThanNodes { failing: u32, nodes: u32 },
    #[error("line {line} of the trace: {source}")]
    Line { line: usize, source: LineError },
    #[error("the trace names some nodes and numbers others: do one or the other")]
    NamedAndNumbered,
    #[error("the trace has {0} nodes; at most {NODES_MAX} are simulated")]
    TooManyNodes(u64),
    #[error(transparent)]
    Impossible(#[from] ImpossibleError),
}

/// A malformed line of a trace.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    #[error("not a JSON object: {0}")]
    NotObject(#[source] serde_json::Error),
    #[error("no kind: one of sev1, sev2, sev3, repair, cluster")]
    NoKind,
    #[error("kind = {0} is invalid; give sev1, sev2, sev3, repair or cluster")]
    Kind(String),
    #[error("no {key}, in seconds")]
    NoTime { key: &'static str },
    #[error("{key} = {seconds} is not a time from 0 on, in seconds")]
    Time { key: &'static str, seconds: f64 },
    #[error("no node: a number, or a name")]
    NoNode,
    #[error("node is not the number of a node")]
    NodeNumber,
}

/// Reads InfiniteHBD's trace: a list of `fault_start` and `fault_end` by node, in days. `nodes` is
/// the number of nodes, including those that never fail.
///
/// Overlapping faults of one node count as one. A fault without an end lasts to the end of the
/// trace.
///
/// # Errors
/// If the text is not such a list, more than `nodes` nodes fail, or the trace fails
/// [`Failures::checked`].
pub fn from_faults(text: &str, nodes: Option<u32>) -> Result<Failures, TraceError> {
    let all: Vec<Value> = serde_json::from_str(text).map_err(TraceError::NotFaults)?;
    let mut numbers: BTreeMap<&str, u32> = BTreeMap::new();
    let mut open: BTreeMap<u32, (u32, u64)> = BTreeMap::new();
    let mut events = Vec::new();
    for (at, event) in all.iter().enumerate() {
        let (node, day) = (event["node_id"].as_str(), event["event_time"].as_f64().filter(|d| (0.0..1e6).contains(d)));
        let starts = match event["event_type"].as_str() {
            Some("fault_start") => true,
            Some("fault_end") => false,
            _ => return Err(TraceError::EventType { event: at + 1 }),
        };
        let (node, day) = node.zip(day).ok_or(TraceError::EventFields { event: at + 1 })?;
        let next = numbers.len() as u32;
        let number = *numbers.entry(node).or_insert(next);
        // Sorts ends after starts of the same time, so that a fault of no duration is dropped.
        events.push(((day * DAY as f64).round() as u64, !starts, number));
    }
    events.sort_unstable();
    let length = events.last().map_or(0, |(at, _, _)| *at);
    let mut list = Vec::new();
    for (at, ends, node) in events {
        match (ends, open.get(&node).copied()) {
            (false, None) => drop(open.insert(node, (1, at))),
            (false, Some((count, since))) => drop(open.insert(node, (count + 1, since))),
            (true, Some((count, since))) if count > 1 => drop(open.insert(node, (count - 1, since))),
            (true, Some((_, since))) => {
                open.remove(&node);
                list.push(Failure { at: since, node, kind: Kind::Node, repair: at - since });
            }
            (true, None) => {}
        }
    }
    list.extend(open.into_iter().map(|(node, (_, at))| Failure { at, node, kind: Kind::Node, repair: length - at }));
    list.retain(|f| f.repair > 0 && f.at < length);
    let named = numbers.len() as u32;
    let nodes = nodes.unwrap_or(named);
    if nodes < named {
        return Err(TraceError::MoreThanNodes { failing: named, nodes });
    }
    Ok(Failures { nodes, length, list }.checked()?)
}

/// Reads one JSON object per line:
/// `{"t_s", "node", "kind": "sev1"|"sev2"|"sev3"|"repair", "repair_s"}`, and one
/// `{"kind": "cluster", "nodes", "length_s"}`.
///
/// # Errors
/// If a line is malformed, with its number, or if the trace fails [`Failures::checked`].
pub fn from_lines(text: &str) -> Result<Failures, TraceError> {
    let mut cluster: (Option<u64>, Option<f64>) = (None, None);
    let mut numbers: BTreeMap<String, u32> = BTreeMap::new();
    let mut numbered: BTreeSet<u32> = BTreeSet::new();
    let mut read = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let wrong = |source: LineError| TraceError::Line { line: at + 1, source };
        let of: Value = serde_json::from_str(line).map_err(|e| wrong(LineError::NotObject(e)))?;
        let kind = of["kind"].as_str().ok_or_else(|| wrong(LineError::NoKind))?;
        if kind == "cluster" {
            cluster = (of["nodes"].as_u64(), of["length_s"].as_f64());
            continue;
        }
        let time = |key: &'static str, value: &Value| match value.as_f64() {
            Some(s) if (0.0..1e10).contains(&s) => Ok(micros(s)),
            Some(seconds) => Err(wrong(LineError::Time { key, seconds })),
            None => Err(wrong(LineError::NoTime { key })),
        };
        let t = time("t_s", &of["t_s"])?;
        let node = match &of["node"] {
            Value::Number(n) => {
                let n = n.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| *n < NODES_MAX);
                numbered.insert(n.ok_or_else(|| wrong(LineError::NodeNumber))?);
                n.unwrap_or(0)
            }
            Value::String(name) => {
                let next = numbers.len() as u32;
                *numbers.entry(name.clone()).or_insert(next)
            }
            _ => return Err(wrong(LineError::NoNode)),
        };
        let kind = match kind {
            "sev1" => Some(Kind::Node),
            "sev2" => Some(Kind::Process),
            "sev3" => Some(Kind::Transient),
            "repair" => None,
            other => return Err(wrong(LineError::Kind(other.to_owned()))),
        };
        let repair = if of["repair_s"].is_null() { None } else { Some(time("repair_s", &of["repair_s"])?) };
        read.push((t, node, kind, repair));
    }
    if !numbers.is_empty() && !numbered.is_empty() {
        return Err(TraceError::NamedAndNumbered);
    }
    read.sort_by_key(|(t, node, kind, _)| (*t, kind.is_some(), *node));
    let last = read.iter().map(|(t, _, _, repair)| t + repair.unwrap_or(0)).max().unwrap_or(0);
    let length = cluster.1.map_or(last, micros);
    let named = numbers.len() as u32;
    let said = cluster.0.unwrap_or(named.max(numbered.last().map_or(0, |n| n + 1)).into());
    let nodes = u32::try_from(said).ok().filter(|n| *n <= NODES_MAX);
    let nodes = nodes.ok_or(TraceError::TooManyNodes(said))?;
    let mut list: Vec<Failure> = Vec::new();
    for (at, (t, node, kind, repair)) in read.iter().enumerate() {
        let Some(kind) = *kind else { continue };
        let ended = || read.iter().skip(at + 1).find(|(_, n, k, _)| n == node && k.is_none()).map(|(end, ..)| end - t);
        let repair = match kind {
            Kind::Node => repair.or_else(ended).unwrap_or(length.saturating_sub(*t)),
            _ => 0,
        };
        list.push(Failure { at: *t, node: *node, kind, repair });
    }
    Ok(Failures { nodes, length, list }.checked()?)
}

/// Returns the lines that [`from_lines`] reads.
#[must_use]
pub fn to_lines(of: &Failures) -> String {
    let mut lines = vec![json!({"kind": "cluster", "nodes": of.nodes, "length_s": seconds(of.length)}).to_string()];
    for f in &of.list {
        let mut line = json!({"t_s": seconds(f.at), "node": f.node, "kind": f.kind.name()});
        if f.kind == Kind::Node {
            line["repair_s"] = seconds(f.repair).into();
        }
        lines.push(line.to_string());
    }
    lines.join("\n") + "\n"
}
