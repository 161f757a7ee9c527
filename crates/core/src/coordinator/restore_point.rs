//! Chooses the step that all ranks restore, with a source for each rank. Also decides when a
//! durable checkpoint is complete.

use super::command::Fact;
use super::job::{Decision, Job, Phase};
use super::output::Output;
use crate::id::{NodeId, Rank, Session, Step};
use crate::message::{
    Copies, CrewOrder, Holding, Holdings, Order, RankOffers, Restore, ShardWritten, Source, Tier, Unreadable,
};
use crate::time::Time;
use std::collections::BTreeMap;

/// What a rank can restore: for each step, its source.
pub type Sources = BTreeMap<Step, Source>;

/// Returns the newest step that every rank of a world can restore, with the source for each rank.
///
/// Ranks may use different tiers for the same step. Returns `None` if there is no common step or no
/// rank.
#[must_use]
pub fn commit_point(ranks: &[Sources]) -> Option<(Step, Vec<Source>)> {
    ranks.first()?.keys().rev().find_map(|step| {
        let sources: Option<Vec<Source>> = ranks.iter().map(|r| r.get(step).cloned()).collect();
        sources.map(|s| (*step, s))
    })
}

/// Adds the durable steps among `all` to a rank's own sources.
fn with_durable(mut own: Sources, all: &Sources) -> Sources {
    for (step, source) in all.iter().filter(|(_, source)| source.tier == Tier::Durable) {
        own.entry(*step).or_insert_with(|| source.clone());
    }
    own
}

impl Job {
    /// Records what a node has in memory.
    pub(super) fn holds(&mut self, now: Time, node: &NodeId, holdings: Holdings, out: &mut Output) {
        // A node that comes back when its job is over is in no world: there is nothing to decide.
        if self.record.world.slot(node).is_some() {
            self.shards.set_held(node, holdings);
            // A decision of an earlier life of the coordinator is not changed.
            if self.record.restored_by(self.record.generation).is_none() {
                self.decide(now, out);
            }
        }
    }

    /// Records what a rank can restore. Decides once all ranks have made their offers; a rank that
    /// asks again is answered again.
    pub(super) fn offers(&mut self, now: Time, node: &NodeId, offers: RankOffers, out: &mut Output) {
        let RankOffers { rank, offers } = offers;
        if rank.0 >= self.record.world.size() {
            return;
        }
        self.has_checkpoints();
        if self.shards.decision().is_some() {
            // Once a decision that is still to be written is written, all nodes receive it.
            if let Some(after) = self.write.awaited_write() {
                for (_, session, order) in self.restore_orders().into_iter().filter(|(id, ..)| id == node) {
                    out.send_after(after, session, order);
                }
            }
            return;
        }
        self.shards.add_offer(rank, offers);
        match self.record.restored_by(self.record.generation) {
            Some(step) => self.decided_before(now, node, step, out),
            None => self.decide(now, out),
        }
    }

    /// Records that the script uses everstep's checkpoints, so that the job can be restored.
    pub(super) fn has_checkpoints(&mut self) {
        if !self.record.checkpointed {
            self.record.checkpointed = true;
            self.changed(false);
        }
    }

    /// Answers a node that asks what to restore after an earlier life of the coordinator has
    /// decided it, and has perhaps informed other nodes. The step stays the same; only the sources
    /// of this node's ranks are determined again.
    fn decided_before(&mut self, now: Time, node: &NodeId, step: Step, out: &mut Output) {
        let Some((session, slot)) = self.nodes.get(node).and_then(|n| n.session).zip(self.record.world.slot(node))
        else {
            return;
        };
        let ranks = slot.ranks();
        if !ranks.clone().all(|r| self.shards.offers(Rank(r)).is_some()) {
            return;
        }
        // Zero stands for a fresh start: no snapshot is taken of it.
        let wanted = (step.0 > 0).then_some(step);
        let mut sources = Vec::new();
        for rank in ranks.filter(|_| wanted.is_some()).map(Rank) {
            match self.sources(rank).remove(&step) {
                Some(source) => sources.push(source),
                // The node that has it may not be back, or does not report again what it reported
                // to the earlier life.
                None => return self.restore_again(now, rank, Unreadable { step, tier: Tier::Peer }, out),
            }
        }
        let persist = self.in_memory_only(wanted);
        let best = self.recovery.high_water();
        // A generation that was refused a fresh start is not in the record.
        let restore = Restore { step: wanted, sources, persist, best, found: false };
        out.send(session, self.crew_order(CrewOrder::Restore(restore)));
    }

