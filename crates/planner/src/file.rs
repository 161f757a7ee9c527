//! The description of a cluster and its jobs (TOML), with errors that explain what is wrong in a
//! sentence.

mod error;
mod small;

pub use error::{EventError, JobError, PlanFile, PlanFileError, Quantity, QuantityError};

use super::assign::Unit;
use super::problem::{Job, Mode, Move, Problem, Rates};
use super::throughput::{Calibration, Hardware, Transformer, best};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Maximum numbers of nodes and of jobs in a problem.
const MOST: (u32, usize) = (100_000, 4000);
/// Longest time that can be given, in seconds: a thousand years. Sums of a few such times must not
/// overflow.
const LONGEST: f64 = 1000.0 * 365.0 * 86_400.0;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Cluster {
    nodes: Option<u32>,
    #[serde(default)]
    node: Vec<Node>,
    gpus_per_node: Option<u32>,
    peak: Option<String>,
    hardware: Option<String>,
    node_mtbf: Option<String>,
    #[serde(default)]
    back_in: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Node {
    id: String,
    job: Option<String>,
    #[serde(default)]
    group: u32,
    #[serde(default)]
    domain: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Jobs {
    #[serde(default)]
    job: Vec<Written>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    id: String,
    #[serde(default = "usual")]
    weight: f64,
    #[serde(default)]
    min: u32,
    nodes: Option<u32>,
    parameters: Option<String>,
    #[serde(default)]
    throughput: BTreeMap<String, String>,
    model: Option<String>,
    batch: Option<u64>,
    gpus: Option<u32>,
    speed: Option<String>,
    regroup: Option<String>,
    state: Option<String>,
    lost: Option<String>,
    done_in: Option<String>,
}

fn usual() -> f64 {
    1.0
}

/// Splits a number from its unit, as in `3.5 h`.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number = text.get(..end)?.parse().ok()?;
    Some((number, text.get(end..)?.trim()))
}

/// Parses a time: `90s`, `5min`, `3h`, `260d`.
///
/// # Errors
/// Fails if `text` is not a time, has no known unit, or is too long. The error names `what`.
pub fn time(what: &str, text: &str) -> Result<Duration, QuantityError> {
    let of = || Quantity { what: what.to_owned(), text: text.to_owned() };
    let (number, unit) = split(text).ok_or_else(|| QuantityError::NotTime(of()))?;
    let seconds = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        "" => return Err(QuantityError::TimeWithoutUnit(of())),
        _ => return Err(QuantityError::UnknownTimeUnit(of(), unit.to_owned())),
    };
    Some(number * seconds)
        .filter(|s| *s <= LONGEST)
        .and_then(|s| Duration::try_from_secs_f64(s).ok())
        .ok_or_else(|| QuantityError::TooLong(of()))
}

/// Parses a speed such as `312 TFLOP/s`, and returns it in FLOP/s.
fn speed(what: &str, text: &str) -> Result<f64, QuantityError> {
    let of = || Quantity { what: what.to_owned(), text: text.to_owned() };
    let wrong = || QuantityError::NotSpeed(of());
    let (number, unit) = split(text).ok_or_else(wrong)?;
    let scale = match unit.strip_suffix("FLOP/s").or_else(|| unit.strip_suffix("FLOPS")) {
        Some("M") => 1e6,
        Some("G") => 1e9,
        Some("T") => 1e12,
        Some("P") => 1e15,
        Some("E") => 1e18,
        _ if unit.is_empty() => {
            return Err(QuantityError::SpeedWithoutUnit(of()));
        }
        _ => return Err(wrong()),
    };
    if number * scale > 0.0 { Ok(number * scale) } else { Err(QuantityError::NotPositive(of())) }
}

