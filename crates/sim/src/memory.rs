//! The machines' memory: their own steps, copies of others', and how copies get there and back.

use crate::host::Held;
use crate::oracle::{Committed, Kept};
use crate::world::{Happening, Sending, World};
use everstep_core::agent::event::CrewEvent;
use everstep_core::id::{Generation, Rank, Step};
use everstep_core::invariant::InvariantId;
use everstep_core::message::{Copies, Holding, Parity, Rebuild, Redundancy, Source, Stripe, Tier};
use everstep_core::pacing::Known;
use std::collections::BTreeSet;

/// The result of computing a stripe.
enum Computed {
    Done,
    /// A member has not begun the round.
    NotYet,
    Failed,
}

/// Copies of a step are this number of bytes, times a random size.
const COPIED: u64 = 20_000;

impl World {
    /// Whether all ranks hold the same state (even seeds) or each its own shard (odd seeds).
    pub(crate) fn shared(&self) -> bool {
        self.options.seed.is_multiple_of(2)
    }

    /// The redundancy that the workers ask for: full copies or an erasure code, depending on the
    /// seed.
    fn wish(&self) -> Redundancy {
        let (replicas, data) = match self.options.seed % 8 {
            1 | 5 => (1, 2),
            3 => (2, 4),
            _ => (1, 0),
        };
        Redundancy { replicas, data, shared: self.shared() }
    }

    /// Kills one of a host's two workers when only one of them has sealed a step. The previous
    /// capture may be many steps older: not every step is captured, and a capture is skipped when
    /// no slot is free.
    pub(crate) fn dies_between_seals(&mut self) {
        let shared = self.shared();
        let trains = |h: &crate::host::Host| {
            h.up && !h.frozen && h.crews.last().is_some_and(|c| c.training && c.able_to_train() && c.workers > 1)
        };
        let all: Vec<usize> = (0..self.hosts.len()).filter(|i| trains(&self.hosts[*i])).collect();
        let Some(host) = self.rng.pick(&all).copied() else { return };
        let first = u32::from(self.rng.percent(50));
        let dies = u32::from(self.rng.percent(50));
        let Some(crew) = self.hosts[host].crews.last_mut() else { return };
        crew.step += 1;
        let (generation, step, rank) = (crew.generation, crew.step, Rank(crew.slot.first_rank.0 + first));
        let world_size = self.oracle.worlds.get(&generation).map_or(0, |w| w.size);
        self.hosts[host].seal(first, Holding { step: Step(step), generation, rank, world_size, shared });
        self.worker_dies(host, dies);
    }

    /// Checks INV-15 when a rank restores another's capture: it is violated if no node was
    /// exchanged and all ranks have their own capture of a common step.
    pub(crate) fn check_own(&mut self, generation: Generation, step: Step) {
        let Some(seen) = self.oracle.worlds.get(&generation) else { return };
        let size = seen.size;
        // If a node left or joined, captures are gone or belong to another past; then the newest
        // step counts.
        let stayed = self.processes.iter().filter_map(|p| p.core.jobs().get(&self.spec.job));
        if !stayed.filter(|job| job.record().generation == generation).all(|job| job.shards().stayed()) {
            return;
        }
        let mut common: Option<BTreeSet<Step>> = None;
        for host in self.hosts.iter().filter(|h| h.up && h.agent.is_some()) {
            let Some(crew) = host.crews.last().filter(|c| c.generation == generation) else { continue };
            for local in 0..crew.workers {
                let rank = Rank(crew.slot.first_rank.0 + local);
                let own = host.memory.get(&local).into_iter().flatten().filter(|m| {
                    let good = !m.rotten && !self.oracle.unreadable.contains(&m.of.step);
                    let past = self.oracle.is_of_this_past(m.of.generation, m.of.step, generation);
                    good && past && m.of.rank == rank && m.of.world_size == size && m.of.step <= step
                });
                let own: BTreeSet<Step> = own.map(|m| m.of.step).collect();
                common = Some(common.map_or_else(|| own.clone(), |c| &c & &own));
            }
        }
        let present: u32 = self
            .hosts
            .iter()
            .filter_map(|h| h.crews.last())
            .filter(|c| c.generation == generation)
            .map(|c| c.workers)
            .sum();
        if let Some(own) = common.and_then(|c| c.last().copied()).filter(|_| present == size) {
            let what = format!(
                "generation {generation} restores step {step} with stand-ins, and all ranks have their own capture of step {own}"
            );
            self.oracle.violations.push(crate::oracle::Violation {
                invariant: InvariantId::OwnStateFirst,
                at: self.now,
                what,
            });
        }
    }

