//! Attempts to change the size of the world, and the nodes that are left out of it.

use crate::id::{NodeId, Step};
use crate::time::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The named step must become readable for every node within this time, or training continues
/// unchanged.
const PATIENCE: Duration = Duration::from_mins(1);
/// How long growth is not tried again after that.
const PAUSE: Duration = Duration::from_mins(10);

/// An attempt to change the size of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Attempt {
    /// When the attempt is given up.
    until: Time,
    /// The step at which all ranks hold, once it is named.
    step: Option<Step>,
}

/// What is known about changes of the world's size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Growth {
    attempt: Option<Attempt>,
    /// No attempt before this time.
    not_before: Time,
    /// Whether the next world forms to change its size: waiting nodes are taken in.
    newcomers: bool,
    /// Nodes that could not read the job's state; true: because nothing was durable yet.
    unable: BTreeMap<NodeId, bool>,
    /// Nodes left out of a world (only used by the planted bug `TrimmedNeverReadmitted`).
    left_out: BTreeSet<NodeId>,
}

impl Growth {
    /// Begins a generation that these nodes are not part of.
    pub(crate) fn begin(&mut self, left_out: impl Iterator<Item = NodeId>) {
        self.attempt = None;
        self.newcomers = false;
        self.left_out.extend(left_out);
    }

    /// Returns the time before which no attempt is made.
    #[must_use]
    pub fn not_before(&self) -> Time {
        self.not_before
    }

    /// Returns when the current attempt is given up.
    #[must_use]
    pub fn until(&self) -> Option<Time> {
        self.attempt.map(|a| a.until)
    }

    /// Returns the step at which all ranks hold.
    #[must_use]
    pub fn step(&self) -> Option<Step> {
        self.attempt?.step
    }

    /// Starts an attempt.
    pub(crate) fn start(&mut self, now: Time) {
        self.attempt = Some(Attempt { until: now.after(PATIENCE), step: None });
    }

    /// Records the step at which all ranks hold. Returns false if no attempt waits for one.
    pub(crate) fn set_step(&mut self, step: Step) -> bool {
        let Some(attempt) = self.attempt.as_mut().filter(|a| a.step.is_none()) else { return false };
        attempt.step = Some(step);
        true
    }

    /// Drops an attempt without a step, which may be made again after a `pause`.
    pub(crate) fn postpone(&mut self, now: Time, pause: Duration) {
        if self.attempt.take_if(|a| a.step.is_none()).is_some() {
            self.not_before = now.after(pause);
        }
    }

    /// Drops the attempt, because the world ends for another reason.
    pub(crate) fn abandon(&mut self) {
        self.attempt = None;
    }

    /// Gives the attempt up. Returns whether ranks hold for it.
    pub(crate) fn give_up(&mut self, now: Time) -> bool {
        let Some(attempt) = self.attempt.take() else { return false };
        self.not_before = now.after(PAUSE);
        attempt.step.is_some()
    }

    /// Ends the attempt with a new world that takes waiting nodes in.
    pub(crate) fn finish(&mut self) {
        self.attempt = None;
        self.newcomers = true;
    }

    /// Returns whether the next world takes waiting nodes in.
    #[must_use]
    pub fn takes_newcomers(&self) -> bool {
        self.newcomers
    }

    /// Records that the next world forms for another reason.
    pub(crate) fn refuse_newcomers(&mut self) {
        self.newcomers = false;
    }

    /// Returns whether a node is not known to be unable to read the job's state.
    #[must_use]
    pub fn is_able(&self, node: &NodeId) -> bool {
        !self.unable.contains_key(node)
    }

    /// Returns whether no node is known to be unable to read the job's state.
    #[must_use]
    pub fn all_are_able(&self) -> bool {
        self.unable.is_empty()
    }

    /// Records nodes that cannot read the job's state; `too_early`: because nothing is durable yet.
    pub(crate) fn mark_unable(&mut self, nodes: Vec<NodeId>, too_early: bool) {
        self.unable.extend(nodes.into_iter().map(|n| (n, too_early)));
    }

    /// Records that a later life of the node may find what the earlier one could not.
    pub(crate) fn mark_able(&mut self, node: &NodeId) {
        self.unable.remove(node);
    }

    /// Records that a step is durable, which was too early for some nodes before.
    pub(crate) fn forget_too_early(&mut self) {
        self.unable.retain(|_, too_early| !*too_early);
    }

    /// Returns whether a node was left out of a world.
    pub(crate) fn was_left_out(&self, node: &NodeId) -> bool {
        self.left_out.contains(node)
    }
}
