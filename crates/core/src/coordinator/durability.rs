//! Which step is safe on which tier: the commit point, and when a durable checkpoint is complete.

use super::command::{Command, Fact};
use super::state::{Job, RECENT};
use crate::id::{Generation, NodeId, Rank, Session, Step};
use crate::message::{Offer, Order, ShardFile, Tier};
use crate::time::Time;
use std::collections::BTreeMap;

/// The newest step that every rank of a world can restore, with the nearest tier for each rank.
///
/// Ranks may use different tiers for the same step. `None` when there is no common step (or when
/// `size` is zero): all ranks start fresh together.
#[must_use]
pub fn commit_point(offers: &BTreeMap<Rank, Vec<Offer>>, size: u32) -> Option<(Step, Vec<Tier>)> {
    let newest_first: std::collections::BTreeSet<Step> = offers.get(&Rank(0))?.iter().map(|o| o.step).collect();
    newest_first.into_iter().rev().find_map(|step| {
        let tier = |rank| offers.get(&Rank(rank))?.iter().filter(|o| o.step == step).map(|o| o.tier).min();
        (0..size).map(tier).collect::<Option<Vec<_>>>().map(|tiers| (step, tiers))
    })
}

impl Job {
    /// A rank says what it could restore. Decides when all ranks have spoken; answers again when asked again.
    pub(super) fn offers(
        &mut self,
        now: Time,
        node: &NodeId,
        generation: Generation,
        rank: Rank,
        offers: Vec<Offer>,
        out: &mut Vec<Command>,
    ) {
        if generation != self.record.generation || rank.0 >= self.record.world.size() {
            return;
        }
        if !self.record.checkpointed {
            self.record.checkpointed = true;
            self.changed(false);
        }
        if self.durability.decision.is_some() {
            return self.tell_restore(Some(node), out);
        }
        let offers = offers.into_iter().filter(|o| self.is_of_this_past(o)).collect();
        self.durability.offers.insert(rank, offers);
        let size = self.record.world.size();
        if self.durability.offers.len() < size as usize {
            return;
        }
        let (step, tiers) =
            commit_point(&self.durability.offers, size).map_or((None, Vec::new()), |(s, t)| (Some(s), t));
        if step.is_none()
            && let Some(nodes) = self.nodes_without_state()
        {
            return self.leave_out(now, nodes, out);
        }
        self.durability.decision = Some((step, tiers.clone()));
        self.record.restored.push((generation, step.unwrap_or(Step(0))));
        let surplus = self.record.restored.len().saturating_sub(RECENT);
        self.record.restored.drain(..surplus);
        self.changed(false);
        let lost = self.high_water.map_or(0, |high| high.0.saturating_sub(step.map_or(0, |s| s.0)));
        self.tell_restore(None, out);
        out.push(Command::Record {
            job: self.record.spec.job.clone(),
            fact: Fact::Restored { generation, step, tiers, steps_lost: lost },
        });
    }

    /// Tells `only` that node, or all, what their ranks restore.
    fn tell_restore(&self, only: Option<&NodeId>, out: &mut Vec<Command>) {
        let Some((step, tiers)) = &self.durability.decision else { return };
        for (id, session) in self.sessions().filter(|(id, _)| only.is_none_or(|o| o == *id)) {
            let Some(slot) = self.record.world.slot(id) else { continue };
            let first = slot.first_rank.0 as usize;
            let own = tiers.get(first..first + slot.workers as usize).unwrap_or_default().to_vec();
            let order = Order::Restore { generation: self.record.generation, step: *step, tiers: own };
            out.push(Command::Send { session, order, after: None });
        }
    }

