//! Manifests, headers of shard files, and side indexes.

use crate::Seeds;
use everstep_checkpoint::format::index::{Index, Tensor};
use everstep_checkpoint::format::manifest::{Manifest, VERSION};
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::format::shard::{
    CHUNKS_KEY, PLACES_KEY, VALUES_KEY, chunks_to_text, places_to_text, values_to_text,
};
use everstep_checkpoint::lineage::{Fork, Lineage};
use everstep_core::id::{Rank, RunId};
use everstep_core::message::{Purpose, ShardFile};
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;

/// Returns manifests, whole and without their checksum.
pub fn manifests() -> serde_json::Result<Seeds> {
    let shard = |rank: u32, purpose| ShardFile {
        rank: Rank(rank),
        file: format!("rank-{rank}.safetensors"),
        bytes: 8192,
        crc: format!("{:016x}", 0x1234_5678_9abc_def0_u64 + u64::from(rank)),
        purpose,
        objects: BTreeSet::new(),
    };
    let old = Manifest {
        version: VERSION,
        step: 100,
        world_size: 1,
        saved_at: 0,
        writer: None,
        lineage: None,
        shards: vec![shard(0, Purpose::Recovery)],
    };
    let forks = vec![Fork { branch: 2, step: 60, asked: true }, Fork { branch: 0, step: 20, asked: false }];
    let new = Manifest {
        world_size: 2,
        saved_at: 1_700_000_000,
        writer: Some(Mark { run: RunId(7), epoch: 1, generation: 3, attempt: 2 }),
        lineage: Some(Lineage { branch: 3, turn: 4, forks }),
        shards: vec![shard(0, Purpose::User), shard(1, Purpose::Epoch)],
        ..old.clone()
    };
    let other = Manifest { version: VERSION + 1, ..old.clone() };
    Ok(vec![
        ("whole-old", old.to_bytes()?),
        ("whole", new.to_bytes()?),
        ("other-version", other.to_bytes()?),
        ("inner-old", serde_json::to_vec(&old)?),
        ("inner", serde_json::to_vec(&new)?),
    ])
}

fn tensor(name: &str, dtype: &str, shape: &[u64], bytes: u64) -> Tensor {
    Tensor { name: name.into(), dtype: dtype.into(), shape: shape.into(), bytes }
}

/// Returns the JSON of headers and of an index.
pub fn headers() -> Result<Seeds, Box<dyn Error>> {
    let tensors = vec![
        tensor("weight", "F32", &[2, 3], 24),
        tensor("bias", "BF16", &[3], 6),
        tensor("empty", "I64", &[0, 5], 0),
        tensor("__everstep__/step", "U8", &[2], 2),
    ];
    let index = Index::new(tensors)?.with_checksums(vec![7])?;
    // The first tensor is a block of one of shape [4, 3], the second a range of one of shape [9].
    let places: Vec<u8> = [0u64, 0, 2, 4, 3, 2, 0, 1, 1, 1, 9, 6].iter().flat_map(|n| n.to_le_bytes()).collect();
    let metadata = BTreeMap::from([
        (CHUNKS_KEY.to_owned(), chunks_to_text(index.crcs())),
        (PLACES_KEY.to_owned(), places_to_text(&places)),
        (VALUES_KEY.to_owned(), values_to_text(&BTreeMap::from([(30, 0xabc)]))),
    ]);
    let header = json(&index, &metadata)?;
    let bare = json(&index, &BTreeMap::new())?;
    let other = json(&Index::new(vec![tensor("other", "C128", &[], 16)])?, &metadata)?;
    Ok(vec![
        ("header", header.clone()),
        ("bare", bare.clone()),
        ("alike", [header.as_slice(), &bare, &header].join(&0xff)),
        ("unlike", [header.as_slice(), &other].join(&0xff)),
        ("index", serde_json::to_vec(&index)?),
    ])
}

/// Returns the JSON of a header without the spaces behind it.
fn json(index: &Index, metadata: &BTreeMap<String, String>) -> serde_json::Result<Vec<u8>> {
    let header = index.safetensors_header(metadata)?;
    Ok(header.get(8..).unwrap_or_default().trim_ascii_end().to_vec())
}