    /// The workers of a host have sealed a step.
    pub(crate) fn seal(&mut self, host: usize, generation: Generation, step: u64) {
        let (shared, wish) = (self.shared(), self.wish());
        let Some(crew) = self.hosts[host].crews.last() else { return };
        let (first, workers) = (crew.slot.first_rank.0, crew.workers);
        let world_size = self.oracle.worlds.get(&generation).map_or(0, |w| w.size);
        for local in 0..workers {
            let rank = Rank(first + local);
            let holding = Holding { step: Step(step), generation, rank, world_size, shared };
            self.hosts[host].seal(local, holding);
            self.crew_event(host, generation, CrewEvent::Sealed { local_rank: local, step: Step(step), wish });
        }
    }

    /// Sends the first step from `from` on that all workers of the host have sealed, or computes
    /// parity from it. Either takes a while.
    pub(crate) fn replicate(&mut self, host: usize, generation: Generation, from: Step, sending: Sending) {
        let h = &mut self.hosts[host];
        let workers = h.crews.last().map_or(0, |c| c.workers);
        let steps = |local| {
            let of = h.memory.get(&local).into_iter().flatten();
            of.filter(|m| m.of.generation == generation && m.of.step >= from).map(|m| m.of.step).collect()
        };
        let common = (0..workers).map(steps).reduce(|a: BTreeSet<Step>, b| &a & &b).unwrap_or_default();
        let step = common.first().copied();
        h.copies.taken = (generation, sending.round, step);
        for held in h.memory.values_mut().flatten().filter(|m| m.of.generation == generation) {
            // Pins of earlier rounds are released, except for the base step.
            held.pinned = Some(held.of.step) == step || (held.pinned && Some(held.of.step) == sending.base);
        }
        let (life, slow) = (h.life, if self.now < h.faults.slow_until { 8 } else { 1 });
        let alone = sending.plan.keepers.is_empty() && sending.plan.stripes.is_empty();
        let size = self.rng.range(5, if alone { 20 } else { 900 });
        let delay = if alone {
            size * slow
        } else {
            // What the workers know about their collectives differs from host to host, and changes.
            let known = [Known::Unseen, Known::Learning, Known::Spans, Known::Open];
            let known = known[(generation.0 as usize + host) % known.len()];
            crate::copying::copying_ms(self.now, size * COPIED, known) * slow
        };
        self.at(delay, Happening::Sent { host, life, generation, step, sending });
    }

