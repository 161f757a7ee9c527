//! A job's history: incidents, the nodes at fault, where the time went, and stacks.

use everstep_core::history::{Incident, Lemon};
use everstep_core::id::NodeId;
use everstep_core::ledger::Spent;
use everstep_core::stacks::Group;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// What `everstep incidents ls --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct IncidentList {
    /// Version of this document: 1.
    pub version: u32,
    /// The incidents of each job's latest run, in order.
    pub incidents: Vec<IncidentReport>,
}

/// An incident of a job.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct IncidentReport {
    /// The job.
    pub job: String,
    /// What is known about the incident.
    pub incident: Incident,
    /// When it was declared, in UTC.
    pub opened: String,
    /// Microseconds from the first sign of the failure until the job had caught up or, if that is
    /// not recorded, until its first step afterwards; null: no such step is recorded.
    pub lasted_us: Option<u64>,
    /// `lasted_us` in seconds, times the number of ranks; null likewise.
    pub rank_seconds: Option<f64>,
}

/// What `everstep explain --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Explained {
    /// Version of this document: 1.
    pub version: u32,
    /// The job.
    pub job: String,
    /// The incident; null: the job's latest run has had none, and then so are `opened`, `lasted_us`
    /// and `rank_seconds`.
    pub incident: Option<Incident>,
    /// When it was declared, in UTC.
    pub opened: Option<String>,
    /// As in [`IncidentReport::lasted_us`].
    pub lasted_us: Option<u64>,
    /// As in [`IncidentReport::rank_seconds`].
    pub rank_seconds: Option<f64>,
    /// What else people should know about the latest run, one sentence each: ends that nothing
    /// confirms, and why the job could not go on if no incident shows that.
    pub notes: Vec<String>,
}

impl Explained {
    /// Returns the document about an incident.
    #[must_use]
    pub fn of(report: IncidentReport, notes: Vec<String>) -> Self {
        let IncidentReport { job, incident, opened, lasted_us, rank_seconds } = report;
        let (incident, opened) = (Some(incident), Some(opened));
        Explained { version: super::FIRST, job, incident, opened, lasted_us, rank_seconds, notes }
    }

    /// Returns the document about a job that has had no incident.
    #[must_use]
    pub fn nothing(job: String, notes: Vec<String>) -> Self {
        let (incident, opened) = (None, None);
        Explained { version: super::FIRST, job, incident, opened, lasted_us: None, rank_seconds: None, notes }
    }
}

/// What `everstep incidents nodes --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct NodeFailures {
    /// Version of this document: 1.
    pub version: u32,
    /// The jobs.
    pub jobs: Vec<JobNodes>,
}

/// The nodes of a job that were blamed for failures, over all its runs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct JobNodes {
    /// The job.
    pub job: String,
    /// The nodes, worst first.
    pub nodes: Vec<Lemon>,
}

/// What `everstep goodput --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Goodput {
    /// Version of this document: 2.
    pub version: u32,
    /// The jobs.
    pub jobs: Vec<JobGoodput>,
}

/// Where the time of a job's latest run went.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct JobGoodput {
    /// The job.
    pub job: String,
    /// Share of the held time that went into new steps, from 0 to 1. With `--base wallclock`, a
    /// share of the held and the queued time.
    pub goodput: f64,
    /// The same, but including the time that new steps took beyond their usual duration.
    pub goodput_time: f64,
    /// Rank-seconds for which the job held places for ranks.
    pub held_rank_seconds: f64,
    /// Rank-seconds that went into new steps.
    pub productive_rank_seconds: f64,
    /// `held_rank_seconds` in rank-microseconds.
    pub held_us: u64,
    /// Rank-microseconds before the first start for which requested ranks had not joined.
    pub queued_us: u64,
    /// Rank-microseconds by category; they add up to `held_us`.
    pub spent_us: Spent,
    /// The same by node.
    pub nodes: BTreeMap<NodeId, Spent>,
    /// The time that each incident cost, by its number.
    pub incidents: BTreeMap<u64, Spent>,
    /// All steps, new and repeated.
    pub steps: u64,
    /// New steps; null: not known, because a script without step numbers was restarted.
    pub new_steps: Option<u64>,
    /// Repeated steps; null for the same reason.
    pub repeated_steps: Option<u64>,
    /// True: there may have been more new steps than `new_steps`. All nodes that had completed them
    /// were lost before they reported them.
    pub maybe_more_new_steps: bool,
    /// True: there may have been more repeated steps than `repeated_steps`, for the same reason.
    pub maybe_more_repeated_steps: bool,
    /// Number of times the workers were started.
    pub generations: u32,
}

/// What `everstep stacks --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Stacks {
    /// Version of this document: 1.
    pub version: u32,
    /// The job.
    pub job: String,
    /// Ranks with the same stack, smallest group first.
    pub groups: Vec<Group>,
}
