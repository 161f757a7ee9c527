//! The step that an agent makes durable when its job ends before it is done: the newest one that
//! all nodes hold in memory.
//!
//! There may be no coordinator to ask any more, so each agent chooses for itself. The checkpoint is
//! published only if all of them have chosen the same step.

use crate::id::{Generation, Step};
use std::collections::BTreeSet;

/// A step that all ranks of a world hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldStep {
    /// The generation whose ranks hold it. It may have restored the step, not captured it.
    pub generation: Generation,
    /// The step.
    pub step: Step,
    /// Number of ranks.
    pub world_size: u32,
}

/// The workers of one generation on all nodes, as far as publishing needs to know them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Crew {
    world_size: u32,
    restarts: u32,
}

/// What an agent remembers of its crews in order to choose that step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FinalStep {
    /// The newest crew whose workers have named their directories.
    crew: Crew,
    /// Local ranks of its workers that have done so.
    named: BTreeSet<u32>,
    /// A newer crew, none of whose workers has.
    begun: Option<Crew>,
    /// Generation and world size of the newest crew.
    latest: Option<(Generation, u32)>,
    held: Option<HeldStep>,
    durable: Option<Step>,
    /// The bug that the simulator is to find.
    #[cfg(feature = "planted")]
    pub planted: Option<crate::planted_bugs::Bug>,
}

impl FinalStep {
    /// Records that a crew starts. Until it names its directories, the crew before it counts as the
    /// last: its steps have somewhere to go.
    pub fn begin(&mut self, generation: Generation, world_size: u32, restarts: u32) {
        self.latest = Some((generation, world_size));
        self.begun = Some(Crew { world_size, restarts });
    }

    /// Records that a worker of the newest crew has named its directory. Returns true if it is the
    /// first of its crew: then what earlier crews have named no longer counts.
    pub fn named(&mut self, local_rank: u32) -> bool {
        let begun = self.begun.take();
        if let Some(crew) = begun {
            self.crew = crew;
            self.named.clear();
        }
        self.named.insert(local_rank);
        begun.is_some()
    }

    /// Records that all nodes hold a step of the newest crew, whose workers may be gone.
    pub fn held_by_all(&mut self, generation: Generation, step: Step) {
        if let Some((_, world_size)) = self.latest.filter(|(latest, _)| *latest == generation) {
            self.held = Some(HeldStep { generation, step, world_size });
        }
    }

    /// Records that all ranks resume from a step, or start from the beginning. Anything newer is
    /// obsolete, also on durable storage. `in_memory_only`: the step is not durable yet.
    pub fn goes_on_from(&mut self, generation: Generation, world_size: u32, step: Option<Step>, in_memory_only: bool) {
        if crate::is_planted!(self, LeftStepSaved) {
            return;
        }
        self.held = step.filter(|_| in_memory_only).map(|step| HeldStep { generation, step, world_size });
        self.durable = if in_memory_only { self.durable.filter(|d| Some(*d) < step) } else { step };
    }

    /// Records that a step is durable.
    pub fn durable(&mut self, step: Step) {
        self.durable = self.durable.max(Some(step));
    }

