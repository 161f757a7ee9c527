//! How a node joins its job.

use super::{Ended, Failure, Stop};
use crate::id::{Generation, Incarnation, NodeId};
use crate::spec::JobSpec;
use serde::{Deserialize, Serialize};

/// The first message on a connection: who the node is, and what the coordinator may have missed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Node id, unique in the job.
    pub node: NodeId,
    /// This life of the agent.
    pub incarnation: Incarnation,
    /// What the job needs; all nodes must present the same spec.
    pub spec: JobSpec,
    /// Host at which other nodes reach this one.
    pub host: String,
    /// Number of workers on this node (`--nproc-per-node`).
    pub workers: u32,
    /// Port of a fresh process-group store, in case this node leads the next world.
    pub store_port: u16,
    /// Port for sending and fetching replicas; 0 for none.
    #[serde(default)]
    pub replica_port: u16,
    /// Nodes with the same failure domain may fail together (`--failure-domain`); empty: unknown.
    #[serde(default)]
    pub domain: String,
    /// Role of the node's workers (`--role`).
    #[serde(default)]
    pub role: String,
    /// Highest generation that this life of the agent has started or fenced.
    pub seen: Generation,
    /// The run of the job that this agent was last welcomed to, by the agent that began it; `None`:
    /// to none yet. An agent that was away when its run ended belongs to no later one.
    #[serde(default)]
    pub began: Option<Incarnation>,
    /// Workers, alive or exited, of the generation that this agent still runs.
    pub running: Option<Running>,
    /// The stop of the job that this agent was asked or ordered to make. A coordinator that has
    /// just started knows of none.
    #[serde(default)]
    pub stop: Option<Stop>,
    /// How long its workers may take to end after a stop (`--shutdown-timeout`).
    #[serde(default)]
    pub shutdown_grace_ms: u64,
}

/// State of the workers of one generation on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// Generation of the workers.
    pub generation: Generation,
    /// Failures among them, the first one first.
    #[serde(default)]
    pub failures: Vec<Failure>,
    /// The scripts of all workers are over, and so are their processes.
    pub finished: bool,
    /// Some worker has completed a step that it did not restore.
    pub progressed: bool,
    /// Workers whose scripts are over.
    #[serde(default)]
    pub ended: Vec<Ended>,
}
