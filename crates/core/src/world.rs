//! A world: which nodes train together, and with which ranks.

use crate::id::{Incarnation, NodeId, Rank};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// One node's part of a world.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// Id of the node.
    pub node: NodeId,
    /// Life of the node's agent.
    pub incarnation: Incarnation,
    /// Global rank of the node's local rank 0.
    pub first_rank: Rank,
    /// Number of workers on the node.
    pub workers: u32,
    /// Host at which the other nodes reach it.
    pub host: String,
    /// Port of its process-group store for this generation.
    pub store_port: u16,
    /// Role of the node's workers.
    #[serde(default)]
    pub role: String,
}

impl Slot {
    /// Returns the global ranks of the node's workers.
    #[must_use]
    pub fn ranks(&self) -> Range<u32> {
        self.first_rank.0..self.first_rank.0 + self.workers
    }
}

/// The ranks of one generation, ordered by node id. The first slot leads: it serves the
/// process-group store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct World {
    /// Nodes in rank order.
    pub slots: Vec<Slot>,
}

impl World {
    /// Returns the number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.slots.iter().map(|s| s.workers).sum()
    }

    /// Returns the slot of `node`, if it is in this world.
    #[must_use]
    pub fn slot(&self, node: &NodeId) -> Option<&Slot> {
        self.index(node).and_then(|i| self.slots.get(i))
    }

    /// Returns the slot that contains `rank`.
    #[must_use]
    pub fn slot_of(&self, rank: Rank) -> Option<&Slot> {
        self.slots.iter().find(|s| s.ranks().contains(&rank.0))
    }

    fn index(&self, node: &NodeId) -> Option<usize> {
        self.slots.binary_search_by(|s| s.node.cmp(node)).ok()
    }

    /// Returns everything that `node` needs to start its workers, if it is in this world.
    #[must_use]
    pub fn place(&self, node: &NodeId, size: u32) -> Option<Place> {
        let index = self.index(node)?;
        let leader = self.slots.first()?;
        let slot = self.slots.get(index)?;
        let workers = |slots: &[Slot]| slots.iter().filter(|s| s.role == slot.role).map(|s| s.workers).sum();
        Some(Place {
            slot: slot.clone(),
            first_role_rank: workers(self.slots.get(..index)?),
            role_world_size: workers(&self.slots),
            group_rank: u32::try_from(index).unwrap_or(u32::MAX),
            group_world_size: u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
            world_size: size,
            leader_host: leader.host.clone(),
            leader_port: leader.store_port,
        })
    }
}

/// One node's place in a world. Its size is constant: a world of N nodes costs N short messages,
/// not N copies of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Ranks and addresses of the node itself.
    pub slot: Slot,
    /// Position of the node, `0..group_world_size`.
    pub group_rank: u32,
    /// Number of nodes in the world.
    pub group_world_size: u32,
    /// Number of ranks in the world.
    pub world_size: u32,
    /// Number, among the ranks with the same role, of the node's local rank 0
    /// (`SimpleElasticAgent._assign_worker_ranks` in torch).
    pub first_role_rank: u32,
    /// Number of ranks with the same role.
    pub role_world_size: u32,
    /// Host of the first node, which serves the process-group store.
    pub leader_host: String,
    /// Port of the process-group store.
    pub leader_port: u16,
}
