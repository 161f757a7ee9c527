//! The named invariants. The simulator checks all of them after every event. The coordinator checks
//! those that concern its own state; if one is broken, it stops, to be restarted from the store,
//! rather than continue.

use crate::message::World;
use std::collections::BTreeSet;
use std::fmt;

/// A property that must survive any sequence of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InvariantId {
    /// INV-01: at most one generation of a job trains at any time.
    OneGenerationTrains,
    /// INV-02: generations never decrease, neither in the store nor on a node.
    GenerationNeverDecreases,
    /// INV-03: no rank and no node appears twice in a world.
    RankOnce,
    /// INV-04: every worker has exactly one live owner.
    OneOwner,
    /// INV-05: no more restarts than the budget allows.
    BudgetKept,
    /// INV-06: once faults stop, the job reaches full size within a bound, or has ended for a
    /// stated reason.
    FullSizeAfterQuiet,
    /// INV-07: no worker starts for a generation that is not in the store.
    PersistBeforePromise,
    /// INV-08: a node with a live connection is a member.
    LiveNodeIsMember,
    /// INV-09: all ranks of a generation restore the same step, and each of them has offered it.
    /// None starts fresh where some rank has found a durable checkpoint.
    OneRestoreStep,
    /// INV-10: growing the world with waiting nodes loses no step.
    GrowingLosesNothing,
    /// INV-11: a step that all nodes held with its copies can be restored as long as one good copy
    /// of each shard remains.
    CommittedIsKept,
    /// INV-12: ranks are reported as different from the others, or as slow, only where they are.
    OnlyTheOddAreNamed,
    /// INV-13: only machines that have failed themselves are excluded for a failure.
    OnlyTheBrokenAreLeftOut,
    /// INV-14: every microsecond of every place for a rank has exactly one category.
    TimeIsWhole,
    /// INV-15: where all ranks hold the same state, no rank restores another's capture while every
    /// rank still has its own capture of a common step.
    OwnStateFirst,
    /// INV-16: an incident counts as made good only when every rank of the generation has reported
    /// the step that the job had reached before.
    CaughtUpTogether,
    /// INV-17: a step that agents make durable when their job ends is one that the job went on
    /// from, not one that it had left.
    FinalStepHappened,
    /// INV-18: the error that an agent ends with is that of the worker which failed first in the
    /// latest attempt in which any did.
    FirstErrorIsPassedOn,
}

impl InvariantId {
    /// Returns the number used in logs and documents.
    #[must_use]
    pub fn number(self) -> u32 {
        self as u32 + 1
    }
}

impl fmt::Display for InvariantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "INV-{:02} {self:?}", self.number())
    }
}

/// Checks INV-03 on one world: nodes are distinct, and ranks are `0..size` without gaps or
/// overlaps.
#[must_use]
pub fn rank_once(world: &World) -> bool {
    let nodes: BTreeSet<_> = world.slots.iter().map(|s| &s.node).collect();
    let mut next = 0;
    for slot in &world.slots {
        if slot.first_rank.0 != next {
            return false;
        }
        next += slot.workers;
    }
    nodes.len() == world.slots.len()
}
