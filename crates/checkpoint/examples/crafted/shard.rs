//! A checkpoint taken apart: whatever is changed in it, its checksums are made right again.

use crate::random::Random;
use everstep_checkpoint::format::digest::{CHUNK_BYTES, combine_chunks, crc};
use everstep_checkpoint::format::manifest::Manifest;
use everstep_checkpoint::format::shard::{
    CHUNKS_KEY, PLACES_KEY, VALUE_PREFIX, VALUES_KEY, chunks_from_text, chunks_to_text,
};
use serde_json::{Value, json};

/// A line of a header, or a tensor of an index.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub from: u64,
    pub to: u64,
}

/// One rank's shard.
#[derive(Clone)]
pub struct Shard {
    pub rank: u32,
    pub lines: Vec<Line>,
    pub region: Vec<u8>,
    pub metadata: Vec<(String, Value)>,
    /// In place of the right checksums of chunks.
    pub chunks: Option<String>,
    /// In place of the right length of the header.
    pub length: Option<u64>,
    /// Done to the header's text.
    pub text: Option<fn(&mut Random, &mut Vec<u8>)>,
    /// Done to its line of the manifest.
    pub entry: Option<fn(&mut Random, &mut Value)>,
}

/// A checkpoint of some ranks.
#[derive(Clone)]
pub struct Checkpoint {
    pub shards: Vec<Shard>,
    /// Done to the manifest.
    pub manifest: Option<fn(&mut Random, &mut Value)>,
}

