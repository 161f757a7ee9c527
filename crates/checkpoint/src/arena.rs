//! The arena: per worker a few slots on tmpfs, each holding one captured step. Slots survive the
//! death of the worker and of the agent.
//!
//! Slot protocol: FREE → WRITING → SEALED (→ DURABLE). One writer; sealing is one release store
//! after everything else is in place. A crash while WRITING leaves the other slots untouched.
//!
//! ```text
//!  0        4096                      index_at            end
//!  ┌────────┬─────────────────────────┬───────────────────┐
//!  │ super- │ region: tensors without │ side index (JSON) │
//!  │ block  │ gaps, page-aligned      │ with chunk CRCs   │
//!  └────────┴─────────────────────────┴───────────────────┘
//! ```

use crate::format::digest::{CHUNK_BYTES, crc};
use crate::format::shard::Index;
use crate::shm::Mapping;
use everstep_wire::limits::INDEX_BYTES_MAX;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

const MAGIC: u64 = 0x3174_6f6c_7370_6574; // "tepslot1"
/// Where the region begins.
pub const REGION_AT: usize = 4096;

const STATE: usize = 1;
const PINS: usize = 2;
const FIRST_SUMMED: usize = 3;
const JOB: usize = 3;
const RANK: usize = 4;
const GENERATION: usize = 5;
const STEP: usize = 6;
const INDEX_AT: usize = 7;
const INDEX_BYTES: usize = 8;
const INDEX_CRC: usize = 9;
const REGION_BYTES: usize = 10;
const WORLD: usize = 11;
const SUM: usize = 12;

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Holds nothing.
    Free,
    /// Being written; holds nothing that can be read.
    Writing,
    /// Complete.
    Sealed,
    /// Found damaged; kept for inspection, never read.
    Quarantined,
}

/// What a sealed slot says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// [`job_hash`] of the job's name.
    pub job: u64,
    /// Global rank.
    pub rank: u64,
    /// Number of ranks when it was written.
    pub world_size: u64,
    /// Generation of the writer.
    pub generation: u64,
    /// State after this many steps.
    pub step: u64,
}

/// Why a slot cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SlotError {
    /// Not sealed.
    #[error("slot holds no complete step")]
    NotSealed,
    /// Damaged.
    #[error("slot is damaged: {0}")]
    Damaged(String),
}

/// Identifies a job in a superblock.
#[must_use]
pub fn job_hash(job: &str) -> u64 {
    crc(job.as_bytes())
}

/// Bytes that a slot needs for a region and an index of these lengths.
#[must_use]
pub fn slot_bytes(region: u64, index: u64) -> u64 {
    REGION_AT as u64 + region.next_multiple_of(4096) + index.next_multiple_of(4096)
}

/// Paths of a worker's slots under the node's arena directory.
#[must_use]
pub fn slot_paths(directory: &Path, local_rank: u32, slots: u32) -> Vec<PathBuf> {
    (0..slots).map(|i| directory.join(format!("local-{local_rank}-slot-{i}"))).collect()
}

/// One slot.
#[derive(Debug)]
pub struct Slot {
    map: Mapping,
    path: PathBuf,
}

impl Slot {
    /// Makes room for a slot, keeping what an equally large one already holds.
    ///
    /// # Errors
    /// Those of the file system; `StorageFull` when memory is short.
    pub fn reserve(path: &Path, bytes: u64) -> io::Result<Self> {
        if std::fs::metadata(path).is_ok_and(|m| m.len() != bytes) {
            std::fs::remove_file(path)?;
        }
        match Mapping::create(path, bytes) {
            Ok(map) => Ok(Slot { map, path: path.into() }),
            Err(e) => {
                let _ = std::fs::remove_file(path);
                Err(e)
            }
        }
    }