    /// Number of ranks of the newest crew that has named its directories.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.crew.world_size
    }

    /// Number of restarts before that crew.
    #[must_use]
    pub fn restarts(&self) -> u32 {
        self.crew.restarts
    }

    /// Returns the step to make durable, if there is one that is not. `sealed` returns the steps of
    /// a generation that the worker with this local rank has sealed: if all ranks are on this node,
    /// it may hold a newer step than it has heard of before the workers ended.
    pub fn choose(&self, sealed: impl Fn(Generation, u32) -> BTreeSet<Step>) -> Option<HeldStep> {
        let newer = |here: &HeldStep| self.held.is_none_or(|held| here.step > held.step);
        let newest = self.sealed_here(sealed).filter(newer).or(self.held)?;
        let due = self.durable.is_none_or(|durable| newest.step > durable);
        // Workers that have named no directory have nowhere to write to.
        let writable = !self.named.is_empty() && newest.world_size == self.crew.world_size;
        (due && writable).then_some(newest)
    }

    /// Returns the newest step that the newest crew has sealed on every rank, if all its ranks are
    /// on this node.
    fn sealed_here(&self, sealed: impl Fn(Generation, u32) -> BTreeSet<Step>) -> Option<HeldStep> {
        let (generation, world_size) = self.latest.filter(|(_, size)| *size == self.crew.world_size)?;
        if self.named.len() as u64 != u64::from(world_size) || self.begun.is_some() {
            return None;
        }
        let all = self.named.iter().map(|local| sealed(generation, *local));
        let step = *all.reduce(|a, b| &a & &b)?.last()?;
        Some(HeldStep { generation, step, world_size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Generation = Generation(1);
    const SECOND: Generation = Generation(2);

    fn nothing(_: Generation, _: u32) -> BTreeSet<Step> {
        BTreeSet::new()
    }

    /// Two of `world_size` ranks are here and have named their directories.
    fn crew(generation: Generation, world_size: u32) -> FinalStep {
        let mut last = FinalStep::default();
        last.begin(generation, world_size, 0);
        assert!(last.named(0) && !last.named(1));
        last
    }

    fn step(of: &FinalStep) -> Option<u64> {
        of.choose(nothing).map(|held| held.step.0)
    }

    #[test]
    fn the_newest_step_of_all_nodes_is_chosen_unless_it_is_durable() {
        let mut last = crew(FIRST, 4);
        assert_eq!(step(&last), None);
        last.held_by_all(FIRST, Step(7));
        assert_eq!(step(&last), Some(7));
        last.durable(Step(5));
        assert_eq!(step(&last), Some(7));
        last.durable(Step(7));
        assert_eq!(step(&last), None);
    }

    #[test]
    fn a_crew_that_has_named_no_directory_does_not_replace_the_one_before() {
        let mut last = crew(FIRST, 4);
        last.held_by_all(FIRST, Step(7));
        last.begin(SECOND, 4, 1);
        assert_eq!((step(&last), last.restarts()), (Some(7), 0));
        // A late word of the crew that is gone.
        last.held_by_all(FIRST, Step(8));
        assert_eq!(step(&last), Some(7));
        assert!(last.named(0));
        assert_eq!((step(&last), last.restarts()), (Some(7), 1));
        // A world of another size restores it in parts that are not those of these ranks.
        last.begin(SECOND, 2, 2);
        last.named(0);
        assert_eq!(step(&last), None);
    }

    #[test]
    fn what_is_newer_than_the_restored_step_did_not_happen() {
        let mut last = crew(FIRST, 4);
        last.held_by_all(FIRST, Step(9));
        last.durable(Step(8));
        last.goes_on_from(SECOND, 4, Some(Step(6)), true);
        assert_eq!(step(&last), Some(6));
        last.goes_on_from(SECOND, 4, Some(Step(6)), false);
        assert_eq!(step(&last), None);
        last.goes_on_from(SECOND, 4, None, false);
        assert_eq!(step(&last), None);
    }

    #[test]
    fn a_node_with_all_ranks_knows_what_they_have_sealed() {
        let sealed = |_: Generation, local: u32| (1..=10 - u64::from(local)).map(Step).collect::<BTreeSet<_>>();
        let mut last = crew(FIRST, 2);
        last.held_by_all(FIRST, Step(4));
        assert_eq!(last.choose(sealed).map(|held| held.step), Some(Step(9)));
        // Some of the ranks are elsewhere, and may not have got as far.
        let mut last = crew(FIRST, 4);
        last.held_by_all(FIRST, Step(4));
        assert_eq!(last.choose(sealed).map(|held| held.step), Some(Step(4)));
        // The slots are those of a crew that has not begun to train.
        let mut last = crew(FIRST, 2);
        last.begin(SECOND, 2, 1);
        assert_eq!(last.choose(sealed), None);
    }
}