/// Returns the achieved FLOP/s on 0, 1, 2, … nodes, in millionths of a node's peak, by linear
/// interpolation between the points.
fn achieved(job: &str, points: &BTreeMap<String, String>, peak: f64) -> Result<Arc<[i64]>, PlanFileError> {
    let mut known: BTreeMap<u32, f64> = BTreeMap::new();
    for (nodes, text) in points {
        let count = nodes.parse().ok().filter(|n| (1..=MOST.0).contains(n));
        let count = count.ok_or_else(|| JobError::ThroughputNodes { job: job.to_owned(), nodes: nodes.clone() })?;
        known.insert(count, speed(&format!("job {job}: throughput on {nodes} nodes"), text)? / peak);
    }
    let most = known.keys().next_back().copied().ok_or_else(|| JobError::NoThroughput { job: job.to_owned() })?;
    if let Some((nodes, share)) = known.iter().find(|(nodes, share)| **share > f64::from(**nodes)) {
        let times = share / f64::from(*nodes);
        return Err(JobError::AbovePeak { job: job.to_owned(), nodes: *nodes, times }.into());
    }
    let at = |k: u32| {
        let (below, above) = (known.range(..=k).next_back(), known.range(k..).next());
        let (x0, y0) = below.map_or((0.0, 0.0), |(x, y)| (f64::from(*x), *y));
        let (x1, y1) = above.map_or((x0, y0), |(x, y)| (f64::from(*x), *y));
        let share = if x1 > x0 { y0 + (y1 - y0) * (f64::from(k) - x0) / (x1 - x0) } else { y0 };
        (share * 1e6).round() as i64
    };
    Ok((0..=most).map(at).collect())
}

/// The contents of both files.
#[derive(Clone, Debug, PartialEq)]
pub struct Situation {
    /// The planning problem; a unit is a node.
    pub problem: Problem,
    /// The working nodes.
    pub nodes: Vec<Unit>,
    /// Number of parameters of the jobs' models, where given.
    pub parameters: BTreeMap<String, u64>,
    /// Peak FLOP/s of a node.
    pub peak: u64,
    /// Number of GPUs per node.
    pub gpus: u64,
    /// The hardware, for jobs given by their models.
    pub hardware: Option<Hardware>,
}

/// Reads the description of the cluster and of its jobs.
///
/// # Errors
/// Fails if a file is malformed, or if its values are invalid or contradict each other.
pub fn read(cluster: &str, jobs: &str, mode: Mode) -> Result<Situation, PlanFileError> {
    let mut of: Cluster = parsed(PlanFile::Cluster, cluster)?;
    let all = written(jobs)?;
    let listed = u32::try_from(of.node.len()).unwrap_or(u32::MAX);
    let units = match of.nodes {
        Some(nodes) if listed == 0 || nodes == listed => nodes,
        Some(nodes) => return Err(PlanFileError::NodeCount { nodes, listed }),
        None if listed > 0 => listed,
        None => return Err(PlanFileError::NoNodes),
    };
    let hardware = of.hardware.as_deref().map(Hardware::named).transpose()?;
    let gpus = of.gpus_per_node.map(u64::from).or(hardware.as_ref().map(|h| h.gpus_per_node));
    let gpus = gpus.ok_or(PlanFileError::NoGpusPerNode)?;
    if units > MOST.0 || gpus == 0 || all.len() > MOST.1 {
        return Err(PlanFileError::Size);
    }
    let (all, homes) = small::packed(all, gpus)?;
    for job in of.node.iter_mut().filter_map(|node| node.job.as_mut()) {
        homes.get(job.as_str()).inspect(|home| job.clone_from(home));
    }
    let peak = of.peak.as_deref().map(|p| speed("peak", p)).transpose()?.or(hardware.as_ref().map(Hardware::peak));
    let peak = peak.ok_or(PlanFileError::NoPeak)? * gpus as f64;
    let rates = Rates {
        unit_mtbf: of.node_mtbf.as_deref().map(|t| time("node_mtbf", t)).transpose()?,
        repairs: of.back_in.iter().map(|t| time("back_in", t)).collect::<Result<_, _>>()?,
        ..Rates::default()
    };
    let problem = Problem { units, jobs: Vec::new(), mode, rates };
    let mut found = Situation {
        problem,
        nodes: nodes(&of, &all, units)?,
        parameters: BTreeMap::new(),
        peak: peak as u64,
        gpus,
        hardware,
    };
    for job in &all {
        found.launch(job)?;
    }
    Ok(found)
}

