//! Which lost shards can be computed from the remains of their stripes (X6).

use super::job::Job;
use crate::id::{Generation, Rank, Step};
use crate::message::{Holding, Parity, Rebuild, StripeLeft};
use std::collections::BTreeSet;

impl Job {
    /// Returns every step at which `rank`'s shard can be computed from others in memory: each
    /// stripe to which it contributes a part has at least as many shards left as it has members.
    /// The rank's own shard does not count, whether it is there or not.
    pub(super) fn rebuilds(&self, rank: Rank) -> Vec<Rebuild> {
        let size = self.record.world.size();
        let all: Vec<(String, &Parity)> = self
            .shards
            .parity()
            .filter_map(|(node, held)| Some((self.replica_address(node)?, held)))
            .flat_map(|(address, held)| held.iter().map(move |p| (address.clone(), p)))
            .filter(|(_, p)| p.world_size == size && self.record.is_of_this_past(p.generation, p.step))
            .collect();
        let of_rank = all.iter().filter(|(_, p)| p.members.contains(&Some(rank)));
        let steps: BTreeSet<(Generation, Step)> = of_rank.map(|(_, p)| (p.generation, p.step)).collect();
        steps.into_iter().filter_map(|(generation, step)| self.rebuild(rank, generation, step, &all)).collect()
    }

    fn rebuild(&self, rank: Rank, generation: Generation, step: Step, all: &[(String, &Parity)]) -> Option<Rebuild> {
        let at: Vec<&(String, &Parity)> =
            all.iter().filter(|(_, p)| (p.generation, p.step) == (generation, step)).collect();
        let parts = at.iter().find(|(_, p)| p.members.contains(&Some(rank)))?.1.members.len();
        let stripes = (0..parts).map(|part| {
            let (_, known) =
                at.iter().find(|(_, p)| p.members.len() == parts && p.members.get(part) == Some(&Some(rank)))?;
            let mut parity = vec![None; known.of as usize];
            for (address, p) in at.iter().filter(|(_, p)| p.stripe == known.stripe && p.members == known.members) {
                parity.get_mut(p.number as usize)?.get_or_insert(address.clone());
            }
            let holder =
                |member: &Option<Rank>| member.filter(|m| *m != rank).and_then(|m| self.holder(m, generation, step));
            let data: Vec<Option<String>> = known.members.iter().map(holder).collect();
            let zeros = known.members.iter().filter(|m| m.is_none()).count();
            let left = zeros + data.iter().flatten().count() + parity.iter().flatten().count();
            let stripe = StripeLeft { number: known.stripe, members: known.members.clone(), data, parity };
            (left >= parts).then_some(stripe)
        });
        let stripes: Vec<StripeLeft> = stripes.collect::<Option<_>>()?;
        let world_size = self.record.world.size();
        Some(Rebuild { of: Holding { step, generation, rank, world_size, shared: false }, stripes })
    }

    /// Returns the replica address of a node that has exactly this shard.
    fn holder(&self, rank: Rank, generation: Generation, step: Step) -> Option<String> {
        let world_size = self.record.world.size();
        let is = |h: &Holding| (h.rank, h.world_size, h.generation, h.step) == (rank, world_size, generation, step);
        let mut nodes = self.shards.held().filter(|(_, held)| held.iter().any(is));
        nodes.find_map(|(node, _)| self.replica_address(node))
    }
}
