//! The shards of one generation on their way to and from storage.

use crate::id::{Generation, NodeId, Rank, Step};
use crate::message::{
    Holding, Holdings, Offers, Parity, Publish, ShardFile, ShardWritten, Source, Tier, Unreadable, World,
};
use std::collections::{BTreeMap, BTreeSet};

/// Steps of which some shards are written and others may never be.
const INCOMPLETE_MAX: usize = 16;

/// Attempts to fetch a shard that may be intact.
const FETCHES_MAX: u32 = 3;

/// What a generation restores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The step; `None`: all ranks start fresh, or fail if some rank has found checkpoints.
    pub step: Option<Step>,
    /// Where each rank's shard comes from, by rank.
    pub sources: Vec<Source>,
}

/// The shards of a step that are written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Written {
    directory: String,
    by_rank: BTreeMap<Rank, ShardFile>,
}

/// What is known about the shards of one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shards {
    /// What each rank could restore, and whether all ranks hold the same.
    offers: BTreeMap<Rank, Offers>,
    /// Contents of each node's memory.
    held: BTreeMap<NodeId, Vec<Holding>>,
    /// Parity shards in each node's memory.
    parity: BTreeMap<NodeId, Vec<Parity>>,
    /// The decision, kept for ranks that ask again.
    decision: Option<Decision>,
    /// Written shards by step and generation: a script that numbers its checkpoints itself may use
    /// a number again, and an earlier generation may have left shards of it.
    written: BTreeMap<(Step, Generation), Written>,
    /// Shards that were found unreadable in this life of the coordinator.
    unreadable: BTreeSet<(Rank, Unreadable)>,
    /// How often shards could not be fetched that may be intact.
    failed_fetches: BTreeMap<(Rank, Unreadable), u32>,
    /// Whether the same lives of the same nodes have the same ranks as in the generation before.
    stayed: bool,
}

impl Shards {
    /// Begins a generation. `stayed`: the same lives of the same nodes have the same ranks as in
    /// the one before, if there was one, so nothing in memory is lost.
    pub(crate) fn begin(&mut self, stayed: bool) {
        let mut unreadable = std::mem::take(&mut self.unreadable);
        let mut failed_fetches = std::mem::take(&mut self.failed_fetches);
        if !stayed {
            // Another node's memory, or another rank's of this number, is another source.
            unreadable.retain(|(_, of)| of.tier == Tier::Durable);
            failed_fetches.clear();
        }
        *self = Shards { unreadable, failed_fetches, stayed, ..Shards::default() };
    }

    /// Returns whether nothing that the generation before had in memory is lost by an exchange of
    /// nodes or ranks.
    #[must_use]
    pub fn stayed(&self) -> bool {
        self.stayed
    }

    /// Records what a node's memory holds.
    pub(crate) fn set_held(&mut self, node: &NodeId, holdings: Holdings) {
        let Holdings { held, parity } = holdings;
        self.held.insert(node.clone(), held);
        self.parity.insert(node.clone(), parity);
    }

    /// Records what a rank could restore.
    pub(crate) fn add_offer(&mut self, rank: Rank, offers: Offers) {
        self.offers.insert(rank, offers);
    }

    /// Returns the shards that a rank has reported it could restore.
    #[must_use]
    pub fn offers(&self, rank: Rank) -> Option<&Offers> {
        self.offers.get(&rank)
    }

    /// Returns whether some rank has found checkpoints in the directory.
    #[must_use]
    pub fn any_found(&self) -> bool {
        self.offers.values().any(|o| o.found)
    }

    /// Returns whether some rank has reported what it could restore.
    #[must_use]
    pub fn has_offers(&self) -> bool {
        !self.offers.is_empty()
    }

    /// Returns what this node's memory holds.
    #[must_use]
    pub fn held_by(&self, node: &NodeId) -> &[Holding] {
        self.held.get(node).map_or(&[], Vec::as_slice)
    }

    /// Returns what each node's memory holds.
    pub fn held(&self) -> impl Iterator<Item = (&NodeId, &[Holding])> {
        self.held.iter().map(|(node, held)| (node, held.as_slice()))
    }

    /// Returns the parity shards in each node's memory.
    pub fn parity(&self) -> impl Iterator<Item = (&NodeId, &[Parity])> {
        self.parity.iter().map(|(node, held)| (node, held.as_slice()))
    }

    /// Returns whether all ranks and nodes of the world have reported what they have.
    #[must_use]
    pub fn all_have_told(&self, world: &World) -> bool {
        self.offers.len() >= world.size() as usize && world.slots.iter().all(|s| self.held.contains_key(&s.node))
    }

    /// Returns what is restored, once that is decided.
    #[must_use]
    pub fn decision(&self) -> Option<&Decision> {
        self.decision.as_ref()
    }

    /// Records what is restored.
    pub(crate) fn decide(&mut self, decision: Decision) {
        self.decision = Some(decision);
    }

    /// Returns whether no rank has found this shard to be unreadable.
    #[must_use]
    pub fn is_readable(&self, rank: Rank, step: Step, tier: Tier) -> bool {
        !self.unreadable.contains(&(rank, Unreadable { step, tier }))
    }

    /// Records that a shard could not be fetched. The last attempt makes it unreadable.
    pub(crate) fn note_failed_fetch(&mut self, rank: Rank, missing: Unreadable) {
        let failed = self.failed_fetches.entry((rank, missing)).or_default();
        *failed += 1;
        if *failed >= FETCHES_MAX {
            self.unreadable.insert((rank, missing));
        }
    }

    /// Records that a shard cannot be read. Returns false if that was known.
    pub(crate) fn mark_unreadable(&mut self, rank: Rank, unreadable: Unreadable) -> bool {
        self.unreadable.insert((rank, unreadable))
    }

    /// Records that a shard is on durable storage. Returns the step to publish when all `size` of
    /// its shards are.
    pub(crate) fn add_written(&mut self, written: ShardWritten, size: usize) -> Option<Publish> {
        let ShardWritten { step, captured, directory, shard } = written;
        let new = || Written { directory, by_rank: BTreeMap::new() };
        let of = self.written.entry((step, captured)).or_insert_with(new);
        of.by_rank.insert(shard.rank, shard);
        let all = of.by_rank.len() == size;
        all.then(|| Publish {
            step,
            captured,
            directory: of.directory.clone(),
            shards: of.by_rank.values().cloned().collect(),
        })
    }

    /// Records that a step was published.
    pub(crate) fn published(&mut self, step: Step) {
        // Shards of an older step may still come: what is saved a second time is written behind
        // later steps.
        self.written.retain(|(s, _), _| *s != step);
        while self.written.len() > INCOMPLETE_MAX {
            self.written.pop_first();
        }
    }
}
