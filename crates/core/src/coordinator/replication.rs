//! Decides which step is replicated next, and when all nodes have it (Gemini §3.2: two complete
//! versions stay until a newer one is complete everywhere).
//!
//! One step at a time: the coordinator names it, every node replicates it and reports that. When
//! all have, it is committed and the next one is named: the newest that any node has sealed, or, if
//! steps are so short that it may be overwritten by then, the one after it. So all nodes replicate
//! the same steps, a slow network lowers the frequency instead of slowing training down (G11), and
//! nothing is overwritten before its replacement is complete everywhere. If a code is used instead
//! of full copies (X6), a node's part is to compute the parity of others' shards; the rest is the
//! same. Each naming is a round: a report of an earlier round is not counted, because nodes may
//! have dropped that step.

use super::command::Fact;
use super::job::{Job, RoundState};
use super::output::Output;
use crate::id::{NodeId, Rank};
use crate::message::{CrewOrder, Keeper, Member, Redundancy, Replicated, Replication, Sealed, Slot, Stripe};
use crate::placement::{code_groups, place, stripe};
use crate::time::Time;

impl Job {
    /// Records that a node takes part, or cannot replicate the step that was named.
    pub(super) fn sealed(&mut self, node: &NodeId, sealed: Sealed, out: &mut Output) {
        if self.record.world.slot(node).is_none() {
            return;
        }
        self.has_checkpoints();
        let nodes = self.record.world.slots.len();
        if self.replicas.sealed(node, sealed, nodes) {
            self.begin_replication(out);
        }
    }

    /// Names a step, and sends all nodes the plan for replicating it.
    fn begin_replication(&mut self, out: &mut Output) {
        let round = self.replicas.name_next(self.growth.step());
        let (wish, committed) = (self.replicas.wish(), self.replicas.committed());
        let plans = if wish.data > 0 && !wish.shared { self.code(wish) } else { self.placement(wish) };
        for (node, plan) in plans {
            if let Some(session) = self.nodes.session(&node) {
                out.send(session, self.crew_order(CrewOrder::Replicate { plan, round, committed }));
            }
        }
    }

    /// Returns the nodes that each node sends to and receives from. Ranks with the same state are
    /// copies of each other: nothing is sent between them while there are enough nodes.
    fn placement(&self, wish: Redundancy) -> Vec<(NodeId, Replication)> {
        let slots = &self.record.world.slots;
        let replicas = wish.replicas as usize;
        let holders = if wish.shared { vec![Vec::new(); slots.len()] } else { place(&self.domains(), replicas) };
        let mut plans: Vec<(NodeId, Replication)> =
            slots.iter().map(|s| (s.node.clone(), Replication::default())).collect();
        for (i, keepers) in holders.iter().enumerate() {
            let Some(slot) = slots.get(i) else { continue };
            let ranks = slot.ranks();
            for keeper in keepers {
                let Some(id) = slots.get(*keeper).map(|s| s.node.clone()) else { continue };
                let Some(address) = self.replica_address(&id) else { continue };
                if let Some((_, plan)) = plans.get_mut(i) {
                    plan.keepers.push(Keeper { node: id, address });
                }
                if let Some((_, plan)) = plans.get_mut(*keeper) {
                    plan.keeps.extend(ranks.clone().map(Rank));
                }
            }
        }
        plans
    }

    fn domains(&self) -> Vec<&str> {
        let domain = |id: &NodeId| self.nodes.get(id).map_or("", |n| n.hello.domain.as_str());
        self.record.world.slots.iter().map(|s| domain(&s.node)).collect()
    }

    /// Returns which stripes each node computes, and whose parity shards it keeps: one stripe for
    /// each of its ranks, or for each rank of the node of its group that has the most.
    fn code(&self, wish: Redundancy) -> Vec<(NodeId, Replication)> {
        let slots = &self.record.world.slots;
        let most = slots.iter().map(|s| s.workers).max().unwrap_or(0);
        let mut plans: Vec<(NodeId, Replication)> =
            slots.iter().map(|s| (s.node.clone(), Replication::default())).collect();
        let address = |slot: &Slot| self.replica_address(&slot.node).unwrap_or_default();
        for group in code_groups(&self.domains(), wish.data as usize, wish.replicas as usize) {
            for (place, node) in group.iter().enumerate() {
                let (members, keepers) = stripe(group.len(), wish.replicas as usize, place);
                let of = |places: Vec<usize>| -> Vec<usize> {
                    places.iter().filter_map(|p| group.get(*p).copied()).collect()
                };
                let (members, keepers) = (of(members), of(keepers));
                for local in (0..most).filter(|_| !members.is_empty()) {
                    let number = u32::try_from(*node).unwrap_or(u32::MAX) * most + local;
                    let member = |slot: &Slot| Member {
                        rank: slot.ranks().nth(local as usize).map(Rank),
                        address: address(slot),
                    };
                    let members: Vec<Member> = members.iter().filter_map(|n| slots.get(*n)).map(member).collect();
                    if members.iter().all(|m| m.rank.is_none()) {
                        continue;
                    }
                    let keeper = |slot: &Slot| Keeper { node: slot.node.clone(), address: address(slot) };
                    let at = keepers.iter().filter_map(|n| slots.get(*n)).map(keeper).collect();
                    for keeps in std::iter::once(node).chain(&keepers) {
                        plans.get_mut(*keeps).into_iter().for_each(|(_, p)| p.keeps_parity.push(number));
                    }
                    if let Some((_, plan)) = plans.get_mut(*node) {
                        plan.stripes.push(Stripe { number, members, keepers: at });
                    }
                }
            }
        }
        plans
    }

    /// Records that the shards of a node's step are on all their keepers. When all nodes have
    /// reported this, the step is committed, unless the job is over: agents that have already ended
    /// would not know of the step, and the remaining step in memory must be the same everywhere.
    pub(super) fn replicated(&mut self, now: Time, node: &NodeId, replicated: Replicated, out: &mut Output) {
        let (generation, step) = (self.record.generation, replicated.step);
        if self.record.world.slot(node).is_none() || self.phase.is_over() || self.replicas.is_committed(step) {
            return;
        }
        let nodes = self.record.world.slots.len();
        let first = match self.replicas.replicated(node, replicated, nodes) {
            RoundState::Open => return,
            RoundState::Mixed => return self.begin_replication(out),
            RoundState::Complete { first } => first,
        };
        // Ranks with the same state must have the same bits (X5).
        if let Some(found) = self.replicas.compare(self.record.world.size() as usize) {
            self.diverged(step, found, out);
        }
        let round = self.replicas.name_next(self.growth.step());
        let order = self.crew_order(CrewOrder::Committed { step, round });
        let members = self.nodes.sessions().filter(|(id, _)| self.record.world.slot(id).is_some());
        out.send_each(members.map(|(_, session)| session), &order);
        if first {
            let others = u32::try_from(nodes).unwrap_or(u32::MAX).saturating_sub(1);
            let fact = Fact::Replicated { generation, step, replicas: self.replicas.wish().replicas.min(others) };
            out.record(fact);
        }
        self.grow_from(now, step, out);
    }
}
