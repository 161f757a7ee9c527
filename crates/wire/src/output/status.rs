//! The state of running jobs, and a coordinator's answers to requests about them.

use crate::raw::Raw;
use everstep_core::coordinator::command::Reason;
use everstep_core::id::{Epoch, Generation, JobId, NodeId, Step};
use everstep_core::progress::RankProgress;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What `everstep status --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Status {
    /// Version of this document: 1.
    pub version: u32,
    /// The jobs of all of this user's coordinators on this machine that answer.
    pub jobs: Vec<RunningJob>,
}

/// A job, and where its coordinator is.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct RunningJob {
    /// The job.
    #[serde(flatten)]
    pub status: JobStatus,
    /// Its coordinator.
    pub coordinator: CoordinatorAddress,
    /// File with the token that the coordinator requires.
    pub token_file: Raw,
    /// Directory with the coordinator's records, such as `events.jsonl`.
    pub store: Raw,
}

/// Where a coordinator is.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CoordinatorAddress {
    /// Host and port.
    pub endpoint: String,
    /// Its process id.
    pub pid: u32,
    /// Its epoch, which increases with each start.
    pub epoch: Epoch,
}

/// A coordinator's answer to `GET /v1/status`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CoordinatorStatus {
    /// Version of this document: 1.
    pub version: u32,
    /// The coordinator's epoch.
    pub epoch: Epoch,
    /// Its process id.
    pub pid: u32,
    /// Host and port.
    pub endpoint: String,
    /// Its jobs.
    pub jobs: Vec<JobStatus>,
}

/// The state of one job.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct JobStatus {
    /// Its name.
    pub job: JobId,
    /// What it is doing.
    pub phase: Phase,
    /// Why it is in this phase, for programs.
    pub reason: Reason,
    /// The reason as a sentence.
    pub why: String,
    /// Number of the latest start of its workers.
    pub generation: Generation,
    /// Number of ranks.
    pub world_size: u32,
    /// Restarts used so far.
    pub restarts: u32,
    /// Restarts allowed.
    pub max_restarts: u32,
    /// Newest step on durable storage; null if there is none.
    pub durable_step: Option<Step>,
    /// Newest step whose copies are all in the memory of other nodes; null if there is none, as on
    /// a single node.
    pub replicated_step: Option<Step>,
    /// Ranks that hold up the others, with their own work per step in percent of the others'.
    pub slow: BTreeMap<u32, u64>,
    /// Ranks that are somewhat slower than the others, in the same unit.
    pub sub_healthy: BTreeMap<u32, u64>,
    /// Its nodes.
    pub nodes: Vec<NodeStatus>,
    /// Its workers, by rank.
    pub workers: Vec<RankProgress>,
    /// Requests about machines.
    pub requests: Vec<RequestStatus>,
}

/// What a job is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// It is waiting for nodes, or restarting.
    Forming,
    /// It is training.
    Training,
    /// It is being stopped.
    Stopping,
    /// It is over.
    Over,
}

impl Phase {
    /// Returns the phase in a word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Phase::Forming => "forming",
            Phase::Training => "training",
            Phase::Stopping => "stopping",
            Phase::Over => "over",
        }
    }
}

/// A node of a job.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct NodeStatus {
    /// Its name in the job.
    pub node: NodeId,
    /// Its host.
    pub host: String,
    /// Whether it is connected to the coordinator.
    pub attached: bool,
    /// Class of the failure for which it is excluded; null: it is not excluded, or is in use for
    /// lack of other nodes.
    pub excluded: Option<String>,
    /// Number of its workers' role, because nodes are compared with others of the same role; null:
    /// not known.
    pub role: Option<u32>,
    /// Host and port that serve the checkpoints in its memory; null: it serves none.
    pub replicas: Option<String>,
}

/// A request about machines.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RequestStatus {
    /// Its number, for `everstep approve`.
    pub id: u64,
    /// What is requested, for people.
    pub what: String,
    /// Its stage: `noted`, `waiting` (for approval), `pending`, `accepted`, `done` or `failed`.
    pub stage: String,
}

/// What `everstep inject --json` prints.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct InjectAnswer {
    /// Version of this document: 1.
    pub version: u32,
    /// Whether the fault was sent to a node.
    pub injected: bool,
    /// The node that it was sent to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// Why it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The body of `POST /v1/jobs/JOB/approve`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Approval {
    /// Number of the request that is approved.
    pub request: u64,
}

/// The answer to `everstep approve`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Approved {
    /// What was approved, for people.
    Approved(String),
    /// Why nothing was approved.
    Why(String),
}
