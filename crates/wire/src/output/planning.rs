//! How nodes are divided among jobs, and what throughput models achieve on them.

use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// What `everstep plan --json` prints. Worth and gains are in weighted node-peak-hours; with
/// `--mode fair`, the square root of the throughput counts.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Plan {
    /// Version of this document: 1.
    pub version: u32,
    /// Number of nodes available, after the events.
    pub nodes: u32,
    /// Number of nodes in use.
    pub used: u32,
    /// How long the plan is expected to hold, in seconds.
    pub horizon_s: f64,
    /// What the plan achieves in that time.
    pub worth: f64,
    /// The jobs.
    pub jobs: Vec<PlannedJob>,
    /// Nodes that change hands.
    pub moved: Vec<Moved>,
    /// Other ways of dividing the same nodes, by name.
    pub others: BTreeMap<String, OtherPlan>,
}

/// A job's part of a plan.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PlannedJob {
    /// The job.
    pub job: String,
    /// Number of nodes that it has now.
    pub before: u32,
    /// Number of nodes under the plan.
    pub nodes: u32,
    /// What that means, for people.
    pub what: String,
    /// Seconds until it continues; 0 if nothing changes or it gets no nodes.
    pub transition_s: f64,
    /// What it achieves while the plan holds.
    pub gain: f64,
    /// Change of its gain with one more node; null: it cannot use one.
    pub one_more: Option<f64>,
    /// Change of its gain with one fewer; null: it has none, or is at its minimum.
    pub one_less: Option<f64>,
    /// Names of its nodes under the plan, as far as they are known.
    pub named: Option<Vec<String>>,
}

/// A node that changes hands.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Moved {
    /// The node.
    pub node: String,
    /// The job that has it now; null: it is idle.
    pub from: Option<String>,
    /// The job that gets it; null: it becomes idle.
    pub to: Option<String>,
}

/// Another way of dividing the nodes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct OtherPlan {
    /// Number of nodes by job.
    pub nodes: BTreeMap<String, u32>,
    /// What it would achieve.
    pub worth: f64,
}

/// What `everstep plan throughput --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Throughput {
    /// Version of this document: 1.
    pub version: u32,
    /// The model.
    pub model: String,
    /// Number of its parameters.
    pub parameters: u64,
    /// The hardware.
    pub hardware: String,
    /// One row for each number of GPUs.
    pub sizes: Vec<SizeThroughput>,
}

/// The best layout for a number of GPUs. If none fits, `flops` is 0 and the rest is missing.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct SizeThroughput {
    /// Number of GPUs.
    pub gpus: u64,
    /// Whether the model fits in any layout.
    pub fits: bool,
    /// Model FLOP/s of all GPUs together.
    pub flops: f64,
    /// The same as a share of the GPUs' peak, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of_peak: Option<f64>,
    /// Whether `flops` was measured rather than computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<bool>,
    /// Memory needed per GPU, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<f64>,
    /// Tensor-parallel degree.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<u64>,
    /// Pipeline stages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline: Option<u64>,
    /// Data-parallel degree.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<u64>,
    /// Samples in a micro-batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<u64>,
    /// Chunks of the model on each pipeline stage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interleaved: Option<u64>,
    /// Which part of the forward pass is recomputed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recompute: Option<String>,
    /// Where the time of a step goes. Always computed, and not adjusted to measured points.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<LayoutSeconds>,
}

/// Duration of the parts of a step, in seconds.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct LayoutSeconds {
    /// Computation.
    pub compute: f64,
    /// Communication of tensor parallelism.
    pub tensor: f64,
    /// Communication between pipeline stages.
    pub stages: f64,
    /// Idle time of pipeline stages.
    pub bubble: f64,
    /// Communication of data parallelism.
    pub data: f64,
}
