//! The jobs that share a cluster.

use everstep_planner::{self as planner, Move};
use std::sync::Arc;

/// One job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    pub id: String,
    /// In thousandths.
    pub weight: u32,
    /// The fewest nodes that it runs on.
    pub min: u32,
    /// What it achieves on `k` nodes, in millionths of a node's peak, at index `k`.
    pub achieved: Arc<[i64]>,
}

impl Job {
    /// Converts it to the planner's form, without nodes so far.
    #[must_use]
    pub fn to_plan(&self, moves: Move) -> planner::Job {
        planner::Job {
            id: self.id.clone(),
            weight: self.weight,
            min: self.min,
            current: 0,
            hit: false,
            achieved: self.achieved.clone(),
            moves,
        }
    }

    /// Returns what it achieves on this number of nodes, weighted, in millionths of a node's peak.
    /// Nodes beyond those that it can use add nothing.
    #[must_use]
    pub fn worth(&self, nodes: usize) -> i128 {
        let most = self.achieved.len().saturating_sub(1);
        i128::from(self.achieved.get(nodes.min(most)).copied().unwrap_or(0)) * i128::from(self.weight) / 1000
    }
}

/// Jobs that train for the whole time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The jobs, in order.
    pub jobs: Vec<Job>,
}

impl Workload {
    /// Returns one job on all nodes, which scales linearly and needs at least half of them.
    #[must_use]
    pub fn alone(nodes: u32) -> Workload {
        let achieved = (0..=i64::from(nodes)).map(|k| k * 1_000_000).collect();
        Workload { jobs: vec![Job { id: "job".into(), weight: 1000, min: nodes.div_ceil(2), achieved }] }
    }
}