    /// Opens an existing slot.
    ///
    /// # Errors
    /// Those of the file system; `InvalidData` when the file is too short to be one.
    pub fn open(path: &Path) -> io::Result<Self> {
        let map = Mapping::open(path)?;
        if map.len() < REGION_AT {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{} is no slot", path.display())));
        }
        Ok(Slot { map, path: path.into() })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The memory.
    #[must_use]
    pub fn map(&self) -> &Mapping {
        &self.map
    }

    fn get(&self, word: usize) -> u64 {
        self.map.word(word * 8).load(Ordering::Acquire)
    }

    fn set(&self, word: usize, value: u64) {
        self.map.word(word * 8).store(value, Ordering::Release);
    }

    /// Where the slot stands. A file that was never a slot is free.
    #[must_use]
    pub fn state(&self) -> State {
        if self.get(0) != MAGIC {
            return State::Free;
        }
        match self.get(STATE) {
            1 => State::Writing,
            2 => State::Sealed,
            3 => State::Quarantined,
            _ => State::Free,
        }
    }

    /// Somebody (persist) still reads this slot.
    #[must_use]
    pub fn pinned(&self) -> bool {
        self.get(0) == MAGIC && self.get(PINS) != 0
    }

    /// Pins or releases.
    pub fn pin(&self, pinned: bool) {
        self.set(PINS, u64::from(pinned));
    }

    /// Begins to write: what the slot held is gone.
    pub fn begin(&self) {
        self.set(STATE, 1);
        self.set(0, MAGIC);
        self.set(SUM, 0);
        self.set(PINS, 0);
    }

    /// Bytes that a region may have beside an index of `index_bytes`.
    #[must_use]
    pub fn fits(&self, region: u64, index_bytes: u64) -> bool {
        slot_bytes(region, index_bytes) <= self.map.len() as u64
    }

    /// Completes a slot whose region is written: index, superblock, then the seal.
    ///
    /// # Errors
    /// When the index does not fit.
    pub fn seal(&self, label: Label, index: &Index, pin: bool) -> io::Result<()> {
        let json = serde_json::to_vec(index).map_err(io::Error::other)?;
        let at = REGION_AT as u64 + index.bytes().next_multiple_of(4096);
        self.map.write(usize::try_from(at).map_err(io::Error::other)?, &json)?;
        for (word, value) in [
            (JOB, label.job),
            (RANK, label.rank),
            (WORLD, label.world_size),
            (GENERATION, label.generation),
            (STEP, label.step),
            (INDEX_AT, at),
            (INDEX_BYTES, json.len() as u64),
            (INDEX_CRC, crc(&json)),
            (REGION_BYTES, index.bytes()),
        ] {
            self.set(word, value);
        }
        self.set(SUM, self.sum());
        self.set(PINS, u64::from(pin));
        self.set(STATE, 2);
        Ok(())
    }

    fn sum(&self) -> u64 {
        crc(self.map.bytes(FIRST_SUMMED * 8, (SUM - FIRST_SUMMED) * 8).unwrap_or_default())
    }

    /// The label and index of a sealed slot, both verified. The region is not looked at.
    ///
    /// # Errors
    /// [`SlotError`].
    pub fn inspect(&self) -> Result<(Label, Index), SlotError> {
        if self.state() != State::Sealed {
            return Err(SlotError::NotSealed);
        }
        let damaged = |what: &str| SlotError::Damaged(what.into());
        if self.get(SUM) != self.sum() {
            return Err(damaged("superblock"));
        }
        let (at, bytes) = (self.get(INDEX_AT), self.get(INDEX_BYTES));
        if bytes > INDEX_BYTES_MAX {
            return Err(damaged("index length"));
        }
        let place = usize::try_from(at).ok().zip(usize::try_from(bytes).ok());
        let json = place.and_then(|(at, n)| self.map.bytes(at, n)).ok_or_else(|| damaged("index lies outside"))?;
        if crc(json) != self.get(INDEX_CRC) {
            return Err(damaged("index"));
        }
        let index: Index = serde_json::from_slice(json).map_err(|e| damaged(&e.to_string()))?;
        if index.bytes() != self.get(REGION_BYTES) || index.crcs.len() != index.chunks() {
            return Err(damaged("region length"));
        }
        let label = Label {
            job: self.get(JOB),
            rank: self.get(RANK),
            world_size: self.get(WORLD),
            generation: self.get(GENERATION),
            step: self.get(STEP),
        };
        Ok((label, index))
    }

    /// Verifies everything, region included. A damaged slot is quarantined.
    ///
    /// # Errors
    /// [`SlotError`].
    pub fn verify(&self) -> Result<(Label, Index), SlotError> {
        let found = self.inspect().and_then(|(label, index)| {
            for (i, expected) in index.crcs.iter().enumerate() {
                let start = i * CHUNK_BYTES;
                let len = CHUNK_BYTES.min(usize::try_from(index.bytes()).unwrap_or(usize::MAX) - start);
                let chunk = self.map.bytes(REGION_AT + start, len);
                if chunk.map(crc) != Some(*expected) {
                    return Err(SlotError::Damaged(format!("chunk {i} of the region")));
                }
            }
            Ok((label, index))
        });
        if matches!(found, Err(SlotError::Damaged(_))) {
            self.set(STATE, 3);
        }
        found
    }
}
