//! Limits of readers on the length of names and shapes. They are checked before anything is
//! captured, so that every published checkpoint can be read.

use super::digest::CHUNK_BYTES;
use super::index::Tensor;
use super::shard::{PLACES, VALUE_PREFIX};
use everstep_wire::limits::{HEADER_BYTES_MAX, INDEX_BYTES_MAX};

/// Bytes that a line of a header has more than one of an index: offsets, of which the region's
/// limit allows fourteen digits each.
const LINE_BYTES: u64 = 40;
/// Bytes for step, rank, world size and the padding to a page.
const REST_BYTES: u64 = 8192;
/// Maximum number of characters of a name in an error message.
const SHOWN: usize = 120;

/// Lengths in the header of a shard, in addition to the lines of its index.
#[derive(Clone, Debug, Default)]
pub struct Header {
    tensors: u64,
    values: u64,
    places: u64,
    longest: String,
}

impl Header {
    /// Counts one more tensor.
    pub fn add(&mut self, tensor: &Tensor) {
        self.tensors += 1;
        if tensor.name == PLACES {
            self.places = tensor.bytes / 8 * 17;
        }
        if tensor.name.starts_with(VALUE_PREFIX) {
            self.values += 1;
        } else if tensor.name.len() > self.longest.len() {
            self.longest.clone_from(&tensor.name);
        }
    }

    /// Checks that readers accept the header of these tensors. `json` is the length of their index
    /// without checksums, `region` that of their bytes.
    ///
    /// # Errors
    /// [`HeaderTooLong`].
    pub fn check(&self, json: u64, region: u64) -> Result<(), HeaderTooLong> {
        let chunks = region.div_ceil(CHUNK_BYTES as u64);
        let lines = json + LINE_BYTES * self.tensors;
        let header = lines + 16 * chunks + 36 * self.values + self.places + REST_BYTES;
        if header <= HEADER_BYTES_MAX && json + 21 * chunks <= INDEX_BYTES_MAX {
            return Ok(());
        }
        Err(HeaderTooLong { tensors: self.tensors, bytes: header, longest: shown(&self.longest) })
    }
}

/// A state whose shard no reader would accept.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "names and shapes of the {tensors} tensors of the state take {bytes} bytes, more than the {HEADER_BYTES_MAX} that a shard's \
     header may have; use shorter keys, or fewer and larger tensors (the longest name is {longest})"
)]
pub struct HeaderTooLong {
    tensors: u64,
    /// Length of the header in bytes.
    bytes: u64,
    /// The longest name, or its beginning.
    longest: String,
}

/// Returns a name, or the beginning of a long one with its length.
fn shown(name: &str) -> String {
    match name.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}… ({} bytes)", name.get(..end).unwrap_or_default(), name.len()),
        None => name.to_owned(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::format::index::Index;
    use std::collections::BTreeMap;

    fn header(index: &Index) -> Header {
        let mut header = Header::default();
        index.tensors().iter().for_each(|t| header.add(t));
        header
    }

    fn index(names: impl Iterator<Item = String>) -> Index {
        let tensor = |name| Tensor { name, dtype: "F32".into(), shape: vec![1, 2], bytes: 8 };
        Index::new(names.map(tensor).collect()).unwrap()
    }

    #[test]
    fn the_bound_is_never_below_the_header_that_is_written() {
        for (count, length) in [(1, 1), (1000, 3), (20, 5000)] {
            let index = index((0..count).map(|n| format!("{n}\n\"é{}", "x".repeat(length))));
            let written = index.safetensors_header(&BTreeMap::new()).unwrap().len() as u64;
            let json = serde_json::to_vec(index.tensors()).unwrap().len() as u64;
            let header = header(&index);
            assert!(json + LINE_BYTES * header.tensors + REST_BYTES >= written, "{count} {length}");
            assert_eq!(header.check(json, index.bytes()), Ok(()));
        }
    }

    #[test]
    fn a_header_that_no_reader_takes_is_refused() {
        let long = header(&index(std::iter::once("k".repeat(500)))).check(HEADER_BYTES_MAX, 8).unwrap_err();
        assert!(long.to_string().contains("kkk… (500 bytes)"), "{long}");
    }
}