fn parsed<T: serde::de::DeserializeOwned>(file: PlanFile, text: &str) -> Result<T, PlanFileError> {
    toml::from_str(text).map_err(|e| PlanFileError::Parse { file, source: Box::new(e) })
}

fn written(jobs: &str) -> Result<Vec<Written>, PlanFileError> {
    Ok(parsed::<Jobs>(PlanFile::Jobs, jobs)?.job)
}

/// Returns the nodes as listed. Without a list, they are numbered: the first ones belong to the
/// first job, and so on.
fn nodes(of: &Cluster, jobs: &[Written], units: u32) -> Result<Vec<Unit>, PlanFileError> {
    let mut ids = BTreeSet::new();
    for node in &of.node {
        if !ids.insert(&node.id) {
            return Err(PlanFileError::DuplicateNode(node.id.clone()));
        }
        if let Some(job) = node.job.as_ref().filter(|job| jobs.iter().all(|j| j.id != **job)) {
            return Err(PlanFileError::UnknownJob { node: node.id.clone(), job: job.clone() });
        }
    }
    let of_job = |job: &Written| of.node.iter().filter(|n| n.job.as_ref() == Some(&job.id)).count();
    if !of.node.is_empty() {
        if let Some(job) = jobs.iter().find(|j| j.nodes.is_some_and(|n| n as usize != of_job(j))) {
            let (nodes, listed) = (job.nodes.unwrap_or(0), of_job(job));
            return Err(JobError::NodeCount { job: job.id.clone(), nodes, listed }.into());
        }
        let unit = |n: &Node| Unit { id: n.id.clone(), job: n.job.clone(), group: n.group, domain: n.domain.clone() };
        return Ok(of.node.iter().map(unit).collect());
    }
    let running: u64 = jobs.iter().map(|j| u64::from(j.nodes.unwrap_or(0))).sum();
    if running > u64::from(units) {
        return Err(PlanFileError::TooFewNodes { running, units });
    }
    let owners = jobs.iter().flat_map(|j| std::iter::repeat_n(Some(j.id.clone()), j.nodes.unwrap_or(0) as usize));
    let unit = |(number, job)| Unit { id: format!("node{number}"), job, group: 0, domain: String::new() };
    Ok((0..units).zip(owners.chain(std::iter::repeat(None))).map(unit).collect())
}

impl Situation {
    fn launch(&mut self, w: &Written) -> Result<(), PlanFileError> {
        if self.problem.jobs.iter().any(|j| j.id == w.id) {
            return Err(PlanFileError::DuplicateJob(w.id.clone()));
        }
        if !(0.001..=4.0).contains(&w.weight) {
            return Err(JobError::Weight { job: w.id.clone(), weight: w.weight }.into());
        }
        let within = |name: &str, text: &Option<String>| {
            text.as_deref().map_or(Ok(Duration::ZERO), |t| time(&format!("job {}: {name}", w.id), t))
        };
        let (regroup, state, lost) =
            (within("regroup", &w.regroup)?, within("state", &w.state)?, within("lost", &w.lost)?);
        let rates = &mut self.problem.rates;
        rates.at_least = rates.at_least.max((regroup + state + lost) * 10);
        if w.done_in.is_some() {
            rates.finishes.push(within("done_in", &w.done_in)?);
        }
        let achieved = match &w.model {
            Some(model) if w.throughput.is_empty() => self.computed(&w.id, model, w.batch)?,
            Some(_) => return Err(JobError::ModelAndThroughput { job: w.id.clone() }.into()),
            None => achieved(&w.id, &w.throughput, self.peak as f64)?,
        };
        if achieved.len() <= w.min as usize {
            return Err(JobError::Minimum { job: w.id.clone(), min: w.min, most: achieved.len() - 1 }.into());
        }
        // On fewer nodes, a model may not fit at all.
        let smallest = achieved.iter().position(|a| *a > 0).and_then(|k| u32::try_from(k).ok()).unwrap_or(0);
        let min = if w.model.is_some() && w.min > 0 { w.min.max(smallest) } else { w.min };
        if let Some(text) = &w.parameters {
            self.parameters.insert(w.id.clone(), parameters(&w.id, text)?);
        }
        let current = self.nodes.iter().filter(|n| n.job.as_ref() == Some(&w.id)).count();
        self.problem.jobs.push(Job {
            id: w.id.clone(),
            weight: (w.weight * 1000.0).round() as u32,
            min,
            current: u32::try_from(current).unwrap_or(u32::MAX),
            hit: false,
            achieved,
            moves: Move { regroup, state, lost },
        });
        Ok(())
    }

