//! Which step the ranks restore, and where they read it from.

use super::{Holding, Offers, Parity, Source, Tier};
use crate::id::{Rank, Step};
use serde::{Deserialize, Serialize};

/// The contents of a node's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holdings {
    /// Shards of its own ranks, and copies of others'.
    pub held: Vec<Holding>,
    /// Parity shards that this node keeps.
    #[serde(default)]
    pub parity: Vec<Parity>,
}

/// The shards that one rank could restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankOffers {
    /// Global rank of the worker.
    pub rank: Rank,
    /// Its offers.
    pub offers: Offers,
}

/// What the ranks of a node restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restore {
    /// The step; `None`: there is none that all ranks can restore.
    pub step: Option<Step>,
    /// Sources to read it from, by local rank; empty if `step` is `None`.
    pub sources: Vec<Source>,
    /// The step exists only in memory: ranks that have restored it also make it durable.
    pub persist: bool,
    /// Highest step that all ranks had completed before.
    #[serde(default)]
    pub best: Option<Step>,
    /// Some rank has found checkpoints: without a step, the ranks fail instead of starting fresh.
    #[serde(default)]
    pub found: bool,
}

/// A shard that a rank was ordered to restore but could not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Unreadable {
    /// The step to restore.
    pub step: Step,
    /// The tier from which it was to be read.
    pub tier: Tier,
}
