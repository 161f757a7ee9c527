//! The manifest: the one file whose presence makes a durable checkpoint exist.

use super::digest::crc;
use super::mark::Mark;
use crate::lineage::Lineage;
use crate::retain::lacks;
use everstep_core::id::RunId;
use everstep_core::message::{Purpose, ShardFile};
use everstep_wire::limits::MANIFEST_BYTES_MAX;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Name of the manifest within a checkpoint's directory.
pub const MANIFEST_FILE: &str = "manifest.json";
/// Version of this format.
pub const VERSION: u32 = 1;

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`VERSION`] of the writer.
    pub version: u32,
    /// Number of steps after which the state was saved.
    pub step: u64,
    /// Number of ranks.
    pub world_size: u32,
    /// When it was published, in seconds since 1970.
    #[serde(default, skip_serializing_if = "is_unknown")]
    pub saved_at: u64,
    /// The writer; `None` in manifests from before directories had owners.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writer: Option<Mark>,
    /// The checkpoints that this one continues; `None` in earlier versions, and in checkpoints that
    /// were not saved by a training loop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lineage: Option<Lineage>,
    /// One file per rank.
    pub shards: Vec<ShardFile>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_unknown(saved_at: &u64) -> bool {
    *saved_at == 0
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    manifest: Manifest,
    /// CRC-64/NVME of the manifest's compact JSON, as hexadecimal.
    crc: String,
}

/// Why bytes are not a manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The manifest is longer than the limit; the length in bytes.
    #[error("manifest of {0} bytes is over the limit of {MANIFEST_BYTES_MAX}")]
    TooLong(u64),
    /// The bytes are not the expected JSON.
    #[error("manifest is damaged: {0}")]
    Damaged(String),
    /// The checksum does not match the manifest.
    #[error("manifest is damaged: its checksum differs")]
    Checksum,
    /// The manifest was written by another version.
    #[error("manifest has version {0}, this everstep reads version {VERSION}")]
    Version(u32),
}

impl Manifest {
    /// Returns why the checkpoint was written: the highest purpose of its shards.
    #[must_use]
    pub fn purpose(&self) -> Purpose {
        self.shards.iter().map(|s| s.purpose).max().unwrap_or_default()
    }

    /// Returns whether this manifest may replace the manifest `there`: an automatic checkpoint of
    /// the same step in the same branch, or one that the user saved there in the same generation
    /// and saves again; or, where both belong to no branch (`exactly`), one that the user saved
    /// under the same name. In a branch, a manifest that lacks one of the other's objects replaces
    /// nothing.
    #[must_use]
    pub fn stands_for(&self, there: &Manifest, run: RunId, exactly: bool) -> bool {
        let turn = |m: &Manifest| m.writer.filter(|w| w.run == run).map(|w| w.turn());
        let branch = |m: &Manifest| m.lineage.as_ref().map(|l| l.branch);
        let user = |m: &Manifest| m.purpose() == Purpose::User;
        if turn(there).is_none() || there.step != self.step || branch(there) != branch(self) {
            return false;
        }
        match branch(there) {
            None => exactly && user(there),
            Some(_) if exactly || lacks(&self.objects(), &there.objects()) => false,
            Some(_) => !user(there) || (user(self) && turn(there) == turn(self)),
        }
    }

    /// Returns the names of the objects whose state is in the checkpoint; empty if a shard does not
    /// list any.
    #[must_use]
    pub fn objects(&self) -> BTreeSet<String> {
        if self.shards.iter().any(|s| s.objects.is_empty()) {
            return BTreeSet::new();
        }
        self.shards.iter().flat_map(|s| &s.objects).cloned().collect()
    }

    /// Returns the length of all shards in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|s| s.bytes).sum()
    }

    /// Returns the JSON to write, with its checksum.
    ///
    /// # Errors
    /// Fails when serialisation fails (out of memory).
    pub fn to_bytes(&self) -> serde_json::Result<Vec<u8>> {
        let crc = format!("{:016x}", crc(&serde_json::to_vec(self)?));
        let mut bytes = serde_json::to_vec_pretty(&Sealed { manifest: self.clone(), crc })?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Checks that there is one shard for each rank, that each has a file of its own, that the
    /// branch is possible, and that the total length does not overflow.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let ranks: BTreeSet<u32> = self.shards.iter().map(|s| s.rank.0).collect();
        let complete = self.shards.len() == self.world_size as usize && ranks.len() == self.shards.len();
        if self.shards.is_empty() || !complete || ranks.iter().any(|r| *r >= self.world_size) {
            return Err("not every rank has exactly one shard");
        }
        let files: BTreeSet<&str> = self.shards.iter().map(|s| s.file.as_str()).collect();
        if files.len() != self.shards.len() {
            return Err("two ranks share a file");
        }
        if self.lineage.as_ref().is_some_and(|l| !l.is_possible()) {
            return Err("its branch is impossible");
        }
        let bytes = self.shards.iter().try_fold(0u64, |sum, s| sum.checked_add(s.bytes));
        bytes.map(drop).ok_or("its shard lengths overflow")
    }

    /// Parses a manifest and verifies its checksum and its contents.
    ///
    /// # Errors
    /// [`ManifestError`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(ManifestError::TooLong(bytes.len() as u64));
        }
        let damaged = |e: serde_json::Error| ManifestError::Damaged(e.to_string());
        let sealed: Sealed = serde_json::from_slice(bytes).map_err(damaged)?;
        let expected = format!("{:016x}", crc(&serde_json::to_vec(&sealed.manifest).map_err(damaged)?));
        if expected != sealed.crc {
            return Err(ManifestError::Checksum);
        }
        if sealed.manifest.version != VERSION {
            return Err(ManifestError::Version(sealed.manifest.version));
        }
        sealed.manifest.check().map_err(|what| ManifestError::Damaged(what.into()))?;
        Ok(sealed.manifest)
    }
}
