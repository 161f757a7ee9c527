//! What agents make durable when the job ends before it is done, each by itself.

use crate::oracle::Violation;
use crate::world::World;
use everstep_core::id::{Generation, Rank, Step};
use everstep_core::invariant::InvariantId;
use everstep_core::message::Place;
use std::collections::BTreeSet;

impl World {
    /// Records that the workers of a generation start on a host, and that they name their
    /// directories.
    pub(crate) fn begins(&mut self, host: usize, generation: Generation, place: &Place) {
        let size = self.oracle.worlds.get(&generation).map_or(0, |w| w.size);
        let (step, ranks) = self.hosts[host].last_mut();
        step.begin(generation, size, 0);
        *ranks = (0..place.slot.workers).map(|local| Rank(place.slot.first_rank.0 + local)).collect();
        for local in 0..place.slot.workers {
            step.named(local);
        }
    }

    pub(crate) fn goes_on_from(&mut self, host: usize, generation: Generation, step: Option<Step>, persist: bool) {
        let size = self.oracle.worlds.get(&generation).map_or(0, |w| w.size);
        self.hosts[host].last_mut().0.goes_on_from(generation, size, step, persist);
    }

    /// An agent ends before the job is done: it writes the shards of the last step. Checks INV-17
    /// when those of all ranks are written.
    pub(crate) fn saves_last(&mut self, host: usize) {
        let h = &self.hosts[host];
        let (last, ranks) = h.last();
        let held = |local: u32| h.memory.get(&local).into_iter().flatten().filter(|m| !m.rotten).map(|m| m.of);
        let sealed = |generation, local| -> BTreeSet<Step> {
            held(local).filter(|of| of.generation == generation).map(|of| of.step).collect()
        };
        let Some(chosen) = last.choose(sealed) else { return };
        let is_there = |local| held(local).any(|of| of.step == chosen.step && of.generation <= chosen.generation);
        if !(0..).zip(ranks).all(|(local, _)| is_there(local)) {
            return;
        }
        let written = self.oracle.last_steps.entry((chosen.generation, chosen.step)).or_default();
        written.extend(ranks);
        let whole = written.len() as u64 == u64::from(chosen.world_size);
        if whole && !self.oracle.is_of_this_past(chosen.generation, chosen.step, Generation(u64::MAX)) {
            let what = format!("the agents publish step {} of generation {}", chosen.step, chosen.generation);
            let violation = Violation { invariant: InvariantId::FinalStepHappened, at: self.now, what };
            self.oracle.violations.push(violation);
        }
    }
}
