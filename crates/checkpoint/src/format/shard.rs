//! The side index of a shard: which tensor lies where in the region of contiguous bytes.

use super::digest::CHUNK_BYTES;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Metadata key of a shard file: checksums of the chunks, see [`chunks_to_text`].
pub const CHUNKS_KEY: &str = "everstep.chunks";
/// Regions begin on a multiple of this, in files as in memory.
const REGION_ALIGN: usize = 4096;

/// One tensor of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    /// Fully qualified name, unique in the shard.
    pub name: String,
    /// safetensors name of the element type (`F32`, `BF16`, `U8`, …).
    pub dtype: String,
    /// Shape; empty for a scalar.
    pub shape: Vec<u64>,
    /// Length in bytes.
    pub bytes: u64,
}

/// All tensors of a shard in the order of their bytes, without gaps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// The tensors.
    pub tensors: Vec<Tensor>,
    /// CRC-64/NVME of each [`CHUNK_BYTES`] of the region.
    pub crcs: Vec<u64>,
}

impl Index {
    /// Length of the region in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.bytes).sum()
    }

    /// The same for an index from elsewhere: `None` when the lengths do not add up to any.
    #[must_use]
    pub fn checked_bytes(&self) -> Option<u64> {
        self.tensors.iter().try_fold(0u64, |sum, t| sum.checked_add(t.bytes))
    }

    /// Number of chunks of the region.
    #[must_use]
    pub fn chunks(&self) -> usize {
        usize::try_from(self.bytes().div_ceil(CHUNK_BYTES as u64)).unwrap_or(usize::MAX)
    }

    /// Offset of each tensor in the region, by name.
    #[must_use]
    pub fn offsets(&self) -> BTreeMap<&str, (u64, &Tensor)> {
        let mut at = 0;
        let place = |t| {
            let here = at;
            at += Tensor::bytes(t);
            (t.name.as_str(), (here, t))
        };
        self.tensors.iter().map(place).collect()
    }

    /// The safetensors header for this region: length, JSON padded with spaces up to a page.
    ///
    /// # Errors
    /// When a name cannot be written as JSON.
    pub fn safetensors_header(&self, metadata: &BTreeMap<String, String>) -> serde_json::Result<Vec<u8>> {
        let mut map = serde_json::Map::new();
        map.insert("__metadata__".into(), serde_json::to_value(metadata)?);
        let mut at = 0;
        for t in &self.tensors {
            let entry = serde_json::json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + t.bytes]});
            map.insert(t.name.clone(), entry);
            at += t.bytes;
        }
        let mut json = serde_json::to_vec(&map)?;
        // The region begins on a page of the file, as it does in memory.
        json.resize((8 + json.len()).next_multiple_of(REGION_ALIGN) - 8, b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend_from_slice(&json);
        Ok(header)
    }
}

/// Checksums of the chunks as text: sixteen hexadecimal digits each.
#[must_use]
pub fn chunks_to_text(crcs: &[u64]) -> String {
    use std::fmt::Write;
    crcs.iter().fold(String::with_capacity(crcs.len() * 16), |mut text, crc| {
        let _ = write!(text, "{crc:016x}");
        text
    })
}

/// The checksums back; `None` when the text is none of [`chunks_to_text`].
#[must_use]
pub fn chunks_from_text(text: &str) -> Option<Vec<u64>> {
    let digits = text.as_bytes().chunks(16);
    digits.map(|d| u64::from_str_radix(std::str::from_utf8(d).ok().filter(|d| d.len() == 16)?, 16).ok()).collect()
}

impl Tensor {
    fn bytes(t: &Tensor) -> u64 {
        t.bytes
    }
}

/// Reads a safetensors header's JSON into an index (without checksums) and its metadata.
///
/// # Errors
/// A sentence saying what is wrong: unknown structure, gaps, overlaps.
pub fn parse_safetensors_header(json: &[u8]) -> Result<(Index, BTreeMap<String, String>), String> {
    #[derive(Deserialize)]
    struct Entry {
        dtype: String,
        shape: Vec<u64>,
        data_offsets: (u64, u64),
    }
    let mut map: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(json).map_err(|e| format!("header is not JSON: {e}"))?;
    let metadata = map.remove("__metadata__").map(serde_json::from_value).transpose();
    let metadata = metadata.map_err(|e| format!("metadata: {e}"))?.unwrap_or_default();
    let mut entries = Vec::new();
    for (name, value) in map {
        let e: Entry = serde_json::from_value(value).map_err(|e| format!("tensor {name}: {e}"))?;
        entries.push((e.data_offsets, name, e.dtype, e.shape));
    }
    entries.sort();
    let mut at = 0;
    let mut tensors = Vec::new();
    for ((start, end), name, dtype, shape) in entries {
        if start != at || end < start {
            return Err(format!("tensor {name} lies at {start}..{end}, expected to start at {at}"));
        }
        at = end;
        tensors.push(Tensor { name, dtype, shape, bytes: end - start });
    }
    Ok((Index { tensors, crcs: Vec::new() }, metadata))
}
