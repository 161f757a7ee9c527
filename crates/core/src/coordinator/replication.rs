//! Which step is replicated next, and when it is held by all (Gemini §3.2: two complete versions stay until a newer one is
//! complete everywhere).
//!
//! One step at a time: the coordinator names it, every node replicates it and says so, and when all have, it is
//! committed and the next one is named: the newest that any node has sealed, or, where steps are so short that it may be
//! overwritten by then, the one after it. So all nodes replicate the same steps, a slow network lowers the frequency
//! instead of slowing training down (G11), and nothing is overwritten before what replaces it is complete everywhere.

use super::command::{Command, Fact};
use super::state::Job;
use crate::digests::odd_ones;
use crate::id::{Generation, NodeId, Rank, Step};
use crate::message::{Keeper, Order, Replication};
use crate::placement::place;
use crate::time::Time;
use std::collections::{BTreeMap, BTreeSet};

/// Replicas of one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replicas {
    /// Newest sealed step by node, of nodes that take part.
    sealed: BTreeMap<NodeId, Step>,
    /// Nodes that have replicated the step at hand, with the step they took for it.
    done: BTreeMap<NodeId, Step>,
    /// What tells the ranks' states of the step at hand apart.
    digests: BTreeMap<Rank, u64>,
    /// Ranks that were found to hold something else.
    odd: BTreeSet<Rank>,
    /// The step at hand.
    next: Option<Step>,
    /// Newest step held by all.
    pub committed: Option<Step>,
    /// Copies of each shard on other nodes.
    copies: u32,
    /// Replicas that are wanted, and whether every rank holds the same.
    wish: (u32, bool),
    /// Steps are shorter than it takes to name one: a step that nobody has sealed yet is named.
    ahead: bool,
}

impl Job {
    /// A node takes part, or cannot replicate the step that was named.
    pub(super) fn sealed(
        &mut self,
        node: &NodeId,
        generation: Generation,
        step: Step,
        wish: (u32, bool),
        out: &mut Vec<Command>,
    ) {
        if generation != self.record.generation || self.record.world.slot(node).is_none() {
            return;
        }
        let again = self.replication.sealed.insert(node.clone(), step).is_some();
        self.replication.done.remove(node);
        if self.replication.sealed.len() < self.record.world.slots.len() {
            return;
        }
        self.replication.wish = wish;
        if self.replication.next.is_none() || again {
            // It asks because what was named is gone already, or because it waits for a step that was not named.
            self.replication.ahead = self.replication.next.is_some_and(|next| step >= next);
            self.begin_replication(out);
        }
    }

    fn name_next(&mut self) -> Step {
        self.replication.done.clear();
        self.replication.digests.clear();
        let newest = self.replication.sealed.values().max().copied().unwrap_or_default();
        let held_for_growth = self.growth.and_then(|g| g.step);
        let next = match held_for_growth {
            Some(held) if held > newest => held,
            _ if !self.replication.ahead && self.replication.committed.is_none_or(|c| newest > c) => newest,
            _ => Step(newest.0 + 1),
        };
        self.replication.next = Some(next);
        next
    }

    /// Names a step and tells everybody with whom to replicate it.
    fn begin_replication(&mut self, out: &mut Vec<Command>) {
        let next = self.name_next();
        let (replicas, shared) = self.replication.wish;
        let plans = self.placement(replicas, shared);
        self.replication.copies = replicas.min(u32::try_from(plans.len()).unwrap_or(u32::MAX).saturating_sub(1));
        for (node, plan) in plans {
            if let Some(session) = self.nodes.get(&node).and_then(|n| n.session) {
                let order = Order::Replicate { generation: self.record.generation, plan, next };
                out.push(Command::Send { session, order, after: None });
            }
        }
    }

    /// Who sends to whom. Ranks that hold the same are copies of each other: nothing is sent between them while
    /// there are enough nodes.
    fn placement(&self, replicas: u32, shared: bool) -> Vec<(NodeId, Replication)> {
        let slots = &self.record.world.slots;
        let domain = |id: &NodeId| self.nodes.get(id).map_or("", |n| n.hello.domain.as_str());
        let domains: Vec<&str> = slots.iter().map(|s| domain(&s.node)).collect();
        let holders = if shared { vec![Vec::new(); slots.len()] } else { place(&domains, replicas as usize) };
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

    /// A node has its shards of a step where they belong. When all have, the step is committed.
    pub(super) fn replicated(
        &mut self,
        now: Time,
        node: &NodeId,
        generation: Generation,
        (step, sealed, digests): (Step, Step, Vec<(Rank, u64)>),
        out: &mut Vec<Command>,
    ) {
        let current = generation == self.record.generation && self.record.world.slot(node).is_some();
        if !current || self.replication.committed.is_some_and(|c| step <= c) {
            return;
        }
        self.replication.sealed.insert(node.clone(), sealed);
        self.replication.done.insert(node.clone(), step);
        self.replication.digests.extend(digests);
        if self.replication.done.len() < self.record.world.slots.len() {
            return;
        }
        let same = self.replication.done.values().all(|s| *s == step);
        let first = self.replication.committed.is_none();
        if !same {
            // They took different steps for it: once more, with one that all are still to come to.
            self.replication.ahead = true;
            return self.begin_replication(out);
        }
        self.replication.committed = Some(step);
        self.compare(step, out);
        self.replication.ahead &= self.replication.sealed.values().all(|s| s.0 > step.0 + 1);
        let (committed, next) = (step, self.name_next());
        let order = Order::Committed { generation, step: committed, next };
        let members = self.sessions().filter(|(id, _)| self.record.world.slot(id).is_some());
        out.extend(members.map(|(_, session)| Command::Send { session, order: order.clone(), after: None }));
        if first {
            let fact = Fact::Replicated { generation, step, replicas: self.replication.copies };
            out.push(Command::Record { job: self.record.spec.job.clone(), fact });
        }
        self.grow_from(now, committed, out);
    }

    /// Ranks that hold the same must hold the same bits (X5).
    fn compare(&mut self, step: Step, out: &mut Vec<Command>) {
        if self.replication.digests.len() < self.record.world.size() as usize {
            return;
        }
        let Some(found) = odd_ones(&self.replication.digests) else {
            self.replication.odd.clear();
            return;
        };
        let new = found.ranks.iter().any(|r| !self.replication.odd.contains(r));
        self.replication.odd.extend(&found.ranks);
        if new {
            self.diverged(step, found, out);
        }
    }
}