    /// Returns the achieved FLOP/s of a model on 0, 1, 2, … nodes, by the throughput model.
    fn computed(&self, job: &str, model: &str, batch: Option<u64>) -> Result<Arc<[i64]>, JobError> {
        let on = self.hardware.as_ref().ok_or_else(|| JobError::NoHardware { job: job.to_owned() })?;
        let mut model = Transformer::named(model).map_err(|source| JobError::Model { job: job.to_owned(), source })?;
        model.batch = batch.unwrap_or(model.batch).max(1);
        let at = |nodes: u64| {
            let found = best(&model, nodes * on.gpus_per_node, on, &Calibration::default());
            found.map_or(0, |b| (b.achieved / self.peak as f64 * 1e6).round() as i64)
        };
        // More copies than samples are useless.
        let most = u64::from(self.problem.units).min(model.batch);
        Ok((0..=most).map(at).collect())
    }

    /// Returns the situation with additional waiting jobs, given in the format of the jobs file.
    ///
    /// # Errors
    /// See [`read`].
    pub fn launched(&self, jobs: &str) -> Result<Situation, PlanFileError> {
        let mut next = self.clone();
        let (all, _) = small::packed(written(jobs)?, next.gpus)?;
        all.iter().try_for_each(|job| next.launch(job))?;
        Ok(next)
    }

    /// Returns the situation after an event: `lose:NODE`, `join:COUNT` or `finish:JOB`.
    ///
    /// # Errors
    /// Fails if the event is malformed, or if there is no such node or job.
    pub fn after(&self, event: &str) -> Result<Situation, EventError> {
        let mut next = self.clone();
        match event.split_once(':') {
            Some(("lose", id)) => {
                let at = next.nodes.iter().position(|n| n.id == id);
                let lost = next.nodes.remove(at.ok_or_else(|| EventError::UnknownNode(id.to_owned()))?);
                next.problem.units -= 1;
                next.problem.jobs.iter_mut().filter(|j| Some(&j.id) == lost.job.as_ref()).for_each(|j| j.hit = true);
            }
            Some(("join", count)) => {
                let count = count.parse().ok().filter(|n| (1..=MOST.0).contains(n));
                let count: u32 = count.ok_or_else(|| EventError::NodeCount { event: event.to_owned() })?;
                next.problem.units = next.problem.units.saturating_add(count).min(MOST.0);
                next.nodes.extend((1..=count).map(|n| Unit {
                    id: format!("new{n}"),
                    job: None,
                    group: 0,
                    domain: String::new(),
                }));
            }
            Some(("finish", id)) => {
                let before = next.problem.jobs.len();
                next.problem.jobs.retain(|j| j.id != id);
                if next.problem.jobs.len() == before {
                    return Err(EventError::UnknownJob(id.to_owned()));
                }
            }
            _ => return Err(EventError::Unknown { event: event.to_owned() }),
        }
        Ok(next)
    }
}