    fn decide(&mut self, now: Time, out: &mut Output) {
        let size = self.record.world.size();
        if self.shards.decision().is_some() || !self.shards.all_have_told(&self.record.world) {
            return;
        }
        let generation = self.record.generation;
        let ranks: Vec<Sources> = (0..size).map(|r| self.sources(Rank(r))).collect();
        let (step, sources) = self.commit_point(&ranks).map_or((None, Vec::new()), |(s, t)| (Some(s), t));
        if step.is_none()
            && let Some(nodes) = self.nodes_without_state(&ranks)
        {
            return self.leave_out(now, nodes, out);
        }
        let tiers = sources.iter().map(|s| s.tier).collect();
        self.shards.decide(Decision { step, sources });
        if step.is_none() && self.shards.any_found() {
            // Starting fresh would ignore checkpoints that exist. The ranks fail with an error that
            // names the directory, and the next generation may find more of them readable.
            return self.changed(true);
        }
        self.record.add_restore(generation, step.unwrap_or(Step(0)));
        self.record.durable = self.durable_up_to(step);
        // The nodes are informed once the decision is written: a coordinator that restarts in
        // between must not decide differently.
        self.changed(true);
        let nodes = u32::try_from(self.record.world.slots.len()).unwrap_or(u32::MAX);
        let lost = self.recovery.high_water().map_or(0, |high| high.0.saturating_sub(step.map_or(0, |s| s.0)));
        out.record(Fact::Restored { generation, step, tiers, steps_lost: lost, nodes });
    }

    /// Returns the newest step that all ranks can restore. If all ranks hold the same state,
    /// returns the newest step that each rank captured itself, as long as none of these captures is
    /// lost.
    ///
    /// If all ranks hold the same state, a rank that died before it sealed the newest step can
    /// continue from another rank's capture. But that capture lacks what differs between ranks: the
    /// rank's random state and the batches that it had already fetched. Recomputing steps gives the
    /// same results as a run without a failure; continuing from another rank's capture does not.
    /// The number of steps to recompute depends on how often the ranks capture, and on captures
    /// that were skipped because no slot was free: rank 0 may have sealed step 152 while its
    /// capture before that is of step 148.
    fn commit_point(&self, ranks: &[Sources]) -> Option<(Step, Vec<Source>)> {
        let (step, sources) = commit_point(ranks)?;
        let stands_in = (0..).zip(&sources).any(|(r, s)| !self.is_own(Rank(r), step, s) && s.tier != Tier::Durable);
        if !stands_in {
            return Some((step, sources));
        }
        let own: Vec<Sources> = (0..).zip(ranks).map(|(r, s)| self.own_sources(Rank(r), s)).collect();
        if !self.shards.stayed() {
            // A capture was lost with its node, or the ranks have changed: going back further than
            // one step is not worth it.
            return match commit_point(&own) {
                Some((exact, sources)) if exact.0 + 1 >= step.0 && self.record.durable.is_none_or(|d| exact >= d) => {
                    Some((exact, sources))
                }
                _ => Some((step, sources)),
            };
        }
        if commit_point(&own).is_some() {
            // All ranks captured the durable steps, and these may be newer than those in memory.
            let exact: Vec<Sources> = own.into_iter().zip(ranks).map(|(own, all)| with_durable(own, all)).collect();
            return commit_point(&exact);
        }
        if self.is_first_capture(&own) { None } else { Some((step, sources)) }
    }

