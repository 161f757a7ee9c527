//! The replication of one step at a time, in rounds.

use super::Redundancy;
use crate::id::{Rank, Step};
use serde::{Deserialize, Serialize};

/// The step that all nodes replicate in a round. A report of an earlier round is ignored, because
/// nodes may have dropped what it describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    /// First step that qualifies: each node takes the first one from here on that all of its
    /// workers have sealed.
    pub next: Step,
    /// Counts the steps named in this generation.
    pub round: u64,
}

/// A node takes part in replication, or cannot replicate the step that was named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealed {
    /// Newest step that all workers of the node have sealed.
    pub step: Step,
    /// The redundancy wanted in addition to each rank's own shard.
    pub wish: Redundancy,
    /// Round of the step that cannot be replicated; `None`: this node takes part (again).
    pub instead: Option<u64>,
    /// Newest step of this generation that all nodes hold, as far as this node knows: a coordinator
    /// that was restarted knows of none.
    pub committed: Option<Step>,
}

/// Shards of one node that are sealed and have their replicas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replicated {
    /// Step of the shards.
    pub step: Step,
    /// Newest step that all workers of this node have sealed.
    pub sealed: Step,
    /// Digest of each rank's state, where all ranks should hold the same.
    pub digests: Vec<(Rank, u64)>,
    /// Number of the round; see [`Round`].
    pub round: u64,
}
