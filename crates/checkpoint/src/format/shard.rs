//! The header of a shard file, which is a safetensors header: its index, and more in the metadata.

use super::index::{Index, IndexError, Tensor};
use everstep_wire::limits::HEADER_BYTES_MAX;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;

/// Metadata key of a shard file: checksums of the chunks, see [`chunks_to_text`].
pub const CHUNKS_KEY: &str = "everstep.chunks";
/// Metadata key of a shard file: where its tensors belong in larger ones, see [`places_to_text`].
pub const PLACES_KEY: &str = "everstep.places";
/// Metadata key of a shard file: checksums of single values, see [`values_to_text`].
pub const VALUES_KEY: &str = "everstep.values";
/// Prefix of names that are not tensors of the user: optimizer groups, random numbers, counters.
/// Any rank can read them alone.
pub const VALUE_PREFIX: &str = "__everstep__/";
/// The tensor of a shard that records where its tensors belong. For each that is a part of a larger
/// one, as little-endian `u64`: its number in the shard, 1 for a range of the flattened tensor and
/// 0 for a block, the number of dimensions of the whole, its shape, and where the part begins (one
/// number, or one for each dimension).
pub const PLACES: &str = "__everstep__/parts";
/// Values that every step has, whatever objects are saved.
const OF_NO_OBJECT: [&str; 3] = ["extra", "layout", "parts"];

/// Returns the object of the training job (`model`, `optimizer`) whose state a tensor or value is
/// part of.
pub(crate) fn object_of(name: &str) -> Option<&str> {
    if let Some(value) = name.strip_prefix(VALUE_PREFIX) {
        return Some(value).filter(|v| !OF_NO_OBJECT.contains(v));
    }
    name.split(['.', '/']).next().filter(|object| !object.is_empty())
}

/// Regions begin at a multiple of this number of bytes, in files as in memory.
const REGION_ALIGN: usize = 4096;

impl Index {
    /// Returns the safetensors header for this region: length, and JSON padded with spaces up to a
    /// page.
    ///
    /// # Errors
    /// Fails when a name cannot be written as JSON, and when the header is longer than readers
    /// accept.
    pub fn safetensors_header(&self, metadata: &BTreeMap<String, String>) -> serde_json::Result<Vec<u8>> {
        let mut map = serde_json::Map::new();
        map.insert("__metadata__".into(), serde_json::to_value(metadata)?);
        let mut at = 0;
        for t in self.tensors().iter() {
            let entry = serde_json::json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + t.bytes]});
            map.insert(t.name.clone(), entry);
            at += t.bytes;
        }
        let mut json = serde_json::to_vec(&map)?;
        // The region begins on a page of the file, as it does in memory.
        json.resize((8 + json.len()).next_multiple_of(REGION_ALIGN) - 8, b' ');
        if json.len() as u64 > HEADER_BYTES_MAX {
            let what = format!("a header of {} bytes is over the limit of {HEADER_BYTES_MAX}", json.len());
            return Err(serde_json::Error::custom(what));
        }
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend_from_slice(&json);
        Ok(header)
    }
}

/// Returns the checksums of the chunks as text: sixteen hexadecimal digits each.
#[must_use]
pub fn chunks_to_text(crcs: &[u64]) -> String {
    use std::fmt::Write;
    crcs.iter().fold(String::with_capacity(crcs.len() * 16), |mut text, crc| {
        let _ = write!(text, "{crc:016x}");
        text
    })
}

/// Parses the text of [`chunks_to_text`]; `None` when it is not valid.
#[must_use]
pub fn chunks_from_text(text: &str) -> Option<Vec<u64>> {
    let digits = text.as_bytes().chunks(16);
    digits.map(|d| u64::from_str_radix(std::str::from_utf8(d).ok().filter(|d| d.len() == 16)?, 16).ok()).collect()
}

/// Returns the bytes of [`PLACES`] as hexadecimal numbers for a header, where a reader of all
/// shards finds them without reading the regions.
#[must_use]
pub fn places_to_text(table: &[u8]) -> String {
    let (words, _) = table.as_chunks::<8>();
    let words: Vec<String> = words.iter().map(|w| format!("{:x}", u64::from_le_bytes(*w))).collect();
    words.join(" ")
}

/// Parses the text of [`places_to_text`]; `None` when it is not valid.
#[must_use]
pub fn places_from_text(text: &str) -> Option<Vec<u64>> {
    // Digit by digit: all shards of a large job have millions of them.
    let mut table = Vec::with_capacity(text.len() / 2);
    let (mut word, mut digits) = (0u64, 0u32);
    for byte in text.bytes() {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b' ' if digits > 0 => {
                table.push(word);
                (word, digits) = (0, 0);
                continue;
            }
            _ => return None,
        };
        digits += 1;
        word = word.checked_mul(16)? | u64::from(digit);
    }
    table.push(Some(word).filter(|_| digits > 0)?);
    Some(table)
}

/// Returns the checksums (CRC-64/NVME) of single values, by where they begin in the region, as text
/// for a header: `offset:checksum`, hexadecimal.
#[must_use]
pub fn values_to_text(values: &BTreeMap<u64, u64>) -> String {
    let words: Vec<String> = values.iter().map(|(at, sum)| format!("{at:x}:{sum:x}")).collect();
    words.join(" ")
}

/// Parses the text of [`values_to_text`]. Words that are not valid are omitted.
#[must_use]
pub fn values_from_text(text: &str) -> BTreeMap<u64, u64> {
    let hex = |word: &str| u64::from_str_radix(word, 16).ok();
    let one = |word: &str| word.split_once(':').and_then(|(at, sum)| Some((hex(at)?, hex(sum)?)));
    text.split(' ').filter_map(one).collect()
}

