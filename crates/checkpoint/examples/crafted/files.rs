//! Reads a checkpoint through the real reader, into memory of exactly the tensors' size, and
//! compares with what its files say.

use crate::random::Random;
use crate::shard::{Checkpoint, Line, element};
use everstep_checkpoint::format::shard::{PLACES_KEY, VALUE_PREFIX};
use everstep_checkpoint::persist::read_manifest;
use everstep_checkpoint::reshard::part::Part;
use everstep_checkpoint::reshard::whole::{Wanted, Whole};
use everstep_checkpoint::restore::Shard;
use std::collections::BTreeMap;
use std::path::Path;

/// What came of an input.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Everything was read, and is what the files say.
    Accepted,
    /// Refused at this stage.
    Refused(&'static str),
    /// Accepted, and not what the files say.
    Wrong(String),
}

/// Memory of a model is never larger here; a reader that asks for more has believed something.
pub const MODEL_BYTES_MAX: usize = 1 << 28;

/// A shard's file as it is, read without the reader.
struct Plain<'a> {
    lines: Vec<Line>,
    region: &'a [u8],
    places: Vec<Vec<u64>>,
}

impl<'a> Plain<'a> {
    fn of(file: &'a [u8]) -> Option<Self> {
        let (length, rest) = file.split_first_chunk::<8>()?;
        let (json, region) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        let serde_json::Value::Object(mut header) = serde_json::from_slice(json).ok()? else { return None };
        let metadata = header.remove("__metadata__")?;
        let numbers =
            |v: &serde_json::Value| v.as_array()?.iter().map(serde_json::Value::as_u64).collect::<Option<Vec<u64>>>();
        let mut lines = Vec::new();
        for (name, line) in &header {
            let offsets = numbers(line.get("data_offsets")?)?;
            let (name, dtype) = (name.clone(), line.get("dtype")?.as_str()?.to_owned());
            lines.push(Line {
                name,
                dtype,
                shape: numbers(line.get("shape")?)?,
                from: *offsets.first()?,
                to: *offsets.get(1)?,
            });
        }
        lines.sort_by(|a, b| (a.from, a.to, &a.name).cmp(&(b.from, b.to, &b.name)));
        let words = metadata.get(PLACES_KEY).and_then(|t| t.as_str()).unwrap_or("");
        let words: Vec<u64> = words.split(' ').filter_map(|w| u64::from_str_radix(w, 16).ok()).collect();
        let mut places = vec![Vec::new(); lines.len()];
        let mut left = words.as_slice();
        while let [number, flat, dimensions, ..] = left {
            let length = 3 + *dimensions as usize + if *flat == 1 { 1 } else { *dimensions as usize };
            *places.get_mut(*number as usize)? = left.get(..length)?.to_vec();
            left = left.get(length..)?;
        }
        Some(Plain { lines, region, places })
    }

    fn bytes(&self, line: &Line) -> &'a [u8] {
        self.region.get(line.from as usize..line.to as usize).unwrap_or_default()
    }

    /// Why a reader must not accept it.
    fn fault(&self) -> Option<String> {
        let mut at = 0;
        for line in &self.lines {
            if line.from != at || line.to < line.from || line.room() != usize::try_from(line.to - line.from).ok() {
                return Some(format!("{line:?} was accepted, the one before ends at {at}"));
            }
            at = line.to;
        }
        (at != self.region.len() as u64).then(|| format!("tensors end at {at}, the region at {}", self.region.len()))
    }
}

/// Memory of exactly this size, with nothing of the checkpoint in it.
fn memory(bytes: usize) -> Box<[u8]> {
    vec![0xa5; bytes].into_boxed_slice()
}

