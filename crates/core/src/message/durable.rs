//! Durable checkpoints and the intervals between snapshots.

use super::ShardFile;
use crate::id::{Generation, Step};
use serde::{Deserialize, Serialize};

/// A rank's shard on durable storage, not yet published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardWritten {
    /// State after this many steps.
    pub step: Step,
    /// Only shards of the same generation make up a checkpoint: the generation that captured this
    /// one, or, for a past that all ranks share, the one that continues from it.
    pub captured: Generation,
    /// The user's checkpoint directory.
    pub directory: String,
    /// File of the shard, and its checksum.
    pub shard: ShardFile,
}

/// A durable checkpoint whose shards are all written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publish {
    /// Step of the checkpoint.
    pub step: Step,
    /// [`ShardWritten::captured`] of the shards.
    pub captured: Generation,
    /// The user's checkpoint directory.
    pub directory: String,
    /// One file per rank.
    pub shards: Vec<ShardFile>,
}

/// Steps from one snapshot to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInterval(pub u64);

/// A new interval between snapshots: from a step on, the multiples of the interval are captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotEvery {
    /// First step of the new interval. No rank has passed it when all ranks learn of it.
    pub from: Step,
    /// The new interval between snapshots.
    pub every: SnapshotInterval,
}
