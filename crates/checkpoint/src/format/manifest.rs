//! The manifest: the one file whose presence makes a durable checkpoint exist.

use super::digest::crc;
use everstep_core::message::ShardFile;
use everstep_wire::limits::MANIFEST_BYTES_MAX;
use serde::{Deserialize, Serialize};

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
    /// State after this many steps.
    pub step: u64,
    /// Number of ranks.
    pub world_size: u32,
    /// One file per rank.
    pub shards: Vec<ShardFile>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    manifest: Manifest,
    /// CRC-64/NVME of the manifest's compact JSON, as hexadecimal.
    crc: String,
}

/// Why bytes are not a manifest.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// Longer than the limit.
    #[error("manifest of {0} bytes is over the limit of {MANIFEST_BYTES_MAX}")]
    TooLong(u64),
    /// Not the expected JSON.
    #[error("manifest is damaged: {0}")]
    Damaged(String),
    /// Checksum differs.
    #[error("manifest is damaged: its checksum differs")]
    Checksum,
    /// Written by another version.
    #[error("manifest has version {0}, this everstep reads version {VERSION}")]
    Version(u32),
}

impl Manifest {
    /// The bytes to write.
    ///
    /// # Errors
    /// When serialisation fails (out of memory).
    pub fn to_bytes(&self) -> serde_json::Result<Vec<u8>> {
        let crc = format!("{:016x}", crc(&serde_json::to_vec(self)?));
        let mut bytes = serde_json::to_vec_pretty(&Sealed { manifest: self.clone(), crc })?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Reads and verifies.
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
        let ranks: std::collections::BTreeSet<_> = sealed.manifest.shards.iter().map(|s| s.rank.0).collect();
        if ranks.len() != sealed.manifest.world_size as usize || ranks.iter().any(|r| *r >= sealed.manifest.world_size)
        {
            return Err(ManifestError::Damaged("ranks are not complete".into()));
        }
        Ok(sealed.manifest)
    }
}
