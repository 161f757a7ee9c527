//! What agents make durable when the job ends before it is done, each by itself.

use crate::host::Held;
use crate::oracle::Violation;
use crate::world::World;
use everstep_core::agent::final_step::HeldStep;
use everstep_core::id::{Generation, Rank, Step};
use everstep_core::invariant::InvariantId;
use everstep_core::message::Place;
use std::collections::BTreeSet;

impl World {
    /// Records that the workers of a generation start on a host, and that they name their
    /// directories.
    pub(crate) fn begins(&mut self, host: usize, generation: Generation, place: &Place) {
        let size = self.oracle.worlds.get(&generation).map_or(0, |w| w.size);
        let last = self.hosts[host].last_mut();
        last.step.begin(generation, size, 0);
        last.ranks = (0..place.slot.workers).map(|local| Rank(place.slot.first_rank.0 + local)).collect();
        for local in 0..place.slot.workers {
            last.step.named(local);
        }
    }

    pub(crate) fn goes_on_from(&mut self, host: usize, generation: Generation, step: Option<Step>, persist: bool) {
        let size = self.oracle.worlds.get(&generation).map_or(0, |w| w.size);
        let last = self.hosts[host].last_mut();
        last.step.goes_on_from(generation, size, step, persist);
        last.restored = Some((generation, step.unwrap_or_default()));
        self.check_last(host);
    }

    pub(crate) fn held_by_all(&mut self, host: usize, generation: Generation, step: Step) {
        self.hosts[host].last_mut().step.held_by_all(generation, step);
        self.check_last(host);
    }

    /// Checks INV-17 on what an agent would make durable if the job ended now: it was not told to
    /// go on from an earlier step since. Returns that step.
    fn check_last(&mut self, host: usize) -> Option<HeldStep> {
        let h = &self.hosts[host];
        let of = |m: &&Held, generation| !m.rotten && m.of.generation == generation;
        let sealed = |generation, local: u32| -> BTreeSet<Step> {
            let slots = h.memory.get(&local).into_iter().flatten();
            slots.filter(|m| of(m, generation)).map(|m| m.of.step).collect()
        };
        let chosen = h.last().step.choose(sealed)?;
        if h.last().restored.is_some_and(|(at, from)| chosen.generation < at && chosen.step > from) {
            self.left(host, chosen);
        }
        Some(chosen)
    }

    /// An agent ends before the job is done: it writes the shards of the last step. Checks INV-17
    /// for all agents when the shards of all ranks are written.
    pub(crate) fn saves_last(&mut self, host: usize) {
        let Some(chosen) = self.check_last(host) else { return };
        let h = &self.hosts[host];
        let is = |m: &Held| !m.rotten && m.of.step == chosen.step && m.of.generation <= chosen.generation;
        let is_there = |local| h.memory.get(&local).into_iter().flatten().any(is);
        if !(0..).zip(&h.last().ranks).all(|(local, _)| is_there(local)) {
            return;
        }
        let written = self.oracle.last_steps.entry((chosen.generation, chosen.step)).or_default();
        written.extend(&h.last().ranks);
        let whole = written.len() as u64 == u64::from(chosen.world_size);
        if whole && !self.oracle.is_of_this_past(chosen.generation, chosen.step, Generation(u64::MAX)) {
            self.left(host, chosen);
        }
    }

    fn left(&mut self, host: usize, chosen: HeldStep) {
        let what = format!("host {host} makes step {} of generation {} durable", chosen.step, chosen.generation);
        let violation = Violation { invariant: InvariantId::FinalStepHappened, at: self.now, what };
        self.oracle.violations.push(violation);
    }
}
