//! What can be wrong with the files of a cluster and its jobs, and with an event.

use super::MOST;
use crate::throughput::{HardwareError, ModelError};

/// One of the two files that describe a [`super::Situation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanFile {
    Cluster,
    Jobs,
}

impl std::fmt::Display for PlanFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            PlanFile::Cluster => "the cluster file",
            PlanFile::Jobs => "the jobs file",
        })
    }
}

/// A value as written in a file or given by a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantity {
    /// Its place, as in `job a: regroup`.
    pub what: String,
    pub text: String,
}

impl std::fmt::Display for Quantity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} = \"{}\"", self.what, self.text)
    }
}

/// An invalid length of time, or an invalid speed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    #[error("{0} is not a length of time; write, for example, 90s, 5min, 3h or 260d")]
    NotTime(Quantity),
    #[error("{0} has no unit: write, for example, {text}s or {text}h", text = .0.text)]
    TimeWithoutUnit(Quantity),
    #[error("{0}: there is no unit {1}; there are ms, s, min, h and d")]
    UnknownTimeUnit(Quantity, String),
    #[error("{0} is too long; the longest time is 365000d")]
    TooLong(Quantity),
    #[error("{0} is not a speed: write, for example, 312 TFLOP/s")]
    NotSpeed(Quantity),
    #[error("{0} has no unit: write, for example, {text} TFLOP/s", text = .0.text)]
    SpeedWithoutUnit(Quantity),
    #[error("{0} must be greater than zero")]
    NotPositive(Quantity),
}

/// An invalid description of a cluster and its jobs.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanFileError {
    /// A file is not TOML, or has an unknown or missing field.
    #[error("{file}: {}", source.message())]
    Parse { file: PlanFile, source: Box<toml::de::Error> },
    #[error(transparent)]
    Quantity(#[from] QuantityError),
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    #[error(transparent)]
    Job(#[from] JobError),
    #[error("the cluster file: nodes = {nodes}, but {listed} are listed")]
    NodeCount { nodes: u32, listed: u32 },
    #[error("the cluster file: give nodes = N, or list them as [[node]]")]
    NoNodes,
    #[error("the cluster file: give gpus_per_node = N, or hardware = \"a800\"")]
    NoGpusPerNode,
    #[error("the cluster file: give peak = \"312 TFLOP/s\" (of one GPU), or hardware = \"a800\"")]
    NoPeak,
    /// The problem has too many nodes or jobs, or nodes without GPUs.
    #[error("at most {} nodes of at least one GPU and {} jobs are planned", MOST.0, MOST.1)]
    Size,
    #[error("there are two nodes {0}: give each an id of its own")]
    DuplicateNode(String),
    #[error("there are two jobs {0}: give each an id of its own")]
    DuplicateJob(String),
    #[error("node {node} belongs to job {job}, which is not in the jobs file")]
    UnknownJob { node: String, job: String },
    #[error("the jobs have {running} nodes, and the cluster has {units}")]
    TooFewNodes { running: u64, units: u32 },
}

/// An invalid job.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum JobError {
    #[error("job {job}: nodes = {nodes}, but {listed} are listed as its own")]
    NodeCount { job: String, nodes: u32, listed: usize },
    #[error("job {job}: weight = {weight} is not between 0.001 and 4 (usual: 0.5 to 2)")]
    Weight { job: String, weight: f64 },
    #[error("job {job}: parameters = \"{text}\" is not a model size: write, for example, 7B")]
    Parameters { job: String, text: String },
    #[error("job {job} has no throughput: give what it achieves on some numbers of nodes")]
    NoThroughput { job: String },
    #[error("job {job}: give its model or its throughput, not both")]
    ModelAndThroughput { job: String },
    #[error("job {job}: throughput on {nodes} nodes: give a number of nodes from 1 to {}", MOST.0)]
    ThroughputNodes { job: String, nodes: String },
    #[error("job {job}: throughput on {nodes} nodes is {times:.1} times their peak")]
    AbovePeak { job: String, nodes: u32, times: f64 },
    #[error("job {job}: min = {min} nodes, but its throughput is given for {most} at most")]
    Minimum { job: String, min: u32, most: usize },
    #[error("job {job} is given by its model: give the cluster's hardware, as in \"a800\"")]
    NoHardware { job: String },
    #[error("job {job}: {source}")]
    Model { job: String, source: ModelError },
    #[error(
        "job {job}: gpus = {gpus}: a job of less than a node has 1, 2, 4, … of its {node} GPUs; give nodes and \
         throughput for a larger one"
    )]
    Gpus { job: String, gpus: u32, node: u64 },
    #[error("job {job}: with gpus goes speed = \"300 TFLOP/s\", no throughput and no model")]
    SpeedOnly { job: String },
    #[error("job {job}: give its speed, as in \"300 TFLOP/s\"")]
    NoSpeed { job: String },
}

/// An event that cannot happen in a [`super::Situation`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    #[error("there is no node {0}")]
    UnknownNode(String),
    #[error("there is no job {0}")]
    UnknownJob(String),
    #[error("--event {event}: give a number of nodes, as in join:2")]
    NodeCount { event: String },
    #[error("--event {event} is not an event; give lose:NODE, join:COUNT, finish:JOB or launch:FILE")]
    Unknown { event: String },
}