/// Writes an input and reads it.
pub fn through(directory: &Path, random: &mut Random, model: &Checkpoint, crafted: &Checkpoint) -> Outcome {
    let files: Vec<Vec<u8>> = crafted.shards.iter().map(|s| s.file(random)).collect();
    for (shard, file) in crafted.shards.iter().zip(&files) {
        let written = std::fs::write(directory.join(format!("rank-{}.safetensors", shard.rank)), file);
        written.unwrap_or_else(|e| panic!("cannot write: {e}"));
    }
    let sealed = crafted.manifest(random, &files);
    std::fs::write(directory.join("manifest.json"), sealed).unwrap_or_else(|e| panic!("cannot write: {e}"));
    let Ok(manifest) = read_manifest(directory) else { return Outcome::Refused("manifest") };
    let mut plain = Vec::new();
    for entry in &manifest.shards {
        let Ok(shard) = Shard::from_file(directory, entry) else { return Outcome::Refused("header") };
        let number = crafted.shards.iter().position(|s| entry.file == format!("rank-{}.safetensors", s.rank));
        let Some(file) = number.and_then(|n| files.get(n)) else {
            return Outcome::Wrong(format!("{} was read", entry.file));
        };
        let Some(own) = Plain::of(file) else { return Outcome::Wrong("a header that is none was accepted".into()) };
        if entry.bytes != file.len() as u64 {
            return Outcome::Wrong("the manifest says something else of the file".into());
        }
        let memory = model.shards.get(number.unwrap_or(0)).map(|s| s.lines.as_slice()).unwrap_or_default();
        match alone(&shard, &own, memory) {
            Outcome::Accepted => plain.push((entry.rank.0, own)),
            other => return other,
        }
    }
    plain.sort_by_key(|(rank, _)| *rank);
    let plain: Vec<Plain> = plain.into_iter().map(|(_, own)| own).collect();
    together(directory, random, &plain)
}

/// One shard: what it says it has, and what a model wants of it.
fn alone(shard: &Shard, plain: &Plain, model: &[Line]) -> Outcome {
    let by_name: BTreeMap<&str, &Line> = plain.lines.iter().map(|l| (l.name.as_str(), l)).collect();
    let found = shard.index().tensors().iter().map(|t| (t.name.as_str(), t.dtype.as_str(), t.shape.as_slice()));
    let (mut wanted, mut expected) = (Vec::new(), Vec::new());
    for (name, dtype, shape) in found {
        let Some(line) = by_name.get(name) else { return Outcome::Wrong(format!("{name} is not in the file")) };
        let said = Line { dtype: dtype.into(), shape: shape.into(), ..(*line).clone() };
        // What a model of the checkpoint's own shapes has; torch refuses what it cannot have.
        let Some(room) = said.room().filter(|n| *n <= MODEL_BYTES_MAX) else { return Outcome::Refused("memory") };
        wanted.push((name.to_owned(), memory(room)));
        expected.push(plain.bytes(line));
    }
    match filled(shard, wanted, &expected) {
        Outcome::Accepted => {}
        other => return other,
    }
    if let Some(fault) =
        plain.fault().or_else(|| (by_name.len() != shard.index().tensors().len()).then(|| "a tensor twice".into()))
    {
        return Outcome::Wrong(fault);
    }
    // A model with other memory than the checkpoint says.
    let asked = model.iter().filter(|l| by_name.contains_key(l.name.as_str()));
    let wanted = asked.clone().map(|l| (l.name.clone(), memory(l.room().unwrap_or(0)))).collect();
    let expected: Vec<&[u8]> = asked.filter_map(|l| Some(plain.bytes(by_name.get(l.name.as_str())?))).collect();
    match filled(shard, wanted, &expected) {
        Outcome::Accepted => {}
        other => return other,
    }
    for line in plain.lines.iter().filter(|l| l.name.starts_with(VALUE_PREFIX)) {
        match shard.fetch(line.from, line.to - line.from) {
            Ok(bytes) if bytes == plain.bytes(line) => {}
            Ok(_) => return Outcome::Wrong(format!("the value {}", line.name)),
            Err(_) => return Outcome::Refused("value"),
        }
    }
    Outcome::Accepted
}

/// Copies tensors to memory; what is there then must be what was expected.
pub fn filled(shard: &Shard, mut wanted: Vec<(String, Box<[u8]>)>, expected: &[&[u8]]) -> Outcome {
    let places: Vec<(String, usize, usize)> =
        wanted.iter_mut().map(|(n, m)| (n.clone(), m.as_mut_ptr() as usize, m.len())).collect();
    let Ok(targets) = shard.targets(&places) else { return Outcome::Refused("target") };
    // SAFETY: the memory lives until after the copy and nobody else uses it; that the reader keeps
    // to it is what is tested.
    if unsafe { shard.load(&targets, 1, true) }.is_err() {
        return Outcome::Refused("chunk");
    }
    for ((name, got), expected) in wanted.iter().zip(expected) {
        if got.as_ref() != *expected {
            return Outcome::Wrong(name.clone());
        }
    }
    Outcome::Accepted
}