    /// The copies of one round have arrived, or failed to.
    pub(crate) fn sent(
        &mut self,
        host: usize,
        life: u64,
        generation: Generation,
        step: Option<Step>,
        mut sending: Sending,
    ) {
        const LOOK: u64 = 50;
        let h = &mut self.hosts[host];
        if h.life != life || !h.up || h.frozen {
            return;
        }
        let of = |m: &&Held| m.of.generation == generation && Some(m.of.step) == step;
        let shards: Vec<Held> = h.memory.values().flatten().filter(of).cloned().collect();
        let mut arrived = step.is_some() && !shards.is_empty();
        for stripe in sending.plan.stripes.iter().filter(|_| arrived) {
            match step.map_or(Computed::Failed, |step| self.compute(host, (generation, step), stripe, &sending)) {
                Computed::Done => {}
                Computed::NotYet if sending.patience >= LOOK => {
                    sending.patience -= LOOK;
                    return self.at(LOOK, Happening::Sent { host, life, generation, step, sending });
                }
                Computed::NotYet | Computed::Failed => {
                    arrived = false;
                    break;
                }
            }
        }
        // Only some of the ranks' shards are complete at the other end.
        let whole = sending.plan.keepers.is_empty() || !self.hosts[host].cuts();
        arrived &= whole;
        for keeper in &sending.plan.keepers {
            let to = self.hosts.iter_mut().find(|k| {
                k.node == keeper.node && k.up && !k.frozen && k.agent.is_some() && k.copies.floor <= generation
            });
            let some = if whole { shards.len() } else { 1 };
            match to {
                Some(to) => shards.iter().take(some).for_each(|s| to.keep(s.of, sending.base)),
                None => arrived = false,
            }
        }
        let step = step.filter(|_| arrived);
        // All ranks hold the same state at one step of one history.
        let digest = |s: &Held| (s.of.rank.0, generation.0 << 32 | s.of.step.0);
        let first = shards.iter().map(|s| s.of.rank.0).min().unwrap_or(0);
        let digests = shards.iter().map(digest).map(|(rank, digest)| (rank - first, digest)).collect();
        self.crew_event(host, generation, CrewEvent::Replicated { step, digests, round: sending.round });
        if self.hosts[host].faults.doomed && self.hosts[host].faults.cut_next == 0 {
            self.hosts[host].faults.doomed = false;
            self.lose_node(host);
        }
    }

    /// Returns the running machine that serves this address.
    fn serves(&self, address: &str) -> Option<&crate::host::Host> {
        let found = self.hosts.iter().enumerate().find(|(i, _)| address == format!("host{i}:{}", 1000 + i));
        found.map(|(_, h)| h).filter(|h| h.up && !h.frozen && h.agent.is_some())
    }

    /// Reads every member's shard, as that member took it for this round, and gives each keeper its
    /// parity.
    fn compute(&mut self, host: usize, at: (Generation, Step), stripe: &Stripe, sending: &Sending) -> Computed {
        let (generation, step) = at;
        let world_size = self.oracle.worlds.get(&generation).map_or(0, |w| w.size);
        for member in &stripe.members {
            let (Some(rank), Some(h)) = (member.rank, self.serves(&member.address)) else {
                if member.rank.is_none() {
                    continue;
                }
                return Computed::Failed;
            };
            if (h.copies.taken.0, h.copies.taken.1) < (generation, sending.round) {
                return Computed::NotYet;
            }
            let is = |m: &Held| (m.of.rank, m.of.generation, m.of.step) == (rank, generation, step);
            let there = h.copies.taken == (generation, sending.round, Some(step));
            if !there || !h.memory.values().flatten().any(|m| is(m) && m.pinned && !m.rotten) {
                return Computed::Failed;
            }
        }
        let members: Vec<Option<Rank>> = stripe.members.iter().map(|m| m.rank).collect();
        let of = u32::try_from(stripe.keepers.len()).unwrap_or(0) + 1;
        let parity = |number| Parity {
            step,
            generation,
            world_size,
            stripe: stripe.number,
            of,
            number,
            members: members.clone(),
        };
        self.hosts[host].keep_parity(parity(0), sending.base);
        if self.hosts[host].cuts() {
            return Computed::Failed;
        }
        for (number, keeper) in (1..).zip(&stripe.keepers) {
            let mut all = self.hosts.iter_mut();
            let to = all.find(|k| {
                k.node == keeper.node && k.up && !k.frozen && k.agent.is_some() && k.copies.floor <= generation
            });
            let Some(to) = to else { return Computed::Failed };
            to.keep_parity(parity(number), sending.base);
        }
        Computed::Done
    }