/// Parses a model size such as `7B`.
fn parameters(job: &str, text: &str) -> Result<u64, JobError> {
    let (number, unit) = split(text).unwrap_or((0.0, ""));
    let scale = match unit {
        "M" => 1e6,
        "B" => 1e9,
        "T" => 1e12,
        _ => return Err(JobError::Parameters { job: job.to_owned(), text: text.to_owned() }),
    };
    Ok((number * scale) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: &str = "nodes = 8\ngpus_per_node = 8\npeak = \"312 TFLOP/s\"\nnode_mtbf = \"260d\"";
    const JOB: &str = "[[job]]\nid = \"a\"\nmin = 1\nnodes = 2\nregroup = \"20s\"\n[job.throughput]\n1 = \"1 PFLOP/s\"\n4 = \"4.4 PFLOP/s\"";

    #[test]
    fn points_are_joined_by_lines() {
        let read = read(CLUSTER, JOB, Mode::Floor).unwrap();
        let problem = &read.problem;
        let job = &problem.jobs[0];
        assert_eq!((problem.units, job.most(), job.weight), (8, 4, 1000));
        assert_eq!(job.achieved.iter().map(|v| v / 1000).collect::<Vec<_>>(), [0, 400, 854, 1308, 1762]);
        assert_eq!(problem.rates.at_least, Duration::from_secs(200));
    }

    #[test]
    fn what_happens_changes_nodes_and_jobs() {
        let now = read(CLUSTER, JOB, Mode::Floor).unwrap();
        let ids = |s: &Situation| s.nodes.iter().filter(|n| n.job.is_some()).map(|n| n.id.clone()).collect::<Vec<_>>();
        assert_eq!(ids(&now), ["node0", "node1"]);
        let lost = now.after("lose:node1").unwrap();
        assert!(lost.problem.units == 7 && lost.problem.jobs[0].hit && ids(&lost) == ["node0"]);
        assert_eq!(lost.problem.jobs[0].current, 2, "what it had");
        assert!(!now.after("lose:node5").unwrap().problem.jobs[0].hit, "an idle one");
        assert_eq!(now.after("join:2").unwrap().nodes.len(), 10);
        assert!(now.after("finish:a").unwrap().problem.jobs.is_empty());
        for (event, words) in [
            ("lose:node9", "no node node9"),
            ("join:x", "as in join:2"),
            ("finish:b", "no job b"),
            ("rain", "launch:FILE"),
        ] {
            assert!(now.after(event).unwrap_err().to_string().contains(words));
        }
    }

    #[test]
    fn what_is_wrong_is_said_in_a_sentence() {
        let cluster = |from: &str, to: &str| read(&CLUSTER.replace(from, to), JOB, Mode::Floor).unwrap_err();
        let job = |from: &str, to: &str| read(CLUSTER, &JOB.replace(from, to), Mode::Floor).unwrap_err();
        for (said, words) in [
            (cluster("312 TFLOP/s", "312"), "write, for example, 312 TFLOP/s"),
            (cluster("260d", "260"), "has no unit"),
            (cluster("260d", "-3h"), "is not a length of time"),
            (cluster("nodes = 8", "nodes = 1"), "have 2 nodes, and the cluster has 1"),
            (cluster("nodes", "knots"), "unknown field `knots`"),
            (cluster("nodes = 8", ""), "give nodes = N"),
            (job("min = 1", "parameters = \"7\""), "for example, 7B"),
            (
                read(
                    &format!("{}\n[[node]]\nid = \"x\"\njob = \"z\"", CLUSTER.replace("nodes = 8", "")),
                    JOB,
                    Mode::Floor,
                )
                .unwrap_err(),
                "which is not in the jobs file",
            ),
            (job("20s", "20 fortnights"), "there is no unit fortnights"),
            (job("min = 1", "min = 5"), "given for 4 at most"),
            (job("1 = \"1 P", "0 = \"1 P"), "from 1 to 100000"),
            (job("4.4 P", "44 P"), "times their peak"),
            (job("min = 1", "weight = 9.0"), "between 0.001 and 4"),
            (read(CLUSTER, &format!("{JOB}\n{JOB}"), Mode::Floor).unwrap_err(), "two jobs a"),
        ] {
            let said = said.to_string();
            assert!(said.contains(words) && !said.contains('\n'), "{said}");
        }
    }
}
