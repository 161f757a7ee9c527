//! A shard that is arriving from another node, and which of its chunks are complete. Each is
//! verified as it arrives.

use super::refusal::Refusal;
use super::suppliers::Suppliers;
use crate::arena::{Label, Slot, State};
use crate::copy_crc::Running;
use crate::format::digest::CHUNK_BYTES;
use crate::format::index::Index;
use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Number of bytes that are received and summed at a time, while they are in the cache.
const PIECE_BYTES: usize = 256 << 10;

/// A shard that is arriving from another node.
#[derive(Debug)]
pub struct Upload {
    /// Rank and step of the shard.
    pub label: Label,
    index: Index,
    region: usize,
    /// Whether each chunk is complete and verified.
    done: Vec<AtomicBool>,
    /// Chunks that are arriving: bytes so far and their checksum. Each chunk arrives on one stream,
    /// in order.
    partial: Vec<Mutex<(usize, Running)>>,
    /// The connections that deliver it.
    pub suppliers: Suppliers,
}

impl Upload {
    /// Begins to fill `slot`, or continues an earlier attempt in it.
    ///
    /// # Safety
    /// The same as for [`Slot::begin`], and an earlier attempt does not write any more.
    ///
    /// # Errors
    /// [`Refusal`]: the index is damaged or does not fit, or the slot is in use.
    pub unsafe fn begin(slot: Arc<Slot>, label: Label, index_json: &[u8]) -> Result<Self, Refusal> {
        let index: Index = serde_json::from_slice(index_json)?;
        let region = index.bytes();
        if !slot.fits(region, index_json.len() as u64) {
            return Err(Refusal::ShardTooLong);
        }
        let known =
            slot.state() == State::Writing && slot.described().is_ok_and(|(l, json)| l == label && json == index_json);
        // SAFETY: the caller guarantees that no other thread writes the slot while `writing` lives,
        // and has ended an earlier attempt.
        let writing = unsafe { if known { slot.resume() } else { slot.begin() } };
        let writing = writing.ok_or(Refusal::SlotNeeded)?;
        if !known {
            writing.describe(label, index_json, region)?;
        }
        let chunks = index.chunks();
        let upload = Upload {
            label,
            region: usize::try_from(region)?,
            done: (0..chunks).map(|_| AtomicBool::new(false)).collect(),
            partial: (0..chunks).map(|_| Mutex::new((0, Running::default()))).collect(),
            index,
            suppliers: Suppliers::of(writing),
        };
        if known {
            upload.recognise(&slot);
        }
        Ok(upload)
    }

    /// Recognizes the chunks of an interrupted attempt by their checksums.
    fn recognise(&self, slot: &Slot) {
        for (chunk, done) in self.done.iter().enumerate() {
            let (from, len) = self.place(chunk);
            let mut sum = Running::default();
            // SAFETY: the slot is being written by this upload only, which has not begun to
            // receive.
            sum.read(unsafe { slot.still_region(from, len) }.unwrap_or_default());
            done.store(self.index.crcs().get(chunk) == Some(&sum.value()), Ordering::Release);
        }
    }

    fn place(&self, chunk: usize) -> (usize, usize) {
        let from = chunk * CHUNK_BYTES;
        (from, CHUNK_BYTES.min(self.region - from))
    }

    /// Returns the runs of chunks that are not complete: (first, count).
    pub fn missing(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (chunk, done) in self.done.iter().enumerate() {
            if done.load(Ordering::Acquire) {
                continue;
            }
            match runs.last_mut() {
                Some((first, count)) if *first + *count == chunk as u64 => *count += 1,
                _ => runs.push((chunk as u64, 1)),
            }
        }
        runs
    }

    /// Reads one extent from the stream. Returns true when it completed a chunk that is damaged.
    ///
    /// # Errors
    /// Those of the stream; `InvalidData` for an extent that is not the next of its chunk.
    pub fn receive(&self, offset: u64, len: usize, from: &mut impl Read) -> io::Result<bool> {
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let writing = self.suppliers.write()?;
        let offset = usize::try_from(offset).map_err(|_| wrong("extent outside the region"))?;
        let chunk = offset / CHUNK_BYTES;
        let partial = self.partial.get(chunk).ok_or_else(|| wrong("extent outside the region"))?;
        let mut partial = partial.lock().map_err(|_| wrong("an earlier extent failed"))?;
        let (begins, chunk_len) = self.place(chunk);
        if offset == begins {
            *partial = (0, Running::default());
        }
        if offset != begins + partial.0 || len == 0 || partial.0 + len > chunk_len {
            return Err(wrong("extent is not the next one of its chunk"));
        }
        let mut at = offset;
        while at < offset + len {
            let n = PIECE_BYTES.min(offset + len - at);
            // SAFETY: the slot is being written by this upload only (`writing`), and a chunk by one
            // stream at a time (its lock is held).
            let piece = unsafe { writing.slot()?.region_mut(at, n)? };
            from.read_exact(piece)?;
            partial.1.read(piece);
            at += n;
        }
        partial.0 += len;
        if partial.0 < chunk_len {
            return Ok(false);
        }
        let good = self.index.crcs().get(chunk) == Some(&partial.1.value());
        if let Some(done) = self.done.get(chunk) {
            done.store(good, Ordering::Release);
        }
        Ok(!good)
    }

    /// Seals the slot if all chunks are complete. Returns whether they are.
    pub fn seal(&self) -> bool {
        let complete = self.done.iter().all(|d| d.load(Ordering::Acquire)) && !self.suppliers.is_over();
        if complete && let Some(slot) = self.suppliers.take() {
            slot.seal(None);
        }
        complete
    }
}