    /// All nodes hold a step, so older ones may be released.
    pub(crate) fn committed(
        &mut self,
        host: usize,
        generation: Generation,
        step: Step,
        keeps: &[Rank],
        keeps_parity: &[u32],
    ) {
        let world_size = self.oracle.worlds.get(&generation).map_or(0, |w| w.size);
        let h = &mut self.hosts[host];
        for held in h.memory.values_mut().flatten() {
            held.pinned &= (held.of.generation, held.of.step) >= (generation, step);
        }
        h.copies.replicas.retain(|r| r.of.world_size == world_size && keeps.contains(&r.of.rank));
        h.copies.parity.retain(|p| p.of.world_size == world_size && keeps_parity.contains(&p.of.stripe));
        let newer = self.oracle.committed.is_none_or(|c| (c.generation, c.step) < (generation, step));
        if newer {
            self.oracle.committed = Some(Committed { generation, step, world_size });
            let now = |of: &Holding| (of.generation, of.step) == (generation, step);
            self.oracle.kept.clear();
            for (host, h) in self.hosts.iter().enumerate() {
                let own = h.memory.values().flatten().filter(|m| now(&m.of) && !m.rotten).map(|m| Kept::Own(m.of));
                let copies = h.copies.replicas.iter().filter(|m| now(&m.of) && !m.rotten).map(|m| Kept::Copy(m.of));
                let parity =
                    h.copies.parity.iter().filter(|p| (p.of.generation, p.of.step) == (generation, step) && !p.rotten);
                let all = own.chain(copies).chain(parity.map(|p| Kept::Parity(p.of.clone())));
                self.oracle.kept.extend(all.map(|kept| (host, kept)));
            }
        }
    }

    /// Returns true if enough of each stripe is left to compute a shard.
    fn computable(&self, rebuild: &Rebuild) -> bool {
        let at = (rebuild.of.generation, rebuild.of.step);
        rebuild.stripes.iter().all(|stripe| {
            let of_member = |(rank, address): (&Option<Rank>, &Option<String>)| match (rank, address) {
                (None, _) => true,
                (Some(rank), Some(address)) => self.serves(address).is_some_and(|h| {
                    h.all().any(|m| (m.of.rank, (m.of.generation, m.of.step)) == (*rank, at) && !m.rotten)
                }),
                (Some(_), None) => false,
            };
            let of_parity = |(number, address): (u32, &Option<String>)| {
                let is = |p: &Parity| (p.stripe, p.number, (p.generation, p.step)) == (stripe.number, number, at);
                let holder = address.as_ref().and_then(|a| self.serves(a));
                holder.is_some_and(|h| {
                    h.copies.parity.iter().any(|p| is(&p.of) && p.of.members == stripe.members && !p.rotten)
                })
            };
            let data = stripe.members.iter().zip(&stripe.data).filter(|m| of_member(*m)).count();
            let parity = (0..).zip(&stripe.parity).filter(|p| of_parity(*p)).count();
            data + parity >= stripe.members.len()
        })
    }

    /// Reads what one rank was ordered to restore. Returns false if that is impossible.
    pub(crate) fn read(&mut self, host: usize, local: u32, step: Step, source: &Source) -> bool {
        let good_copy = |world: &World, copies: &Copies| {
            copies
                .holders
                .iter()
                .any(|address| world.serves(address).is_some_and(|h| h.all().any(|m| m.of == copies.of && !m.rotten)))
        };
        let copy = source.copies.as_ref().filter(|c| good_copy(self, c)).map(|c| c.of);
        let copy = copy.or_else(|| source.rebuild.as_ref().filter(|r| self.computable(r)).map(|r| r.of));
        match (source.tier, copy) {
            (Tier::Peer | Tier::Parity, Some(of)) => {
                self.hosts[host].fetched(local, of);
                true
            }
            (Tier::Peer | Tier::Parity, None) => false,
            (Tier::Memory, copy) => {
                let mut own = self.hosts[host].memory.get_mut(&local).into_iter().flatten();
                let Some(held) = own.find(|m| m.of.step == step) else { return false };
                // A rotten slot is healed from a copy of the same shard.
                held.rotten &= copy.is_none_or(|of| of != held.of);
                !held.rotten
            }
            (Tier::Durable, _) => self.durable.is_some_and(|d| d >= step.0),
        }
    }

