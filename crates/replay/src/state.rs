//! One job while it is simulated.

use super::books::Cause;
use super::held::Held;
use super::policy::Policy;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Runs,
    Blocked(Cause),
}

pub(super) struct State {
    /// Its nodes that are up, in the order of their places.
    pub(super) nodes: Vec<u32>,
    /// Who kept whose copies when it last ran: one group after another,
    pub(super) placed: Vec<u32>,
    /// and the groups that have lost nodes since.
    pub(super) groups: BTreeMap<usize, u32>,
    /// Nodes that it is to have.
    pub(super) planned: u32,
    /// When it first lacked some, for who is given a node that returns.
    pub(super) lacks: Option<u64>,
    pub(super) hit: bool,
    pub(super) phase: Phase,
    pub(super) since: u64,
    pub(super) version: u64,
    pub(super) held: Held,
    pub(super) kept: i128,
}

impl State {
    /// It runs on these nodes, and has done nothing yet.
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
            held: Held::default(),
            kept: 0,
        };
        state.runs(policy);
        state
    }

    /// It runs: whoever it has keeps copies from now on.
    pub(super) fn runs(&mut self, policy: &Policy) {
        (self.phase, self.hit) = (Phase::Runs, false);
        self.groups.clear();
        self.placed = if policy.copies > 0 { self.nodes.clone() } else { Vec::new() };
    }

    /// A node of it is down. False when all copies of some node's state are.
    pub(super) fn loses(&mut self, policy: &Policy, node: u32) -> bool {
        self.nodes.retain(|n| *n != node);
        self.hit = true;
        let kept = self.placed.iter().position(|n| *n == node);
        let Some(group) = kept.and_then(|place| place.checked_div(policy.copies as usize)) else { return true };
        let lost = self.groups.entry(group).or_default();
        *lost += 1;
        *lost < policy.copies
    }

    /// Nodes that it is to have and has not.
    pub(super) fn missing(&self) -> u32 {
        self.planned.saturating_sub(self.nodes.len() as u32)
    }

    /// How many it has.
    pub(super) fn has(&self) -> u32 {
        self.nodes.len() as u32
    }
}
