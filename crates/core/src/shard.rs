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
    /// Rebuilt from what several other nodes hold: parity shards, and the shards that they were computed from.
    Parity,
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

/// What a job wants kept of its shards beside each rank's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Redundancy {
    /// Nodes whose memory may be lost at once.
    pub replicas: u32,
    /// 0: full copies. Else `replicas` parity shards for so many shards (a Reed–Solomon code over `data + replicas` nodes).
    pub data: u32,
    /// Every rank holds the same: all are copies of each other.
    pub shared: bool,
}

/// Whose part goes into a stripe, and where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The rank; `None` for zeros, where a node has fewer ranks than another.
    pub rank: Option<Rank>,
    /// `HOST:PORT` of its agent's replica streams.
    pub address: String,
}

/// A stripe of a code, computed by one node: the i-th of its members brings the i-th part of its shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stripe {
    /// Unique in its world.
    pub number: u32,
    /// Whose parts.
    pub members: Vec<Member>,
    /// Who keeps its parity shards, but for the first, which stays where it is computed.
    pub keepers: Vec<Keeper>,
}

/// A parity shard in a node's memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Parity {
    /// State after this many steps.
    pub step: Step,
    /// Generation that captured what it was computed from.
    pub generation: Generation,
    /// Number of ranks then.
    pub world_size: u32,
    /// [`Stripe::number`]
    pub stripe: u32,
    /// The stripe's parity shards.
    pub of: u32,
    /// Which of them this is.
    pub number: u32,
    /// Ranks whose parts it was computed from; `None` for zeros.
    pub members: Vec<Option<Rank>>,
}

/// What is left of a stripe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeLeft {
    /// [`Stripe::number`]
    pub number: u32,
    /// Ranks whose parts it was computed from; `None` for zeros.
    pub members: Vec<Option<Rank>>,
    /// Agents that hold the members' shards, `HOST:PORT`.
    pub data: Vec<Option<String>>,
    /// Agents that hold its parity shards.
    pub parity: Vec<Option<String>>,
}

/// How a shard can be computed from others: its i-th part is the i-th member's of the i-th stripe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebuild {
    /// The shard.
    pub of: Holding,
    /// One stripe per part.
    pub stripes: Vec<StripeLeft>,
}

/// Where a rank reads the step that was decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The nearest tier.
    pub tier: Tier,
    /// Copies on other nodes, if any.
    pub copies: Option<Copies>,
    /// How to compute it from others, if that is possible.
    #[serde(default)]
    pub rebuild: Option<Rebuild>,
}

impl Source {
    /// A source of which no copies are known.
    #[must_use]
    pub fn of(tier: Tier) -> Self {
        Source { tier, copies: None, rebuild: None }
    }
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
    /// Stripes that it computes, instead of full copies.
    #[serde(default)]
    pub stripes: Vec<Stripe>,
    /// Numbers of the stripes of which it keeps a parity shard.
    #[serde(default)]
    pub keeps_parity: Vec<u32>,
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

/// What one rank says of what it could restore.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offers {
    /// Newest first.
    pub held: Vec<Offer>,
    /// Every rank holds the same.
    pub shared: bool,
    /// The step that the script goes back to: this one, or none.
    #[serde(default)]
    pub wanted: Option<Step>,
}

impl Offers {
    /// Of a script that takes the newest step.
    #[must_use]
    pub fn any(held: Vec<Offer>, shared: bool) -> Self {
        Offers { held, shared, wanted: None }
    }
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
