//! The side index of a shard: where each tensor lies in the region of contiguous bytes. Every index
//! is checked, whatever it was read from: names are unique, lengths are those of type and shape,
//! and their sum is within the limit.

use super::digest::CHUNK_BYTES;
use super::dtype::tensor_bytes;
use everstep_wire::limits::{REGION_BYTES_MAX, TENSOR_DIMENSIONS_MAX};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// One tensor of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Fully qualified name, unique in the shard.
    pub name: String,
    /// safetensors name of the element type (`F32`, `BF16`, `U8`, …).
    pub dtype: String,
    /// Shape; empty for a scalar.
    pub shape: Vec<u64>,
    /// Length in bytes, which follows from type and shape.
    pub bytes: u64,
}

/// Why a list of tensors cannot be the index of a shard.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IndexError {
    /// Two tensors have the same name.
    #[error("two tensors are named {0}")]
    Twice(String),
    /// A name that means something else in a header.
    #[error("a tensor is named __metadata__")]
    Reserved,
    /// A length that does not follow from type and shape.
    #[error("tensor {name} has {bytes} bytes, which are not {dtype} {shape:?}")]
    Length {
        /// name of the tensor
        name: String,
        /// its type, as given
        dtype: String,
        /// its shape, as given
        shape: Vec<u64>,
        /// its length, as given
        bytes: u64,
    },
    /// The tensors are longer than any region may be.
    #[error("its tensors are longer than any shard may be")]
    TooLong,
    /// There is not exactly one checksum for each chunk.
    #[error("{found} checksums for {chunks} chunks")]
    Checksums {
        /// number of checksums
        found: usize,
        /// number of chunks
        chunks: usize,
    },
}

impl Tensor {
    fn check(&self) -> Result<(), IndexError> {
        let length = Some(self.shape.len()).filter(|n| *n <= TENSOR_DIMENSIONS_MAX);
        let length = length.and_then(|_| tensor_bytes(&self.dtype, &self.shape));
        // The figure `crafted-checkpoints` builds a reader without this check, which its sanitizer
        // must catch.
        if length == Some(self.bytes) || cfg!(everstep_unchecked_lengths) {
            return Ok(());
        }
        let Tensor { name, dtype, shape, bytes } = self.clone();
        Err(IndexError::Length { name, dtype, shape, bytes })
    }
}

/// All tensors of a shard in the order of their bytes, without gaps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Index {
    /// Shared by shards with the same tensors.
    tensors: Arc<[Tensor]>,
    /// CRC-64/NVME of each [`CHUNK_BYTES`] of the region; empty before the region is complete.
    crcs: Vec<u64>,
    #[serde(skip_serializing)]
    bytes: u64,
}

/// An index as it was read.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    tensors: Vec<Tensor>,
    crcs: Vec<u64>,
}

impl TryFrom<Unchecked> for Index {
    type Error = IndexError;

    fn try_from(read: Unchecked) -> Result<Self, IndexError> {
        Index::new(read.tensors)?.with_checksums(read.crcs)
    }
}

impl Index {
    /// Creates an index of these tensors, which lie one behind the other; without checksums yet.
    ///
    /// # Errors
    /// [`IndexError`] if a tensor is not valid, or the tensors are too long.
    pub fn new(tensors: Vec<Tensor>) -> Result<Self, IndexError> {
        let mut names = HashSet::with_capacity(tensors.len());
        let mut bytes = 0u64;
        for tensor in &tensors {
            tensor.check()?;
            if tensor.name == "__metadata__" {
                return Err(IndexError::Reserved);
            }
            if !names.insert(tensor.name.as_str()) {
                return Err(IndexError::Twice(tensor.name.clone()));
            }
            bytes = bytes.checked_add(tensor.bytes).ok_or(IndexError::TooLong)?;
        }
        if bytes > REGION_BYTES_MAX {
            return Err(IndexError::TooLong);
        }
        Ok(Index { tensors: tensors.into(), crcs: Vec::new(), bytes })
    }

    /// Adds the checksums of the chunks.
    ///
    /// # Errors
    /// Fails when there is not one for each chunk.
    pub fn with_checksums(mut self, crcs: Vec<u64>) -> Result<Self, IndexError> {
        let (found, chunks) = (crcs.len(), self.chunks());
        if found != chunks {
            return Err(IndexError::Checksums { found, chunks });
        }
        self.crcs = crcs;
        Ok(self)
    }

    /// Returns the tensors in the order of their bytes.
    #[must_use]
    pub fn tensors(&self) -> &Arc<[Tensor]> {
        &self.tensors
    }

    /// Returns the checksums of the chunks.
    #[must_use]
    pub fn crcs(&self) -> &[u64] {
        &self.crcs
    }

    /// Returns the length of the region in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of chunks of the region.
    #[must_use]
    pub fn chunks(&self) -> usize {
        usize::try_from(self.bytes.div_ceil(CHUNK_BYTES as u64)).unwrap_or(usize::MAX)
    }

    /// Returns the tensors by name, each with its offset in the region in bytes.
    #[must_use]
    pub fn offsets(&self) -> BTreeMap<&str, (u64, &Tensor)> {
        let mut at = 0;
        let place = |t: &'_ Tensor| {
            let here = at;
            at += t.bytes;
            here
        };
        let begins: Vec<u64> = self.tensors.iter().map(place).collect();
        self.tensors.iter().zip(begins).map(|(t, at)| (t.name.as_str(), (at, t))).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn tensor(name: &str, dtype: &str, shape: &[u64], bytes: u64) -> Tensor {
        Tensor { name: name.into(), dtype: dtype.into(), shape: shape.into(), bytes }
    }

    #[test]
    fn tensors_that_contradict_themselves_are_no_index() {
        assert!(Index::new(vec![tensor("a", "F32", &[2, 2], 16), tensor("b", "U8", &[], 1)]).is_ok());
        for bad in [
            tensor("a", "F32", &[2, 2], 17),
            tensor("a", "F32", &[2, 2], 15),
            tensor("a", "F32", &[2, 2], 0),
            tensor("a", "F32", &[u64::MAX, u64::MAX], 4),
            tensor("a", "NONE", &[4], 4),
            tensor("a", "U8", &[1; TENSOR_DIMENSIONS_MAX + 1], 1),
        ] {
            assert!(matches!(Index::new(vec![bad.clone()]), Err(IndexError::Length { .. })), "{bad:?}");
        }
        let twice = Index::new(vec![tensor("a", "U8", &[1], 1), tensor("a", "U8", &[1], 1)]);
        assert_eq!(twice, Err(IndexError::Twice("a".into())));
        let half = 1 << 62;
        let long = Index::new(vec![tensor("a", "U8", &[half], half), tensor("b", "U8", &[half], half)]);
        assert!(long.is_err(), "longer than any region");
    }

    #[test]
    fn what_is_read_was_checked() {
        let good = r#"{"tensors":[{"name":"a","dtype":"F32","shape":[2],"bytes":8}],"crcs":[7]}"#;
        let index: Index = serde_json::from_str(good).unwrap();
        assert_eq!(serde_json::to_string(&index).unwrap(), good);
        for bad in [good.replace("8}", "9}"), good.replace("[7]", "[]"), good.replace("[7]", "[7,7]")] {
            assert!(serde_json::from_str::<Index>(&bad).is_err(), "{bad}");
        }
    }
}