    /// Returns whether some ranks had sealed their first capture and others had not: only a start
    /// from the beginning repeats the run exactly.
    fn is_first_capture(&self, own: &[Sources]) -> bool {
        let before = self.record.restored.last();
        let from_scratch = before.is_some_and(|(g, step)| g.next() == self.record.generation && step.0 == 0);
        from_scratch && self.record.durable.is_none() && !self.shards.any_found() && own.iter().all(|of| of.len() <= 1)
    }

    /// Returns whether what this rank would read from `source` is its own capture.
    fn is_own(&self, rank: Rank, step: Step, source: &Source) -> bool {
        let size = self.record.world.size();
        let is = |h: &Holding| h.rank == rank && h.world_size == size && h.step == step;
        let slot = self.record.world.slot_of(rank);
        let here = slot.map_or(&[][..], |s| self.shards.held_by(&s.node));
        match source.tier {
            Tier::Memory => here.iter().any(is),
            Tier::Peer => source.copies.as_ref().is_some_and(|c| is(&c.of)),
            Tier::Parity => true,
            Tier::Durable => false,
        }
    }

    /// Returns those of a rank's sources that it captured itself and that are in memory.
    fn own_sources(&self, rank: Rank, sources: &Sources) -> Sources {
        let own = sources.iter().filter(|(step, source)| self.is_own(rank, **step, source));
        own.map(|(step, source)| (*step, source.clone())).collect()
    }

    /// Returns everything that `rank` can restore, each step from the nearest tier: local memory,
    /// peer memory, durable storage.
    fn sources(&self, rank: Rank) -> Sources {
        let Some(offers) = self.shards.offers(rank) else { return Sources::new() };
        let mut found = Sources::new();
        let readable = |step: Step, tier: Tier| self.shards.is_readable(rank, step, tier);
        for rebuild in self.rebuilds(rank).into_iter().filter(|r| readable(r.of.step, Tier::Parity)) {
            let step = rebuild.of.step;
            found.insert(step, Source { rebuild: Some(rebuild), ..Source::of(Tier::Parity) });
        }
        for (holding, copies) in self.copies(rank, offers.shared) {
            if readable(holding.step, Tier::Peer) {
                let rebuild = found.remove(&holding.step).and_then(|s| s.rebuild).filter(|r| r.of == copies.of);
                found.insert(holding.step, Source { tier: Tier::Peer, copies: Some(copies), rebuild });
            }
        }
        for offer in offers.held.iter().filter(|o| readable(o.step, o.tier)) {
            let valid = offer.tier == Tier::Durable || self.record.is_of_this_past(offer.generation, offer.step);
            let nearest = found.get(&offer.step).map(|s| s.tier);
            if valid && nearest.is_none_or(|t| offer.tier < t) {
                // Copies of this rank's own capture can repair damaged chunks here, and so can its
                // stripes.
                let (copies, rebuild) = found.remove(&offer.step).map_or((None, None), |s| (s.copies, s.rebuild));
                let copies = copies.filter(|c| c.of.generation == offer.generation);
                let rebuild = rebuild.filter(|r| r.of.generation == offer.generation);
                found.insert(offer.step, Source { tier: offer.tier, copies, rebuild });
            }
        }
        if let Some(wanted) = offers.wanted {
            // Copies in memory are not offers of the script. Without this filter it could continue
            // from a step that it did not ask for.
            found.retain(|step, _| *step == wanted);
        }
        found
    }

