//! Shards as the control plane knows them: where a rank's part of a checkpoint is, and who keeps copies of it.

use crate::id::{Generation, NodeId, Rank, Step};
use serde::{Deserialize, Serialize};

/// Where a shard can be read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Tier {
    /// This node's memory.
    Memory,
    /// Another node's memory.
    Peer,
    /// Durable storage.
    Durable,
}

/// A sealed shard in a node's memory: one of its own ranks', or a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Holding {
    /// State after this many steps.
    pub step: Step,
    /// Generation that captured it.
    pub generation: Generation,
    /// Rank that captured it.
    pub rank: Rank,
    /// Number of ranks then.
    pub world_size: u32,
    /// Every rank holds the same, so that it can stand for any rank's.
    pub shared: bool,
}

/// Where copies of a shard are: they can stand in for it, or for damaged parts of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copies {
    /// What they are copies of.
    pub of: Holding,
    /// `HOST:PORT` of the agents that hold one.
    pub holders: Vec<String>,
}

/// Where a rank reads the step that was decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The nearest tier.
    pub tier: Tier,
    /// Copies on other nodes, if any.
    pub copies: Option<Copies>,
}

/// A node that keeps replicas of this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keeper {
    /// Which.
    pub node: NodeId,
    /// `HOST:PORT` of its replica streams.
    pub address: String,
}

/// How a node's shards are replicated in this generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replication {
    /// Nodes that keep its replicas; none when there are enough copies anyway.
    pub keepers: Vec<Keeper>,
    /// Ranks whose replicas it keeps.
    pub keeps: Vec<Rank>,
}

/// A verified shard that a rank could restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Offer {
    /// State after this many steps.
    pub step: Step,
    /// Where it lies.
    pub tier: Tier,
    /// Generation that captured it; 0 on durable storage.
    pub generation: Generation,
}

/// Why a durable checkpoint was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// To come back from failures: managed, replaced by newer ones.
    #[default]
    Recovery,
    /// The end of an epoch.
    Epoch,
    /// The user asked for it: it is the user's.
    User,
}

impl Purpose {
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
    fn is_recovery(&self) -> bool {
        *self == Purpose::Recovery
    }
}

/// One rank's file of a durable checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardFile {
    /// Whose state.
    pub rank: Rank,
    /// File name within the checkpoint's directory.
    pub file: String,
    /// Length in bytes.
    pub bytes: u64,
    /// CRC-64/NVME of the whole file, as hexadecimal.
    pub crc: String,
    /// Why it was written.
    #[serde(default, skip_serializing_if = "Purpose::is_recovery")]
    pub purpose: Purpose,
}
