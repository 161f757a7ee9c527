//! What `everstep ckpt ls --json` prints.

use crate::raw::Raw;
use schemars::JsonSchema;
use serde::Serialize;

/// The checkpoints found, newest step first.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CheckpointList {
    /// Version of this document: 1.
    pub version: u32,
    /// One row for each step, tier and holder.
    pub checkpoints: Vec<CheckpointRow>,
    /// Entries with a checkpoint's name that everstep did not write or cannot identify.
    pub foreign: Vec<ForeignEntry>,
}

/// One step, in one place.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CheckpointRow {
    /// Number of completed steps.
    pub step: u64,
    /// `local`: a node's own memory; `peer`: its memory of another node; `parity`: its memory of
    /// several others; `disk`: durable storage.
    pub tier: &'static str,
    /// The job whose memory contains it; null for `disk`, because several jobs may share a
    /// directory.
    pub job: Option<String>,
    /// `node` and its name, or the durable directory.
    pub holder: String,
    /// Ranks (for parity, the number of stripes), for people.
    pub ranks: String,
    /// Size of the state in bytes; 0 if the checkpoint cannot be read.
    pub bytes: u64,
    /// When it was saved, in seconds since 1970; 0: not known.
    pub saved_at: u64,
    /// Condition of the checkpoint, such as `in memory` or `durable`, for people.
    pub state: String,
    /// Where this machine can read it: slot files, or the checkpoint's directory. Empty for the
    /// memory of another machine.
    pub paths: Vec<Raw>,
}

/// An entry with a checkpoint's name that everstep did not write or cannot identify.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ForeignEntry {
    /// Where it is.
    pub path: Raw,
    /// Why it is not listed as a checkpoint.
    pub why: String,
}
