//! The progress of one generation's replicas: the step that was named, the nodes that hold it, and
//! the newest step that all of them hold.

use crate::digests::{Odd, odd_ones};
use crate::id::{Epoch, NodeId, Rank, Step};
use crate::message::{Redundancy, Replicated, Round, Sealed};
use std::collections::{BTreeMap, BTreeSet};

/// Replicas of one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replicas {
    /// Newest sealed step by node, of nodes that take part.
    sealed: BTreeMap<NodeId, Step>,
    /// Nodes that have replicated the current step, with the step they took for it.
    done: BTreeMap<NodeId, Step>,
    /// Digests of the ranks' states of the current step.
    digests: BTreeMap<Rank, u64>,
    /// Ranks whose state was found to differ.
    odd: BTreeSet<Rank>,
    /// The current step, which all nodes replicate.
    next: Option<Step>,
    /// Newest step that all nodes have with its replicas.
    committed: Option<Step>,
    /// The replicas to keep in addition to each rank's own state.
    wish: Redundancy,
    /// Number of the steps that were named.
    round: u64,
    /// Whether steps are shorter than it takes to name one, so that a step is named that no node
    /// has sealed yet.
    ahead: bool,
}

/// How far a round is after a node's report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoundState {
    /// Others have not reported, or the report belongs to an earlier round.
    Open,
    /// All have reported, with different steps.
    Mixed,
    /// All have replicated this step. `first`: no step was before.
    Complete {
        /// Whether it is the first step of the generation.
        first: bool,
    },
}

impl Replicas {
    /// Makes rounds of this life of the coordinator differ from those of all earlier ones.
    pub(crate) fn begin_after(&mut self, epoch: Epoch) {
        self.round = epoch.0 << 32;
    }

    /// Returns the newest step held by all.
    #[must_use]
    pub fn committed(&self) -> Option<Step> {
        self.committed
    }

    /// Returns the replicas to keep in addition to each rank's own state.
    pub(crate) fn wish(&self) -> Redundancy {
        self.wish
    }

    /// Records that one of `nodes` nodes takes part and has sealed `step`, or that it cannot
    /// replicate the step named in the round `instead`. Returns whether a step must be named.
    pub(crate) fn sealed(&mut self, node: &NodeId, sealed: Sealed, nodes: usize) -> bool {
        let Sealed { step, wish, instead, committed } = sealed;
        self.committed = self.committed.max(committed);
        let known = self.sealed.insert(node.clone(), step).is_some();
        let again = instead.map_or(known, |round| round == self.round);
        if instead.is_some() && !again {
            return false;
        }
        self.done.remove(node);
        if self.sealed.len() < nodes {
            return false;
        }
        self.wish = wish;
        if self.next.is_some() && !again {
            return false;
        }
        // It asks because what was named is gone already, or because it waits for a step that was
        // not named.
        self.ahead = self.next.is_some_and(|next| step >= next);
        true
    }

    /// Names the next step and returns its round: `held` if all ranks hold there to let the world
    /// grow.
    pub(crate) fn name_next(&mut self, held: Option<Step>) -> Round {
        self.done.clear();
        self.digests.clear();
        self.round += 1;
        // What all hold they have sealed, whether the events of all workers have arrived or not.
        let newest = self.sealed.values().max().copied().max(self.committed).unwrap_or_default();
        let next = match held {
            Some(held) if held > newest => held,
            _ if !self.ahead && self.committed.is_none_or(|c| newest > c) => newest,
            _ => Step(newest.0 + 1),
        };
        self.next = Some(next);
        Round { next, round: self.round }
    }

    /// Returns whether a step is held by all, or an older one than that.
    pub(crate) fn is_committed(&self, step: Step) -> bool {
        self.committed.is_some_and(|c| step <= c)
    }

    /// Records that one of `nodes` nodes has replicated a step.
    pub(crate) fn replicated(&mut self, node: &NodeId, replicated: Replicated, nodes: usize) -> RoundState {
        let Replicated { step, sealed, digests, round } = replicated;
        self.sealed.insert(node.clone(), sealed);
        if round != self.round {
            return RoundState::Open;
        }
        self.done.insert(node.clone(), step);
        self.digests.extend(digests);
        if self.done.len() < nodes {
            return RoundState::Open;
        }
        if !self.done.values().all(|s| *s == step) {
            // They took different steps for it: once more, with one that all are still to come to.
            self.ahead = true;
            return RoundState::Mixed;
        }
        let first = self.committed.replace(step).is_none();
        self.ahead &= self.sealed.values().all(|s| s.0 > step.0 + 1);
        RoundState::Complete { first }
    }