    /// Returns the shards in any node's memory that `rank` can restore: its own, or any if all
    /// ranks hold the same state.
    fn copies(&self, rank: Rank, shared: bool) -> Vec<(Holding, Copies)> {
        let size = self.record.world.size();
        let mut by_holding: BTreeMap<Holding, Vec<String>> = BTreeMap::new();
        for (node, held) in self.shards.held() {
            let Some(address) = self.replica_address(node) else { continue };
            for h in held.iter().filter(|h| self.record.is_of_this_past(h.generation, h.step)) {
                let own = h.rank == rank && h.world_size == size;
                if own || (shared && h.shared) {
                    by_holding.entry(*h).or_default().push(address.clone());
                }
            }
        }
        let own = |h: &Holding| h.rank == rank && h.world_size == size;
        let mut best: BTreeMap<Step, (Holding, Copies)> = BTreeMap::new();
        for (of, holders) in by_holding {
            let worth = |of: &Holding, holders: &Vec<String>| (own(of), holders.len());
            let better = best.get(&of.step).is_none_or(|(h, c)| worth(&of, &holders) > worth(h, &c.holders));
            if better {
                best.insert(of.step, (of, Copies { of, holders }));
            }
        }
        best.into_values().collect()
    }

    /// Returns the newest durable step on the branch that continues from `step`. Later checkpoints
    /// belong to another branch, and would count as newer than those of this one until training has
    /// passed them again.
    fn durable_up_to(&self, step: Option<Step>) -> Option<Step> {
        let (step, durable) = (step?, self.record.durable?);
        if durable <= step {
            return Some(durable);
        }
        let ranks: Vec<Sources> = (0..self.record.world.size()).map(|r| self.durable_offers(Rank(r), step)).collect();
        commit_point(&ranks).map(|(step, _)| step)
    }

    /// Returns what a rank has found on durable storage, up to a step.
    fn durable_offers(&self, rank: Rank, step: Step) -> Sources {
        let held = self.shards.offers(rank).map_or(&[][..], |offers| &offers.held);
        let older = held.iter().filter(|o| o.tier == Tier::Durable && o.step <= step);
        let readable = older.filter(|o| self.shards.is_readable(rank, o.step, o.tier));
        readable.map(|o| (o.step, Source::of(Tier::Durable))).collect()
    }

    /// Returns whether the step is in memory only. Such a step is written to durable storage,
    /// because the next failure may destroy more of it.
    fn in_memory_only(&self, step: Option<Step>) -> bool {
        step.is_some_and(|s| self.record.durable.is_none_or(|d| s > d))
    }

    /// Returns the address at which other nodes fetch this node's replicas.
    pub(super) fn replica_address(&self, node: &NodeId) -> Option<String> {
        let hello = &self.nodes.get(node).filter(|n| n.session.is_some())?.hello;
        (hello.replica_port != 0).then(|| format!("{}:{}", hello.host, hello.replica_port))
    }

    /// Returns the orders that name to each node what its ranks restore, once that is decided.
    pub(super) fn restore_orders(&self) -> Vec<(NodeId, Session, Order)> {
        let Some(Decision { step, sources }) = self.shards.decision() else { return Vec::new() };
        let order = |(id, session): (&NodeId, Session)| {
            let slot = self.record.world.slot(id)?;
            let first = slot.first_rank.0 as usize;
            let own = sources.get(first..first + slot.workers as usize).unwrap_or_default().to_vec();
            let persist = self.in_memory_only(*step);
            let restore = Restore {
                step: *step,
                sources: own,
                persist,
                best: self.recovery.high_water(),
                found: self.shards.any_found(),
            };
            Some((id.clone(), session, self.crew_order(CrewOrder::Restore(restore))))
        };
        self.nodes.sessions().filter_map(order).collect()
    }

    /// Returns the nodes without any rank that can restore something, if the others can continue
    /// without them.
    fn nodes_without_state(&self, ranks: &[Sources]) -> Option<Vec<NodeId>> {
        let (mut without, mut others) = (Vec::new(), Vec::new());
        for slot in &self.record.world.slots {
            let first = slot.first_rank.0 as usize;
            let own = ranks.get(first..first + slot.workers as usize).unwrap_or_default();
            if own.iter().all(BTreeMap::is_empty) {
                without.push(slot.node.clone());
            }
            others.extend(own.iter().filter(|s| !s.is_empty()).cloned());
        }
        let spec = &self.record.spec;
        let left =
            u32::try_from(self.record.world.slots.len() - without.len()).unwrap_or(0) / spec.node_unit * spec.node_unit;
        let go_on = !without.is_empty() && left >= spec.nodes_min && left > 0 && commit_point(&others).is_some();
        go_on.then_some(without)
    }

