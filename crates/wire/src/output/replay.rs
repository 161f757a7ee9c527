//! Failure traces, and what failures cost.

use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// What `everstep simulate --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Simulated {
    /// Version of this document: 1.
    pub version: u32,
    /// The trace, as given.
    pub trace: String,
    /// Number of nodes.
    pub nodes: u32,
    /// Length of the trace in days.
    pub days: f64,
    /// The first seed, and the one after the last, as given. A file is replayed only once, whatever
    /// the seeds.
    pub seeds: (u64, u64),
    /// Unit of the times in the accounts: `node-microseconds`.
    pub unit: &'static str,
    /// The policies; the first is the baseline.
    pub policies: Vec<PolicyResult>,
}

/// What a policy achieves.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PolicyResult {
    /// The policy.
    pub policy: String,
    /// Productive share of all nodes' time.
    pub goodput: Interval,
    /// What the jobs achieve, as a share of what they would without failures and overhead.
    pub of_ideal: Interval,
    /// What the first policy achieves, divided by what this one does; null: this one achieves
    /// nothing under some seed.
    pub first_by_it: Option<Interval>,
    /// Share of all nodes' time by account, over all seeds.
    pub shares: BTreeMap<String, f64>,
    /// The accounts of each seed.
    pub seeds: Vec<Accounts>,
}

/// A mean with its 95 % confidence interval. With one seed, both ends are the mean.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct Interval {
    /// The mean.
    pub mean: f64,
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

/// Where all nodes' time went under one seed.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Accounts {
    /// Time spent on work that was kept.
    pub productive: u64,
    /// Time in which nodes were up but achieved nothing, by cause.
    pub blocked: BTreeMap<String, u64>,
    /// Time spent on work that was lost.
    pub discarded: u64,
    /// Time in which nodes were down.
    pub unavailable: u64,
    /// What the jobs achieved, times their weights, in millionths of a node's peak for a
    /// microsecond. A decimal integer, as a string because it may exceed 64 bits.
    pub value: String,
    /// Number of failures that stopped a job.
    pub stopped: u32,
    /// Number of times a job changed its number of nodes.
    pub changes: u32,
    /// Number of failures that also destroyed the copies in memory.
    pub copies_lost: u32,
}

/// What `everstep size --json` prints, depending on the goal.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Sized {
    /// For `--slo available=…`.
    Available(SizedForAvailability),
    /// For `--slo goodput=…`.
    Goodput(SizedForGoodput),
}

/// The spares that an availability goal needs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SizedForAvailability {
    /// Version of this document: 1.
    pub version: u32,
    /// The goal, as given.
    pub goal: String,
    /// Number of nodes.
    pub nodes: u32,
    /// Number of spares needed, in 95 of 100 resampled traces.
    pub spares: u32,
    /// Number of spares that would be needed if failures were independent.
    pub spares_if_independent: usize,
}

/// What it takes to reach a goodput goal.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SizedForGoodput {
    /// Version of this document: 1.
    pub version: u32,
    /// The goal, as given.
    pub goal: String,
    /// Number of nodes.
    pub nodes: u32,
    /// Whether the goal is reached.
    pub reached: bool,
    /// The cheapest combination that reaches it or, if none does, the best one tried.
    pub best: Tried,
    /// The same combination with one setting at its cheapest value, by the name of the setting.
    pub without: BTreeMap<String, Tried>,
}

/// A combination that was tried.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct Tried {
    /// Spare nodes.
    pub spares: u32,
    /// Copies in memory.
    pub copies: u32,
    /// Seconds between checkpoints.
    pub interval_s: f64,
    /// Seconds until a failure is detected.
    pub detect_s: f64,
    /// Mean goodput.
    pub goodput: f64,
    /// Lower end of its 95 % confidence interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// What `everstep trace fit --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TraceFit {
    /// Version of this document: 1.
    pub version: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// Length of the trace in days.
    pub days: f64,
    /// Number of node failures.
    pub node_failures: usize,
    /// Number of other failures per node failure.
    pub others: f64,
    /// Mean time to failure of one node, in days.
    pub mtbf_days: f64,
    /// Repair times.
    pub repair_days: RepairDays,
    /// Coefficient of variation of the times between node failures; 1 for independent failures.
    pub variation: f64,
    /// Share of node failures that falls on the 10 % of nodes with the most of them.
    pub top_tenth: f64,
    /// Number of nodes down at once.
    pub down: Down,
}

/// Repair times, in days.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct RepairDays {
    /// The median.
    pub median: f64,
    /// The mean.
    pub mean: f64,
    /// The 99th percentile.
    pub p99: f64,
}

/// Number of nodes down at once.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct Down {
    /// The mean.
    pub mean: f64,
    /// The variance.
    pub variance: f64,
    /// The 99th percentile over time.
    pub p99: usize,
    /// The same for independent failures at the same rate.
    pub poisson_p99: usize,
}