/// Bytes of an element: written down here once more, so that the reader is not compared with
/// itself.
pub fn element(dtype: &str) -> Option<u128> {
    const ALL: [(&[&str], u128); 5] = [
        (&["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 1),
        (&["I16", "U16", "F16", "BF16"], 2),
        (&["I32", "U32", "F32"], 4),
        (&["I64", "U64", "F64", "C64"], 8),
        (&["C128"], 16),
    ];
    ALL.iter().find(|(names, _)| names.contains(&dtype)).map(|(_, bytes)| *bytes)
}

impl Line {
    /// Bytes that a tensor of this type and shape has in the memory of a model; `None` when there
    /// is no such tensor.
    pub fn room(&self) -> Option<usize> {
        let elements = self.shape.iter().try_fold(1u128, |n, size| n.checked_mul(u128::from(*size)))?;
        usize::try_from(elements.checked_mul(element(&self.dtype)?)?).ok()
    }
}

/// Bytes that differ from place to place and from tensor to tensor.
pub fn content(name: &str, bytes: usize) -> impl Iterator<Item = u8> {
    let start = crc(name.as_bytes());
    (0..bytes as u64).map(move |i| (i.wrapping_mul(0x9e37_79b9).wrapping_add(start) >> 7) as u8)
}

impl Checkpoint {
    /// Two ranks: a matrix in rows, ranges of a flattened tensor, what both have, values. `large`:
    /// of more than one chunk.
    pub fn valid(large: bool) -> Self {
        let rows = if large { 4200 } else { 6 };
        let shards = (0..2u32).map(|rank| {
            let mut shard = Shard {
                rank,
                lines: Vec::new(),
                region: Vec::new(),
                metadata: Vec::new(),
                chunks: None,
                length: None,
                text: None,
                entry: None,
            };
            for (name, dtype, shape) in [
                ("model.weight", "F32", vec![rows, 32]),
                ("optimizer/state/model.weight/exp_avg", "F32", vec![rows, 32]),
                ("model.flat", "BF16", vec![48]),
                ("model.bias", "F64", vec![32]),
                ("model.flag", "BOOL", vec![]),
                ("model.empty", "I64", vec![0, 5]),
            ] {
                shard.push(name, dtype, shape);
            }
            for (name, bytes) in [("optimizer", 220), ("rng", 90), ("extra", 12), ("layout", 40)] {
                shard.push(&format!("{VALUE_PREFIX}{name}"), "U8", vec![bytes]);
            }
            let words =
                |r: u64| [0, 0, 2, rows * 2, 32, r * rows, 0, 1, 0, 2, rows * 2, 32, r * rows, 0, 2, 1, 1, 96, r * 48];
            let words: Vec<String> = words(u64::from(rank)).iter().map(|w| format!("{w:x}")).collect();
            let values: Vec<String> = shard.values().iter().map(|(at, sum)| format!("{at:x}:{sum:x}")).collect();
            shard.metadata = vec![
                ("step".into(), json!("7")),
                ("rank".into(), json!(rank.to_string())),
                ("world_size".into(), json!("2")),
                (PLACES_KEY.into(), json!(words.join(" "))),
                (VALUES_KEY.into(), json!(values.join(" "))),
            ];
            shard
        });
        Checkpoint { shards: shards.collect(), manifest: None }
    }

    /// The manifest's file for shard files of these lengths and checksums.
    pub fn manifest(&self, random: &mut Random, files: &[Vec<u8>]) -> Vec<u8> {
        let mut entries = Vec::new();
        for (shard, file) in self.shards.iter().zip(files) {
            let name = format!("rank-{}.safetensors", shard.rank);
            let sum = format!("{:016x}", shard.sum(file));
            let mut entry = json!({"rank": shard.rank, "file": name, "bytes": file.len(), "crc": sum});
            if let Some(change) = shard.entry {
                change(random, &mut entry);
            }
            entries.push(entry);
        }
        let mut manifest = json!({"version": 1, "step": 7, "world_size": self.shards.len(), "saved_at": 1_700_000_000,
            "writer": {"run": "00000000000000000000000000000001", "epoch": 1, "generation": 1, "attempt": 0},
            "lineage": {"branch": 1, "turn": 1}, "shards": entries});
        if let Some(change) = self.manifest {
            change(random, &mut manifest);
        }
        // The reader's checksum is of what it has understood.
        let understood = serde_json::from_value::<Manifest>(manifest.clone()).ok();
        let text = understood.and_then(|m| serde_json::to_vec(&m).ok()).unwrap_or_default();
        serde_json::to_vec(&json!({"manifest": manifest, "crc": format!("{:016x}", crc(&text))})).unwrap_or_default()
    }
}

impl Shard {
    fn push(&mut self, name: &str, dtype: &str, shape: Vec<u64>) {
        let from = self.region.len() as u64;
        let mut line = Line { name: name.into(), dtype: dtype.into(), shape, from, to: from };
        let bytes = line.room().unwrap_or(0);
        line.to += bytes as u64;
        self.region.extend(content(&format!("{name} of {}", self.rank), bytes));
        self.lines.push(line);
    }

    /// Checksums of values, by where they begin.
    pub fn values(&self) -> Vec<(u64, u64)> {
        let blob = |l: &&Line| l.name.starts_with(VALUE_PREFIX);
        let one = |l: &Line| Some((l.from, crc(self.region.get(l.from as usize..l.to as usize)?)));
        self.lines.iter().filter(blob).filter_map(one).collect()
    }

    /// Right checksums of the chunks.
    pub fn crcs(&self) -> Vec<u64> {
        self.region.chunks(CHUNK_BYTES).map(crc).collect()
    }

    /// What a reader that believes the checksums of chunks takes for the checksum of the file.
    fn sum(&self, file: &[u8]) -> u64 {
        let said = self.chunks.as_deref().and_then(chunks_from_text).filter(|c| c.len() == self.crcs().len());
        match (said, file.len().checked_sub(self.region.len()).and_then(|n| file.get(..n))) {
            (Some(said), Some(header)) => combine_chunks(crc(header), &said, self.region.len() as u64),
            _ => crc(file),
        }
    }

    /// Everything follows the one before again.
    pub fn close_up(&mut self) {
        let mut at = 0u64;
        for line in &mut self.lines {
            let bytes = line.to.saturating_sub(line.from);
            (line.from, line.to) = (at, at.saturating_add(bytes));
            at = line.to;
        }
    }

    /// The file.
    pub fn file(&self, random: &mut Random) -> Vec<u8> {
        let mut lines = Vec::new();
        let chunks = self.chunks.clone().unwrap_or_else(|| chunks_to_text(&self.crcs()));
        let mut metadata: Vec<String> = vec![format!("{:?}:{}", CHUNKS_KEY, json!(chunks))];
        metadata.extend(self.metadata.iter().map(|(k, v)| format!("{}:{v}", json!(k))));
        lines.push(format!("\"__metadata__\":{{{}}}", metadata.join(",")));
        for Line { name, dtype, shape, from, to } in &self.lines {
            lines.push(format!(
                "{}:{{\"dtype\":{},\"shape\":{},\"data_offsets\":[{from},{to}]}}",
                json!(name),
                json!(dtype),
                json!(shape)
            ));
        }
        let mut text = format!("{{{}}}", lines.join(",")).into_bytes();
        if let Some(change) = self.text {
            change(random, &mut text);
        }
        text.resize((8 + text.len()).next_multiple_of(4096) - 8, b' ');
        let length = self.length.unwrap_or(text.len() as u64);
        let mut file = length.to_le_bytes().to_vec();
        file.extend_from_slice(&text);
        file.extend_from_slice(&self.region);
        file
    }
}