/// The lines of a header that was parsed before. Ranks of evenly sharded state have the same lines.
#[derive(Debug, Default)]
pub struct Lines {
    text: Vec<u8>,
    /// Length of the text before the metadata.
    head: usize,
    index: Index,
}

/// Metadata of a header, by key.
pub type Metadata = BTreeMap<String, String>;

/// Why a shard's header cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The JSON does not have the structure of a header.
    #[error("not a safetensors header: {0}")]
    Json(String),
    /// There is a gap before a tensor, or it overlaps the one before.
    #[error("tensor {name} lies at {start}..{end}, expected to start at {expected}")]
    Place {
        /// name of the tensor
        name: String,
        /// offset at which it begins
        start: u64,
        /// offset at which it ends
        end: u64,
        /// offset at which the tensor before it ends
        expected: u64,
    },
    /// The tensors are not a valid index.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The header has no metadata, and so no checksums.
    #[error("header without metadata")]
    NoMetadata,
}

/// Returns the metadata of a header, and the text before and after it.
fn split_metadata(json: &[u8]) -> Option<(Metadata, [&[u8]; 2])> {
    const KEY: &[u8] = b"\"__metadata__\":{";
    let key = json.windows(KEY.len()).position(|w| w == KEY)?;
    let at = key + KEY.len() - 1;
    let mut values = serde_json::Deserializer::from_slice(json.get(at..)?).into_iter();
    let metadata = values.next()?.ok()?;
    let tail = json.get(at + values.byte_offset()..)?;
    // Strips the white space that JSON allows between values, and nothing else: a form feed is an
    // error.
    let end = tail.iter().rposition(|byte| !matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).map_or(0, |last| last + 1);
    Some((metadata, [json.get(..key)?, tail.get(..end)?]))
}

/// Parses a safetensors header's JSON into an index (without checksums) and its metadata. If the
/// lines are the same as those of the header `before`, they are compared instead of parsed.
///
/// # Errors
/// [`HeaderError`].
pub fn parse_safetensors_header(json: &[u8], before: &mut Lines) -> Result<(Index, Metadata), HeaderError> {
    let split = split_metadata(json);
    if let Some((metadata, [head, tail])) = &split
        && !before.text.is_empty()
        && before.text.strip_prefix(*head) == Some(*tail)
        && before.head == head.len()
    {
        return Ok((before.index.clone(), metadata.clone()));
    }
    let Header { metadata, mut entries } =
        serde_json::from_slice(json).map_err(|e| HeaderError::Json(e.to_string()))?;
    entries.sort();
    let mut at = 0;
    let mut tensors = Vec::with_capacity(entries.len());
    for ((start, end), name, dtype, shape) in entries {
        if start != at || end < start {
            return Err(HeaderError::Place { name, start, end, expected: at });
        }
        at = end;
        tensors.push(Tensor { name, dtype, shape, bytes: end - start });
    }
    let index = Index::new(tensors)?;
    let metadata = metadata.ok_or(HeaderError::NoMetadata)?;
    if let Some((_, text)) = split {
        *before = Lines { text: text.concat(), head: text[0].len(), index: index.clone() };
    }
    Ok((index, metadata))
}

/// A safetensors header as it is written. It is parsed without a tree of values in between: a
/// checkpoint of 256 ranks has a quarter of a million of its lines.
#[derive(Default)]
struct Header {
    metadata: Option<Metadata>,
    entries: Vec<Entry>,
}

/// (from, to), name, dtype, shape.
type Entry = ((u64, u64), String, String, Vec<u64>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Header;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header::default();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        if header.metadata.replace(map.next_value()?).is_some() {
                            return Err(A::Error::custom("metadata twice"));
                        }
                    } else {
                        let Line { dtype, shape, data_offsets } = map.next_value()?;
                        header.entries.push((data_offsets, name, dtype, shape));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn index() -> impl Strategy<Value = Index> {
        // Names on both sides of the metadata's, and names that look like it.
        let name = prop_oneof![Just("__everstep__/a".into()), Just("z\"__metadata__\":{".into()), "[a-c_]{1,3}"];
        prop::collection::btree_map(name, (0u64..3, 0u64..3), 0..4).prop_map(|names| {
            let tensor = |(name, (rows, columns))| Tensor {
                name,
                dtype: "F32".into(),
                shape: vec![rows, columns],
                bytes: rows * columns * 4,
            };
            Index::new(names.into_iter().map(tensor).collect()).unwrap()
        })
    }

    proptest! {
        #[test]
        fn headers_read_one_after_the_other_are_what_they_are_alone(
            all in prop::collection::vec((index(), prop::collection::btree_map("[a-b]", "[{}\"a]{0,3}", 0..3)), 1..5),
        ) {
            let mut lines = Lines::default();
            for (index, metadata) in all.iter().flat_map(|x| [x, x]) {
                let header = index.safetensors_header(metadata).unwrap();
                let found = parse_safetensors_header(&header[8..], &mut lines);
                prop_assert_eq!(&found, &parse_safetensors_header(&header[8..], &mut Lines::default()));
                let (seen, said) = found.unwrap();
                let by_name = |i: &Index| i.offsets().into_iter().map(|(n, (at, t))| (n.to_owned(), (at, t.clone()))).collect::<Vec<_>>();
                // Empty tensors at the same place may change order.
                prop_assert_eq!(by_name(&seen), by_name(index));
                prop_assert_eq!(&said, metadata);
            }
        }
    }
}