    /// Returns whether a source that cannot be read is damaged, rather than out of reach.
    pub(crate) fn is_damaged(&self, source: &Source) -> bool {
        let rotten = |copies: &Copies| {
            let holders = copies.holders.iter().filter_map(|address| self.serves(address));
            holders.into_iter().any(|h| h.all().any(|m| m.of == copies.of && m.rotten))
        };
        matches!(source.tier, Tier::Memory | Tier::Durable) || source.copies.as_ref().is_some_and(rotten)
    }

    /// Checks INV-11: a world may restore less than the committed step only if every copy of some
    /// rank's shard is lost.
    pub(crate) fn check_committed(&mut self, index: usize, restored: Step) {
        let Some(c) = self.oracle.committed.filter(|c| restored < c.step) else { return };
        self.oracle.committed = None;
        let Some(job) = self.processes[index].core.jobs().get(&self.spec.job) else { return };
        let world = &job.record().world;
        // If all ranks hold the same state, any copy will do. But if no node was exchanged, each
        // rank continues from its own capture (INV-15).
        let shared = self.shared() && !job.shards().stayed();
        let member = |index: usize| {
            let h = &self.hosts[index];
            // A node may have gone to another coordinator: what this one decides is not written
            // then.
            let attached = h.session.is_some() && job.nodes().session(&h.node) == h.session;
            h.agent.is_some() && attached && !h.frozen && world.slot(&h.node).is_some()
        };
        // What existed at the commit on the machines that take part, minus what faults have
        // removed, must still exist.
        let kept: Vec<&Kept> = self.oracle.kept.iter().filter(|(h, _)| member(*h)).map(|(_, kept)| kept).collect();
        let there = |rank: u32| kept.iter().filter_map(|k| k.shard()).any(|of| shared || of.rank.0 == rank);
        let held = |rank: u32| there(rank) || can_be_computed(Rank(rank), &kept, there);
        let same = shared || world.size() == c.world_size;
        if same && !self.oracle.unreadable.contains(&c.step) && (0..world.size()).all(held) {
            let what = format!("restored {restored}, but all ranks' shards of {} are there", c.step);
            let violation = crate::oracle::Violation { invariant: InvariantId::CommittedIsKept, at: self.now, what };
            self.oracle.violations.push(violation);
        }
    }
}

/// Returns true if enough remains of each stripe that contains a part of the rank's shard.
fn can_be_computed(rank: Rank, kept: &[&Kept], there: impl Fn(u32) -> bool) -> bool {
    let of_rank: Vec<&Parity> =
        kept.iter().filter_map(|k| k.parity()).filter(|p| p.members.contains(&Some(rank))).collect();
    let stripes: BTreeSet<u32> = of_rank.iter().map(|p| p.stripe).collect();
    let parts = of_rank.first().map_or(0, |p| p.members.len());
    let enough = |stripe: u32| {
        let parity: BTreeSet<u32> = of_rank.iter().filter(|p| p.stripe == stripe).map(|p| p.number).collect();
        let members = of_rank.iter().find(|p| p.stripe == stripe).map_or(&[][..], |p| &p.members);
        let data = members.iter().filter(|m| **m != Some(rank) && m.is_none_or(|m| there(m.0))).count();
        data + parity.len() >= parts
    };
    parts > 0 && stripes.len() == parts && stripes.into_iter().all(enough)
}