/// All shards as one: each tensor whole, and a part of it.
fn together(directory: &Path, random: &mut Random, plain: &[Plain]) -> Outcome {
    let Ok(whole) = Whole::open(directory) else { return Outcome::Refused("whole") };
    let mut names: Vec<&String> = whole.tensors().keys().filter(|n| !n.starts_with(VALUE_PREFIX)).collect();
    names.sort();
    for name in names {
        let tensor = &whole.tensors()[name];
        let line = |shape: &[u64]| Line {
            name: name.clone(),
            dtype: tensor.dtype.clone(),
            shape: shape.into(),
            from: 0,
            to: 0,
        };
        let part = Part::whole(&tensor.shape);
        let want = |part: &Part, memory: &mut [u8]| {
            vec![Wanted {
                name: name.clone(),
                part: part.clone(),
                address: memory.as_mut_ptr() as usize,
                bytes: memory.len() as u64,
            }]
        };
        // Room only for what is there.
        if whole.plan(&want(&part, &mut [])).is_err() {
            return Outcome::Refused("plan");
        }
        let Some(room) = line(&tensor.shape).room().filter(|n| *n <= MODEL_BYTES_MAX) else {
            return Outcome::Refused("memory");
        };
        let mut all = memory(room);
        // SAFETY: as in `filled`.
        if unsafe { whole.read(&want(&part, &mut all), 1, 1 << 20) }.is_err() {
            return Outcome::Refused("part");
        }
        if !is_of(plain, &line(&tensor.shape), &all) {
            return Outcome::Wrong(format!("{name} as a whole"));
        }
        let offsets: Vec<u64> = tensor.shape.iter().map(|n| random.next() % n.max(&1)).collect();
        let sizes: Vec<u64> = tensor
            .shape
            .iter()
            .zip(&offsets)
            .map(|(n, o)| random.next() % (n - o).max(1) + u64::from(*n > *o))
            .collect();
        let sizes: Vec<u64> =
            sizes.iter().zip(tensor.shape.iter().zip(&offsets)).map(|(s, (n, o))| *s.min(&(n - o))).collect();
        let mut some = memory(line(&sizes).room().unwrap_or(0));
        let part = Part::Block { offsets: offsets.as_slice().into(), sizes: sizes.as_slice().into() };
        // SAFETY: as in `filled`.
        if unsafe { whole.read(&want(&part, &mut some), 1, 1 << 20) }.is_err() {
            return Outcome::Wrong(format!("{name}: a part of what is there was refused"));
        }
        let element = element(&tensor.dtype).unwrap_or(1) as usize;
        let same = blocks(&tensor.shape, &offsets, &sizes).zip(some.chunks(element));
        if !same
            .into_iter()
            .all(|(at, value)| all.get(at as usize * element..(at as usize + 1) * element) == Some(value))
        {
            return Outcome::Wrong(format!("{name}: {offsets:?} {sizes:?}"));
        }
    }
    Outcome::Accepted
}

/// Numbers of a block's elements in the flattened tensor, one after the other.
fn blocks(shape: &[u64], offsets: &[u64], sizes: &[u64]) -> impl Iterator<Item = u64> {
    let count: u64 = sizes.iter().product();
    let (shape, offsets, sizes) = (shape.to_vec(), offsets.to_vec(), sizes.to_vec());
    (0..count).map(move |mut n| {
        let (mut at, mut stride) = (0, 1);
        for ((all, from), size) in shape.iter().zip(&offsets).zip(&sizes).rev() {
            at += (from + n % size) * stride;
            (n, stride) = (n / size, stride * all);
        }
        at
    })
}

/// Each element is what one of the shards holds at its place.
fn is_of(plain: &[Plain], whole: &Line, bytes: &[u8]) -> bool {
    let element = element(&whole.dtype).unwrap_or(1) as usize;
    let mut right = vec![false; bytes.len() / element];
    for own in plain {
        for (line, place) in
            own.lines.iter().zip(&own.places).filter(|(l, _)| l.name == whole.name && l.dtype == whole.dtype)
        {
            let at: Box<dyn Iterator<Item = u64>> = match place.as_slice() {
                [] if line.shape == whole.shape => Box::new(0..line.shape.iter().product()),
                [_, 1, _, rest @ ..] => {
                    let first = rest.last().copied().unwrap_or(0);
                    Box::new(first..first + line.shape.iter().product::<u64>())
                }
                [_, _, _, rest @ ..] => Box::new(blocks(&whole.shape, &rest[rest.len() / 2..], &line.shape)),
                _ => continue,
            };
            for (at, value) in at.zip(own.bytes(line).chunks(element)) {
                let at = at as usize;
                if bytes.get(at * element..(at + 1) * element) == Some(value) {
                    right[at] = true;
                }
            }
        }
    }
    right.into_iter().all(|r| r)
}
