//! Whether ranks that have the same elements of a tensor have the same values. Ranks that each have
//! a model of their own use the same names, too.

use super::plan::Run;
use super::whole::{Whole, WholeError};
use crate::format::digest::CHUNK_BYTES;
use crate::restore::{Readers, Shard, Target};
use std::collections::BTreeMap;

/// Number of bytes that have one checksum.
const CHUNK: u64 = CHUNK_BYTES as u64;
/// Number of bytes that are compared at a time. Each side takes as much memory.
const BATCH: usize = 32 << 20;
/// Number of threads that read one shard.
const THREADS: usize = 2;

/// A tensor of which two ranks have different values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Name of the tensor.
    pub name: String,
    /// Rank whose values readers of the whole would get.
    pub rank: u32,
}

/// The same elements in a rank's own shard and in another one.
struct Pair<'a> {
    name: &'a str,
    own: u64,
    other: u64,
    shard: u32,
    bytes: usize,
}

/// Pairs that are compared together, because many small tensors are in one chunk.
struct Batch<'a> {
    whole: &'a Whole,
    own: &'a Shard,
    pairs: Vec<Pair<'a>>,
    bytes: usize,
    /// Tensors that differ, each once.
    found: Vec<Difference>,
}

impl<'a> Batch<'a> {
    /// Adds the elements of a run, and compares as soon as there are enough. `own` is their offset
    /// in the rank's own shard.
    fn add(&mut self, name: &'a str, own: u64, run: &Run) -> Result<(), WholeError> {
        // Replicas have the same tensors at the same places.
        let alike = self.whole.shards().get(run.shard as usize).filter(|_| own == run.at);
        let mut done = 0;
        while done < run.bytes && !self.has_found(name) {
            let mut left = run.bytes - done;
            if let Some(other) = alike {
                let chunk = (own + done) / CHUNK;
                left = left.min((chunk + 1) * CHUNK - (own + done));
                if same_checksum(self.own, other, chunk) {
                    done += left;
                    continue;
                }
            }
            let room = BATCH - self.bytes;
            let bytes = usize::try_from(left).map_or(room, |left| left.min(room));
            self.pairs.push(Pair { name, own: own + done, other: run.at + done, shard: run.shard, bytes });
            self.bytes += bytes;
            done += bytes as u64;
            if self.bytes == BATCH {
                self.compare()?;
            }
        }
        Ok(())
    }

    /// Returns whether the tensor was found to differ. Tensors are compared one after the other, so
    /// only the last one may have more pairs.
    fn has_found(&self, name: &str) -> bool {
        self.found.last().is_some_and(|last| last.name == name)
    }

    /// Reads and compares all pairs, and discards them.
    fn compare(&mut self) -> Result<(), WholeError> {
        let (mut own, mut other) = (vec![0u8; self.bytes], vec![0u8; self.bytes]);
        let (mut here, mut there): (Vec<Target>, BTreeMap<u32, Vec<Target>>) = Default::default();
        let mut at = 0;
        for Pair { own: from, other: from_other, shard, bytes, .. } in &self.pairs {
            let target = |offset, memory: &mut [u8]| Target {
                offset,
                bytes: *bytes as u64,
                address: memory.as_mut_ptr() as usize + at,
            };
            here.push(target(*from, &mut own));
            there.entry(*shard).or_default().push(target(*from_other, &mut other));
            at += bytes;
        }
        read(self.own, &here)?;
        for (shard, targets) in &there {
            if let Some(shard) = self.whole.shards().get(*shard as usize) {
                read(shard, targets)?;
            }
        }
        self.bytes = 0;
        let mut at = 0;
        for pair in std::mem::take(&mut self.pairs) {
            let range = at..at + pair.bytes;
            at = range.end;
            if own.get(range.clone()) != other.get(range) && !self.has_found(pair.name) {
                self.found.push(Difference { name: pair.name.to_owned(), rank: pair.shard });
            }
        }
        Ok(())
    }
}

/// Returns whether two shards have the same checksum of a chunk, which then need not be read.
fn same_checksum(one: &Shard, other: &Shard, chunk: u64) -> bool {
    let crc = |shard: &Shard| shard.index().crcs().get(usize::try_from(chunk).ok()?).copied();
    crc(one).is_some_and(|crc_of_one| crc(other) == Some(crc_of_one))
}

/// Copies parts of a shard, verified.
fn read(shard: &Shard, targets: &[Target]) -> Result<(), WholeError> {
    let readers = Readers::within(shard.threads(THREADS), BATCH as u64);
    // SAFETY: `Batch::compare` gives each target its own range of a vector, which it does not touch
    // until this returns.
    unsafe { shard.load_parts(targets, readers) }.map_err(WholeError::from)
}

impl Whole {
    /// Returns the tensors in `names` of which `rank` has other values than readers of the whole
    /// would get, in the same order. Reads only elements that other ranks have as well. Stops once
    /// it has found `most`: the caller continues after the last one.
    ///
    /// # Errors
    /// Fails when some of it cannot be read or is damaged.
    pub fn differences(&self, rank: u32, names: &[String], most: usize) -> Result<Vec<Difference>, WholeError> {
        let Some(own) = self.shards().get(rank as usize) else { return Ok(Vec::new()) };
        let offsets = own.index().offsets();
        let mut batch = Batch { whole: self, own, pairs: Vec::new(), bytes: 0, found: Vec::new() };
        for name in names {
            let (Some((_, line)), Some(tensor)) = (offsets.get(name.as_str()), self.tensors().get(name)) else {
                continue;
            };
            if batch.found.len() >= most {
                break;
            }
            let Some(held) = tensor.held_by(rank) else {
                if line.bytes > 0 {
                    // The tensor has another shape or type in this rank's shard.
                    batch.compare()?;
                    batch.found.push(Difference { name: name.clone(), rank: tensor.first });
                }
                continue;
            };
            let runs = tensor.plan(&held.part).map_err(|e| WholeError::Part(name.clone(), e))?;
            for run in runs.iter().filter(|run| run.shard != rank) {
                batch.add(name, held.at + run.into, run)?;
            }
        }
        if batch.found.len() < most {
            batch.compare()?;
        }
        batch.found.truncate(most);
        Ok(batch.found)
    }
}
