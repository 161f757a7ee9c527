//! What the machines' memory holds: their own steps, copies of others', and how copies get there and back.

use crate::host::Held;
use crate::world::{Happening, World};
use everstep_core::agent::event::Event as AgentEvent;
use everstep_core::id::{Generation, Rank, Step};
use everstep_core::invariant::InvariantId;
use everstep_core::message::{Copies, Holding, Keeper, Source, Tier};
use std::collections::BTreeSet;

/// A step that all nodes have been told is held by all.
#[derive(Clone, Copy, Debug)]
pub struct Committed {
    pub generation: Generation,
    pub step: Step,
    pub world_size: u32,
}

impl World {
    /// Sharded and replicated state take turns: every rank its own, or all the same.
    pub(crate) fn shared(&self) -> bool {
        self.options.seed.is_multiple_of(2)
    }

    /// The workers of a host have sealed a step.
    pub(crate) fn seal(&mut self, host: usize, generation: Generation, step: u64) {
        let shared = self.shared();
        let Some(crew) = self.hosts[host].crews.last() else { return };
        let (first, workers) = (crew.slot.first_rank.0, crew.workers);
        let world_size = self.oracle.worlds.get(&generation).map_or(0, |w| w.size);
        for local in 0..workers {
            let rank = Rank(first + local);
            let holding = Holding { step: Step(step), generation, rank, world_size, shared };
            self.hosts[host].seal(local, holding);
            let (step, replicas) = (Step(step), 1);
            self.agent(host, AgentEvent::Sealed { generation, local_rank: local, step, replicas, shared });
        }
    }

    /// The agent sends the first step from `from` on that all its workers have sealed. It takes a while.
    pub(crate) fn replicate(&mut self, host: usize, generation: Generation, from: Step, keepers: Vec<Keeper>) {
        let h = &mut self.hosts[host];
        let workers = h.crews.last().map_or(0, |c| c.workers);
        let steps = |local| {
            let of = h.memory.get(&local).into_iter().flatten();
            of.filter(|m| m.of.generation == generation && m.of.step >= from).map(|m| m.of.step).collect()
        };
        let common = (0..workers).map(steps).reduce(|a: BTreeSet<Step>, b| &a & &b).unwrap_or_default();
        let step = common.first().copied();
        for held in h.memory.values_mut().flatten().filter(|m| m.of.generation == generation && Some(m.of.step) == step)
        {
            held.pinned = true;
        }
        let (life, slow) = (h.life, if self.now < h.slow_until { 8 } else { 1 });
        let delay = self.rng.range(5, if keepers.is_empty() { 20 } else { 900 }) * slow;
        self.at(delay, Happening::Sent { host, life, generation, step, keepers });
    }

    /// Copies have arrived, or not.
    pub(crate) fn sent(
        &mut self,
        host: usize,
        life: u64,
        generation: Generation,
        step: Option<Step>,
        keepers: &[Keeper],
    ) {
        let h = &mut self.hosts[host];
        if h.life != life || !h.up || h.frozen {
            return;
        }
        let whole = !std::mem::take(&mut h.cut_next);
        let of = |m: &&Held| m.of.generation == generation && Some(m.of.step) == step;
        let mut shards: Vec<Held> = h.memory.values().flatten().filter(of).cloned().collect();
        let mut arrived = step.is_some() && !shards.is_empty() && whole;
        if !whole {
            // Only some of the ranks' shards are complete at the other end.
            shards.truncate(1);
        }
        for keeper in keepers {
            let to = self
                .hosts
                .iter_mut()
                .find(|k| k.node == keeper.node && k.up && !k.frozen && k.agent.is_some() && k.floor <= generation);
            match to {
                Some(to) => shards.iter().for_each(|s| to.keep(s.of)),
                None => arrived = false,
            }
        }
        let step = step.filter(|_| arrived);
        // All ranks hold the same at one step of one history.
        let digest = |s: &Held| (s.of.rank.0, generation.0 << 32 | s.of.step.0);
        let first = shards.iter().map(|s| s.of.rank.0).min().unwrap_or(0);
        let digests = shards.iter().map(digest).map(|(rank, digest)| (rank - first, digest)).collect();
        self.agent(host, AgentEvent::Replicated { generation, step, digests });
    }

    /// All nodes hold a step: what is older may go.
    pub(crate) fn committed(&mut self, host: usize, generation: Generation, step: Step, keeps: &[Rank]) {
        let world_size = self.oracle.worlds.get(&generation).map_or(0, |w| w.size);
        let h = &mut self.hosts[host];
        for held in h.memory.values_mut().flatten() {
            held.pinned &= (held.of.generation, held.of.step) >= (generation, step);
        }
        h.replicas.retain(|r| r.of.world_size == world_size && keeps.contains(&r.of.rank));
        let newer = self.oracle.committed.is_none_or(|c| (c.generation, c.step) < (generation, step));
        if newer {
            self.oracle.committed = Some(Committed { generation, step, world_size });
        }
    }

    /// One rank reads what it was told to. False when that cannot be done.
    pub(crate) fn read(&mut self, host: usize, local: u32, step: Step, source: &Source) -> bool {
        let good_copy = |world: &World, copies: &Copies| {
            copies.holders.iter().any(|address| {
                let holder = world.hosts.iter().enumerate().find(|(i, _)| *address == format!("host{i}:{}", 1000 + i));
                holder.is_some_and(|(_, h)| {
                    let serves = h.up && !h.frozen && h.agent.is_some();
                    serves && h.all().any(|m| m.of == copies.of && !m.rotten)
                })
            })
        };
        let copy = source.copies.as_ref().filter(|c| good_copy(self, c)).map(|c| c.of);
        match (source.tier, copy) {
            (Tier::Peer, Some(of)) => {
                self.hosts[host].seal(local, of);
                true
            }
            (Tier::Peer, None) => false,
            (Tier::Memory, copy) => {
                let mut own = self.hosts[host].memory.get_mut(&local).into_iter().flatten();
                let Some(held) = own.find(|m| m.of.step == step) else { return false };
                // What has rotted is healed from a copy of the same.
                held.rotten &= copy.is_none_or(|of| of != held.of);
                !held.rotten
            }
            (Tier::Durable, _) => self.durable.is_some_and(|d| d >= step.0),
        }
    }

    /// INV-11: a world that restores less than what was held by all has lost every copy of some rank's shard.
    pub(crate) fn check_committed(&mut self, index: usize, restored: Step) {
        let Some(c) = self.oracle.committed.filter(|c| restored < c.step) else { return };
        self.oracle.committed = None;
        let Some(job) = self.processes[index].core.jobs().get(&self.spec.job) else { return };
        let world = &job.record.world;
        let shared = self.shared();
        let members: Vec<_> = self
            .hosts
            .iter()
            .filter(|h| h.agent.is_some() && h.session.is_some() && !h.frozen && world.slot(&h.node).is_some())
            .collect();
        let held = |rank: u32| {
            let is = |of: &Holding| (of.generation, of.step) == (c.generation, c.step) && (shared || of.rank.0 == rank);
            members.iter().any(|h| h.all().any(|m| is(&m.of) && !m.rotten))
        };
        let same = shared || world.size() == c.world_size;
        if same && !self.oracle.unreadable.contains(&c.step) && (0..world.size()).all(held) {
            let what = format!("restored {restored}, but all ranks' shards of {} are there", c.step);
            let violation = crate::oracle::Violation { invariant: InvariantId::CommittedIsKept, at: self.now, what };
            self.oracle.violations.push(violation);
        }
    }
}