    /// Nodes none of whose ranks can restore anything, if the others can go on without them.
    fn nodes_without_state(&self) -> Option<Vec<NodeId>> {
        let offers = |rank: u32| self.durability.offers.get(&Rank(rank)).filter(|o| !o.is_empty());
        let (mut without, mut ranks) = (Vec::new(), BTreeMap::new());
        for slot in &self.record.world.slots {
            let own: Vec<_> = (slot.first_rank.0..slot.first_rank.0 + slot.workers).filter_map(offers).collect();
            if own.is_empty() {
                without.push(slot.node.clone());
            }
            for offers in own {
                ranks.insert(Rank(u32::try_from(ranks.len()).unwrap_or(u32::MAX)), offers.clone());
            }
        }
        let spec = &self.record.spec;
        let left =
            u32::try_from(self.record.world.slots.len() - without.len()).unwrap_or(0) / spec.node_unit * spec.node_unit;
        let size = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
        let go_on = !without.is_empty() && left >= spec.nodes_min && left > 0 && commit_point(&ranks, size).is_some();
        go_on.then_some(without)
    }

    /// A shard is on durable storage. When all ranks' shards of a step are, the leader publishes it.
    pub(super) fn shard_written(
        &mut self,
        generation: Generation,
        step: Step,
        directory: String,
        shard: ShardFile,
        out: &mut Vec<Command>,
    ) {
        if generation != self.record.generation {
            return;
        }
        let size = self.record.world.size() as usize;
        let leader = self.leader();
        let (directory, shards) = self.durability.written.entry(step).or_insert_with(|| (directory, BTreeMap::new()));
        shards.insert(shard.rank, shard);
        if shards.len() == size
            && let Some(session) = leader
        {
            let order = Order::Publish {
                generation,
                step,
                directory: directory.clone(),
                shards: shards.values().cloned().collect(),
            };
            out.push(Command::Send { session, order, after: None });
        }
    }

    /// The leader made a checkpoint visible: everybody may reuse its slots. Returns true when the record changed.
    pub(super) fn published(&mut self, generation: Generation, step: Step, out: &mut Vec<Command>) -> bool {
        if generation != self.record.generation {
            return false;
        }
        self.durability.written.retain(|s, _| *s > step);
        self.unable.retain(|_, too_early| !*too_early);
        let order = Order::Durable { generation, step };
        out.extend(self.sessions().map(|(_, session)| Command::Send { session, order: order.clone(), after: None }));
        let newer = self.record.durable.is_none_or(|d| d < step);
        if newer {
            self.record.durable = Some(step);
            out.push(Command::Record { job: self.record.spec.job.clone(), fact: Fact::Published { step } });
        }
        newer
    }

    /// Connection of the node that publishes checkpoints.
    pub(super) fn leader(&self) -> Option<Session> {
        let id: &NodeId = &self.record.world.slots.first()?.node;
        self.nodes.get(id)?.session
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offer(step: u64, tier: Tier) -> Offer {
        Offer { step: Step(step), tier, generation: Generation(1) }
    }

    #[test]
    fn tiers_are_mixed_per_rank_and_memory_is_preferred() {
        let offers = BTreeMap::from([
            (Rank(0), vec![offer(9, Tier::Memory), offer(8, Tier::Memory), offer(8, Tier::Durable)]),
            (Rank(1), vec![offer(8, Tier::Durable)]),
        ]);
        assert_eq!(commit_point(&offers, 2), Some((Step(8), vec![Tier::Memory, Tier::Durable])));
    }

    #[test]
    fn one_rank_with_nothing_means_a_fresh_start_for_all() {
        let offers = BTreeMap::from([(Rank(0), vec![offer(9, Tier::Memory)]), (Rank(1), vec![])]);
        assert_eq!(commit_point(&offers, 2), None);
    }

    proptest! {
        #[test]
        fn the_commit_point_is_the_newest_common_step(sets in prop::collection::vec(prop::collection::btree_set(0u64..12, 0..6), 1..5)) {
            let offers: BTreeMap<_, _> = sets.iter().enumerate()
                .map(|(r, s)| (Rank(r as u32), s.iter().map(|x| offer(*x, Tier::Memory)).collect::<Vec<_>>())).collect();
            let common = (0..12u64).rev().find(|x| sets.iter().all(|s| s.contains(x)));
            prop_assert_eq!(commit_point(&offers, sets.len() as u32).map(|(s, _)| s.0), common);
        }
    }
}