    /// Compares the states of all `size` ranks at the current step, which should have the same
    /// bits. Returns the ranks that differ if there are new ones among them.
    pub(crate) fn compare(&mut self, size: usize) -> Option<Odd> {
        if self.digests.len() < size {
            return None;
        }
        let Some(found) = odd_ones(&self.digests) else {
            self.odd.clear();
            return None;
        };
        let new = found.ranks.iter().any(|r| !self.odd.contains(r));
        self.odd.extend(&found.ranks);
        new.then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WISH: Redundancy = Redundancy { replicas: 1, data: 0, shared: false };

    fn node(number: usize) -> NodeId {
        NodeId(number.to_string())
    }

    fn done(step: u64, round: u64, digests: &[u64]) -> Replicated {
        let digests = (0..).map(Rank).zip(digests.iter().copied()).collect();
        Replicated { step: Step(step), sealed: Step(step), digests, round }
    }

    fn seals(step: u64) -> Sealed {
        Sealed { step: Step(step), wish: WISH, instead: None, committed: None }
    }

    /// Returns replicas of two nodes that have named a step, and the round.
    fn named(first: u64, second: u64) -> (Replicas, Round) {
        let mut replicas = Replicas::default();
        assert!(!replicas.sealed(&node(0), seals(first), 2), "one of two is not all");
        assert!(replicas.sealed(&node(1), seals(second), 2));
        let round = replicas.name_next(None);
        (replicas, round)
    }

    #[test]
    fn the_newest_sealed_step_is_replicated_first() {
        let (mut replicas, Round { next, round }) = named(4, 6);
        assert_eq!(next, Step(6));
        assert_eq!(replicas.replicated(&node(0), done(6, round, &[]), 2), RoundState::Open);
        assert_eq!(replicas.replicated(&node(1), done(6, round, &[]), 2), RoundState::Complete { first: true });
        assert_eq!(replicas.committed(), Some(Step(6)));
        assert!(replicas.is_committed(Step(5)) && !replicas.is_committed(Step(7)));
        assert_eq!(replicas.name_next(None).next, Step(7));
    }

    #[test]
    fn nodes_that_took_different_steps_take_one_that_is_still_to_come() {
        let (mut replicas, Round { round, .. }) = named(4, 4);
        replicas.replicated(&node(0), done(4, round, &[]), 2);
        assert_eq!(replicas.replicated(&node(1), done(5, round, &[]), 2), RoundState::Mixed);
        assert_eq!(replicas.name_next(None).next, Step(6));
        assert_eq!(replicas.replicated(&node(0), done(6, round, &[]), 2), RoundState::Open, "an earlier round is void");
        assert_eq!(replicas.committed(), None);
    }

    #[test]
    fn a_step_at_which_all_hold_comes_before_others() {
        let (mut replicas, _) = named(4, 4);
        assert_eq!(replicas.name_next(Some(Step(9))).next, Step(9));
        assert_eq!(replicas.name_next(Some(Step(2))).next, Step(4), "it is over");
    }

    #[test]
    fn an_odd_rank_is_told_once_until_all_agree() {
        let (mut replicas, Round { mut round, .. }) = named(1, 1);
        let mut odd = |digests: &[u64]| {
            replicas.replicated(&node(0), done(1, round, digests), 2);
            let odd = replicas.compare(3).map(|odd| odd.ranks);
            round = replicas.name_next(None).round;
            odd
        };
        assert_eq!(odd(&[5, 5, 5]), None);
        assert_eq!(odd(&[5, 6, 5]), Some(vec![Rank(1)]));
        assert_eq!(odd(&[5, 6, 5]), None);
        assert_eq!(odd(&[5, 5]), None, "too few to compare");
        assert_eq!(odd(&[5, 5, 5]), None);
        assert_eq!(odd(&[5, 6, 5]), Some(vec![Rank(1)]));
    }
}
