//! Shards as the coordinator sees them: where a rank's part of a checkpoint is, and which nodes
//! keep copies of it.

use crate::id::{Generation, NodeId, Rank, Step};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Where a shard can be read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum Tier {
    /// This node's memory.
    Memory,
    /// Another node's memory.
    Peer,
    /// Rebuilt from the memory of several other nodes: parity shards, and the shards they were
    /// computed from.
    Parity,
    /// Durable storage.
    Durable,
}

/// A sealed shard in a node's memory: a shard of one of its own ranks, or a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Holding {
    /// State after this many steps.
    pub step: Step,
    /// Generation that captured it.
    pub generation: Generation,
    /// Rank that captured it.
    pub rank: Rank,
    /// Number of ranks at that time.
    pub world_size: u32,
    /// Every rank holds the same state, so this shard can stand in for any rank's.
    pub shared: bool,
}

/// The copies of a shard, which can stand in for it or for damaged parts of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copies {
    /// The shard.
    pub of: Holding,
    /// `HOST:PORT` of the agents that hold a copy.
    pub holders: Vec<String>,
}

/// The redundancy that a job wants for its shards, in addition to each rank's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Redundancy {
    /// Number of nodes whose memory may be lost at once.
    pub replicas: u32,
    /// 0: full copies. Otherwise the number of data shards per `replicas` parity shards (a
    /// Reed–Solomon code over `data + replicas` nodes).
    pub data: u32,
    /// Every rank holds the same state: all shards are copies of each other.
    pub shared: bool,
}

/// A rank whose part goes into a stripe, and where that part is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The rank; `None` for zeros, if a node has fewer ranks than another.
    pub rank: Option<Rank>,
    /// `HOST:PORT` of its agent's replica streams.
    pub address: String,
}

/// A stripe of a code, computed by one node. Its i-th member provides the i-th part of its shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stripe {
    /// Number of the stripe, unique in its world.
    pub number: u32,
    /// The members, in the order of the parts.
    pub members: Vec<Member>,
    /// The nodes that keep its parity shards after the first, which stays where it is computed.
    pub keepers: Vec<Keeper>,
}

/// A parity shard in a node's memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Parity {
    /// State after this many steps.
    pub step: Step,
    /// Generation that captured the shards it was computed from.
    pub generation: Generation,
    /// Number of ranks at that time.
    pub world_size: u32,
    /// Number of the stripe, as in [`Stripe::number`].
    pub stripe: u32,
    /// Number of parity shards in the stripe.
    pub of: u32,
    /// Index of this parity shard.
    pub number: u32,
    /// Ranks whose parts it was computed from; `None` for zeros.
    pub members: Vec<Option<Rank>>,
}

/// What remains of a stripe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeLeft {
    /// Number of the stripe, as in [`Stripe::number`].
    pub number: u32,
    /// Ranks whose parts it was computed from; `None` for zeros.
    pub members: Vec<Option<Rank>>,
    /// `HOST:PORT` of the agents that hold the members' shards.
    pub data: Vec<Option<String>>,
    /// `HOST:PORT` of the agents that hold the stripe's parity shards.
    pub parity: Vec<Option<String>>,
}

/// How a shard can be computed from others: its i-th part belongs to the i-th member of the i-th
/// stripe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebuild {
    /// The shard to rebuild.
    pub of: Holding,
    /// One stripe per part.
    pub stripes: Vec<StripeLeft>,
}

/// Where a rank reads the step to restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The nearest tier.
    pub tier: Tier,
    /// Copies on other nodes, if any.
    pub copies: Option<Copies>,
    /// How to compute the shard from others, if that is possible.
    #[serde(default)]
    pub rebuild: Option<Rebuild>,
}

impl Source {
    /// Creates a source without known copies.
    #[must_use]
    pub fn of(tier: Tier) -> Self {
        Source { tier, copies: None, rebuild: None }
    }
}

/// A node that keeps replicas of another node's shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keeper {
    /// The node.
    pub node: NodeId,
    /// `HOST:PORT` of its replica streams.
    pub address: String,
}

/// How a node's shards are replicated in one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replication {
    /// Nodes that keep its replicas; empty if there are enough copies anyway.
    pub keepers: Vec<Keeper>,
    /// Ranks whose replicas the node keeps.
    pub keeps: Vec<Rank>,
    /// Stripes that the node computes, instead of full copies.
    #[serde(default)]
    pub stripes: Vec<Stripe>,
    /// Numbers of the stripes of which the node keeps a parity shard.
    #[serde(default)]
    pub keeps_parity: Vec<u32>,
}

/// A verified shard that a rank could restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Offer {
    /// State after this many steps.
    pub step: Step,
    /// The tier to read it from.
    pub tier: Tier,
    /// Generation that captured it; 0 on durable storage.
    pub generation: Generation,
}

/// The shards that one rank could restore.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offers {
    /// The shards, newest first.
    pub held: Vec<Offer>,
    /// Every rank holds the same state.
    pub shared: bool,
    /// The only step to which the script will go back, if it asked for one.
    #[serde(default)]
    pub wanted: Option<Step>,
    /// The directory contains checkpoints, whether or not this rank can read one of them.
    #[serde(default)]
    pub found: bool,
}

impl Offers {
    /// Creates the offers of a script that takes the newest step.
    #[must_use]
    pub fn any(held: Vec<Offer>, shared: bool) -> Self {
        let found = held.iter().any(|o| o.tier == Tier::Durable);
        Offers { held, shared, wanted: None, found }
    }
}

/// Why a durable checkpoint was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// Recovery from failures: managed by everstep, replaced by newer ones.
    #[default]
    Recovery,
    /// The end of an epoch.
    Epoch,
    /// The user's request: it belongs to the user.
    User,
}

impl Purpose {
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
    fn is_recovery(&self) -> bool {
        *self == Purpose::Recovery
    }
}

/// One rank's file in a durable checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardFile {
    /// The rank whose state it contains.
    pub rank: Rank,
    /// File name within the checkpoint's directory.
    pub file: String,
    /// Length in bytes.
    pub bytes: u64,
    /// CRC-64/NVME of the whole file, in hexadecimal.
    pub crc: String,
    /// Why it was written.
    #[serde(default, skip_serializing_if = "Purpose::is_recovery")]
    pub purpose: Purpose,
    /// Names of the objects whose state is in it, such as `model` and `optimizer`; none where the
    /// writer did not say.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub objects: BTreeSet<String>,
}