    /// Handles a rank that could not read the shard that it was ordered to restore: the world forms
    /// again and restores another one. Unreadable sources are not offered again, so this ends; it
    /// does not use up the restart budget.
    pub(super) fn restore_failed(&mut self, now: Time, rank: Rank, unreadable: Unreadable, out: &mut Output) {
        if self.phase.is_training() && self.shards.mark_unreadable(rank, unreadable) {
            self.restore_again(now, rank, unreadable, out);
        }
    }

    /// Handles a rank that could not fetch the shard that it was ordered to restore. The world
    /// forms again, and the nodes report again what they have. A source that fails repeatedly
    /// counts as unreadable.
    pub(super) fn fetch_failed(&mut self, now: Time, rank: Rank, missing: Unreadable, out: &mut Output) {
        if self.phase.is_training() {
            self.shards.note_failed_fetch(rank, missing);
            self.restore_again(now, rank, missing, out);
        }
    }

    fn restore_again(&mut self, now: Time, rank: Rank, missing: Unreadable, out: &mut Output) {
        let Unreadable { step, tier } = missing;
        let fact = Fact::RestoreFailed { generation: self.record.generation, rank, step, tier };
        out.record(fact);
        self.fence(now, out);
        self.phase = Phase::forming(now);
    }

    /// Records that a shard is on durable storage. When the shards of all ranks are, the leader
    /// publishes the step.
    pub(super) fn shard_written(&mut self, written: ShardWritten, out: &mut Output) {
        let size = self.record.world.size() as usize;
        if let Some(publish) = self.shards.add_written(written, size)
            && let Some(session) = self.leader()
        {
            out.send(session, self.crew_order(CrewOrder::Publish(publish)));
        }
    }

    /// Records that the leader has published a checkpoint: its slots may be reused. Returns whether
    /// the record changed.
    pub(super) fn published(&mut self, step: Step, out: &mut Output) -> bool {
        self.shards.published(step);
        self.growth.forget_too_early();
        self.order_crew(CrewOrder::Durable(step), out);
        let newer = self.record.durable.is_none_or(|d| d < step);
        if newer {
            self.record.durable = Some(step);
            out.record(Fact::Published { step });
        }
        newer
    }

    /// Returns the connection of the node that publishes checkpoints.
    pub(super) fn leader(&self) -> Option<Session> {
        self.nodes.session(&self.record.world.slots.first()?.node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn source(tier: Tier) -> Source {
        Source::of(tier)
    }

    #[test]
    fn tiers_are_mixed_per_rank() {
        let ranks = [
            BTreeMap::from([(Step(9), source(Tier::Memory)), (Step(8), source(Tier::Memory))]),
            BTreeMap::from([(Step(8), source(Tier::Peer))]),
        ];
        assert_eq!(commit_point(&ranks), Some((Step(8), vec![source(Tier::Memory), source(Tier::Peer)])));
    }

    #[test]
    fn one_rank_with_nothing_means_a_fresh_start_for_all() {
        assert_eq!(commit_point(&[BTreeMap::from([(Step(9), source(Tier::Memory))]), BTreeMap::new()]), None);
        assert_eq!(commit_point(&[]), None);
    }

    proptest! {
        #[test]
        fn the_commit_point_is_the_newest_common_step(sets in prop::collection::vec(prop::collection::btree_set(0u64..12, 0..6), 1..5)) {
            let ranks: Vec<Sources> =
                sets.iter().map(|s| s.iter().map(|x| (Step(*x), source(Tier::Memory))).collect()).collect();
            let common = (0..12u64).rev().find(|x| sets.iter().all(|s| s.contains(x)));
            prop_assert_eq!(commit_point(&ranks).map(|(s, _)| s.0), common);
        }
    }
}
