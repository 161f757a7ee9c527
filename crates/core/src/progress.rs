//! The progress of one generation's ranks: what their agents report with every keep-alive, which
//! step all of them have completed, how long their steps take, and which of them hold the others
//! up.

use crate::id::{NodeId, Step};
use crate::median::median;
use crate::slow::{Change, SlowWatch};
use crate::time::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// How often a job's progress is recorded for the ledger.
const RECORD_EVERY: Duration = Duration::from_secs(5);

/// The progress of a worker, as its agent reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankProgress {
    /// Global rank.
    pub rank: u32,
    /// Process id on its node.
    pub pid: u32,
    /// Completed steps, if the worker reports them.
    pub step: Option<u64>,
    /// Steps are counted from the start of the process, because the step at which the script
    /// resumed is unknown.
    #[serde(default)]
    pub counted: bool,
    /// Length of the last step in milliseconds.
    pub step_ms: Option<u64>,
    /// Length of the last step in microseconds.
    #[serde(default)]
    pub step_us: Option<u64>,
    /// Part of the last step, in microseconds, that this rank did not spend waiting for others.
    #[serde(default)]
    pub own_us: Option<u64>,
    /// A process with torch imported is ready to replace the worker.
    #[serde(default)]
    pub warm: bool,
    /// Newest step sealed in memory.
    pub sealed: Option<u64>,
    /// Current activity: `starting`, `step`, `section NAME`, `waiting for data`, or `stopped`.
    pub doing: String,
}

/// The latest reports of all ranks of one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgressWatch {
    ranks: BTreeMap<NodeId, Vec<RankProgress>>,
    slow: SlowWatch,
    recorded: Option<Time>,
}

impl ProgressWatch {
    /// Takes a node's report. Returns the ranks that became slow, or recovered.
    pub fn report(&mut self, now: Time, node: &NodeId, ranks: Vec<RankProgress>) -> Vec<Change> {
        for rank in &ranks {
            if let (Some(step), Some(own)) = (rank.step, rank.own_us) {
                self.slow.saw(rank.rank, step, own);
            }
        }
        self.ranks.insert(node.clone(), ranks);
        self.slow.changes(now)
    }

    /// Forgets a node whose connection is lost.
    pub fn lost(&mut self, node: &NodeId) {
        self.ranks.remove(node);
    }

    /// Returns whether progress is due to be recorded, and if so, assumes that it is.
    pub fn record_is_due(&mut self, now: Time) -> bool {
        let due = self.recorded.is_none_or(|at| now.since(at) >= RECORD_EVERY);
        if due {
            self.recorded = Some(now);
        }
        due
    }

    /// Returns the latest report of each rank, by node.
    pub fn ranks(&self) -> impl Iterator<Item = &RankProgress> {
        self.ranks.values().flatten()
    }

    /// Returns the step that all ranks of a world of this size have completed; `None` until all of
    /// them report one.
    #[must_use]
    pub fn completed_by_all(&self, world_size: u32) -> Option<Step> {
        let steps: Vec<u64> = self.ranks().filter_map(|r| r.step).collect();
        steps.iter().min().filter(|_| steps.len() >= world_size as usize).map(|step| Step(*step))
    }

    /// Returns the median duration of the ranks' last steps, in microseconds.
    #[must_use]
    pub fn median_step_us(&self) -> Option<u64> {
        median(self.ranks().filter_map(|r| r.step_us))
    }

    /// Returns the lowest step that any rank has completed, once all ranks of a world of this size
    /// report. Ranks without an optimizer report no step.
    #[must_use]
    pub fn lowest_step(&self, world_size: u32) -> Option<Step> {
        let all = self.ranks().count() >= world_size as usize;
        self.ranks().filter_map(|r| r.step).min().filter(|_| all).map(Step)
    }

    /// Returns the comparison of the ranks with each other.
    #[must_use]
    pub fn slow(&self) -> &SlowWatch {
        &self.slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: u32, step: u64) -> RankProgress {
        RankProgress { rank, step: Some(step), step_us: Some(u64::from(rank) * 10), ..RankProgress::default() }
    }

    #[test]
    fn a_step_counts_when_all_ranks_report_it() {
        let (a, b) = (NodeId("a".into()), NodeId("b".into()));
        let mut watch = ProgressWatch::default();
        watch.report(Time(0), &a, vec![rank(0, 7), rank(1, 8)]);
        assert_eq!(watch.completed_by_all(3), None);
        watch.report(Time(1), &b, vec![rank(2, 5)]);
        assert_eq!(watch.completed_by_all(3), Some(Step(5)));
        assert_eq!(watch.median_step_us(), Some(10));
        watch.lost(&b);
        assert_eq!(watch.completed_by_all(3), None);
    }

    #[test]
    fn a_node_that_reports_again_is_counted_once() {
        let a = NodeId("a".into());
        let mut watch = ProgressWatch::default();
        watch.report(Time(0), &a, vec![rank(0, 7)]);
        watch.report(Time(1), &a, vec![rank(0, 9)]);
        assert_eq!((watch.ranks().count(), watch.completed_by_all(2)), (1, None));
    }

    #[test]
    fn progress_is_recorded_every_few_seconds() {
        let mut watch = ProgressWatch::default();
        let due: Vec<u64> = (0..12_000).step_by(250).filter(|at| watch.record_is_due(Time(*at))).collect();
        assert_eq!(due, [0, 5000, 10_000]);
    }
}
