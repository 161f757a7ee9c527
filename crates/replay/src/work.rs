//! Who shares the cluster.

use everstep_planner::{self as planner, Move};
use std::sync::Arc;

/// One job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its name.
    pub id: String,
    /// In thousandths.
    pub weight: u32,
    /// Fewest nodes that it runs on.
    pub min: u32,
    /// What it achieves on `k` nodes, in millionths of a node's peak.
    pub achieved: Arc<[i64]>,
}

impl Job {
    /// As the planner sees it: it has no nodes yet.
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

    /// Weighted, on so many nodes, in millionths of a node's peak: no more for nodes that it cannot use.
    #[must_use]
    pub fn worth(&self, nodes: usize) -> i128 {
        let most = self.achieved.len().saturating_sub(1);
        i128::from(self.achieved.get(nodes.min(most)).copied().unwrap_or(0)) * i128::from(self.weight) / 1000
    }
}

/// Jobs that train for the whole time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// In order.
    pub jobs: Vec<Job>,
}

impl Workload {
    /// One job on all nodes, which achieves as much as it has nodes, and runs on half of them at least.
    #[must_use]
    pub fn alone(nodes: u32) -> Workload {
        let achieved = (0..=i64::from(nodes)).map(|k| k * 1_000_000).collect();
        Workload { jobs: vec![Job { id: "job".into(), weight: 1000, min: nodes.div_ceil(2), achieved }] }
    }
}
