//! The state of one job during a replay.

use super::policy::Policy;
use super::time_ledger::Cause;
use super::unsaved_work::UnsavedWork;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Runs,
    Blocked(Cause),
}

pub(super) struct State {
    /// Its nodes that are up, in the order of their places.
    pub(super) nodes: Vec<u32>,
    /// Its nodes when it last ran. Consecutive groups of these keep each other's copies.
    pub(super) placed: Vec<u32>,
    /// The number of nodes that each group has lost since.
    pub(super) groups: BTreeMap<usize, u32>,
    /// The number of nodes that it should have.
    pub(super) planned: u32,
    /// Since when it has lacked nodes. A node that returns goes to the job that has waited longest.
    pub(super) lacks: Option<u64>,
    pub(super) hit: bool,
    pub(super) phase: Phase,
    pub(super) since: u64,
    pub(super) version: u64,
    pub(super) unsaved: UnsavedWork,
    pub(super) kept: i128,
}

impl State {
    /// Returns the state of a job that runs on these nodes and has not worked yet.
    pub(super) fn new(policy: &Policy, nodes: Vec<u32>, planned: u32) -> State {
        let mut state = State {
            nodes,
            placed: Vec::new(),
            groups: BTreeMap::new(),
            planned,
            lacks: None,
            hit: false,
            phase: Phase::Runs,
            since: 0,
            version: 0,
            unsaved: UnsavedWork::default(),
            kept: 0,
        };
        state.runs(policy);
        state
    }

    /// Lets the job run. From now on, its current nodes keep the copies.
    pub(super) fn runs(&mut self, policy: &Policy) {
        (self.phase, self.hit) = (Phase::Runs, false);
        self.groups.clear();
        self.placed = if policy.copies > 0 { self.nodes.clone() } else { Vec::new() };
    }

    /// Removes a node that went down. Returns false if all copies of some node's state are lost.
    pub(super) fn loses(&mut self, policy: &Policy, node: u32) -> bool {
        self.nodes.retain(|n| *n != node);
        self.hit = true;
        let kept = self.placed.iter().position(|n| *n == node);
        let Some(group) = kept.and_then(|place| place.checked_div(policy.copies as usize)) else { return true };
        let lost = self.groups.entry(group).or_default();
        *lost += 1;
        *lost < policy.copies
    }

    /// Returns how many of its planned nodes it lacks.
    pub(super) fn missing(&self) -> u32 {
        self.planned.saturating_sub(self.nodes.len() as u32)
    }

    /// Returns how many nodes it has.
    pub(super) fn has(&self) -> u32 {
        self.nodes.len() as u32
    }
}
