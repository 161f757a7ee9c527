//! The arena: per worker a few slots on tmpfs, each holding one captured step. Slots survive the
//! death of the worker and of the agent.
//!
//! Slot protocol: FREE → WRITING → SEALED ([`crate::state_word`]; then REPLICATED(n) → DURABLE,
//! which are notes for people). A slot has one writer at a time ([`Writing`]): its worker while the
//! worker runs, otherwise the node's agent. Sealing is one release store after everything else is
//! in place. A crash while WRITING leaves the other slots untouched.
//!
//! The superblock and the index are written and read word by word, and have checksums, so any
//! process may look at them at any time. The region is plain memory. Readers that use it in place
//! are counted in the slot ([`Slot::read`]), or know that no writer is active
//! ([`Slot::still_region`]). Others copy it out ([`Slot::load`]), and detect by the checksums that
//! it was written meanwhile. Damaged chunks of a sealed slot are replaced by the agent, at the
//! request of a worker that waits for it ([`Slot::repair`]).
//!
//! A slot that is being read is not written, even if its pins are released meanwhile. A count
//! outlives a process that dies while it reads. So only agents are counted, and processes whose
//! slots no other process can open. An agent that starts has the node lock, so its predecessor has
//! ended, and it clears the counts before it reads anything ([`Slot::forget_readers`]).
//!
//! ```text
//!  0        4096                      index_at            end
//!  ┌────────┬─────────────────────────┬───────────────────┐
//!  │ super- │ region: tensors without │ side index (JSON) │
//!  │ block  │ gaps, page-aligned      │ with chunk CRCs   │
//!  └────────┴─────────────────────────┴───────────────────┘
//! ```

use crate::format::digest::crc;
use crate::format::index::Index;
use crate::memory::Memory;
use crate::shm::Mapping;
use crate::state_word::StateWord;
pub use crate::state_word::{Pin, State};
use everstep_core::message::Purpose;
use everstep_wire::limits::INDEX_BYTES_MAX;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: u64 = 0x3174_6f6c_7370_6574; // "tepslot1"
/// Where the region begins.
pub const REGION_AT: usize = 4096;

const STATE: usize = 1;
const FIRST_SUMMED: usize = 3;
const RUN: usize = 3;
const RANK: usize = 4;
const GENERATION: usize = 5;
const STEP: usize = 6;
const INDEX_AT: usize = 7;
const INDEX_BYTES: usize = 8;
const INDEX_CRC: usize = 9;
const REGION_BYTES: usize = 10;
const WORLD: usize = 11;
const PURPOSE: usize = 12;
const SHARED: usize = 13;
const SUM: usize = 14;
const SEALED_AT: usize = 15;
const REPLICAS: usize = 16;
const DURABLE: usize = 17;
const DIGEST: usize = 18;

/// Describes the contents of a sealed slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Label {
    /// [`run_label`] of the directory that the checkpoint belongs to.
    pub run: u64,
    /// Global rank.
    pub rank: u64,
    /// Number of ranks when the slot was written.
    pub world_size: u64,
    /// Generation of the process that wrote the slot.
    pub generation: u64,
    /// Number of steps after which the state was captured.
    pub step: u64,
    /// Why the step goes to durable storage, if it does.
    pub purpose: Purpose,
    /// Whether every rank holds the same state, so that this slot can stand for any rank's.
    pub shared: bool,
}

/// What happened to a sealed slot, for people to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// When the slot was sealed, in seconds since 1970.
    pub sealed_at: u64,
    /// Number of copies on other nodes.
    pub replicas: u64,
    /// Whether the step is on durable storage, too.
    pub durable: bool,
}

/// Why a slot cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SlotError {
    /// The slot is not sealed.
    #[error("slot holds no complete step")]
    NotSealed,
    /// A checksum or a length in the slot is wrong.
    #[error("slot is damaged: {0}")]
    Damaged(String),
}

/// Returns the number that identifies a run in a superblock: a checksum of its id, and of the kind
/// of state where there are several. A slot counts only for the directory that it was captured for,
/// whatever the name of the job.
#[must_use]
pub fn run_label(run: &str) -> u64 {
    crc(run.as_bytes())
}

/// Returns the number that identifies a job, a checksum of its name.
#[must_use]
pub fn job_hash(job: &str) -> u64 {
    crc(job.as_bytes())
}

/// Returns the number of bytes that a slot needs for a region and an index of these lengths.
#[must_use]
pub fn slot_bytes(region: u64, index: u64) -> u64 {
    REGION_AT as u64 + region.next_multiple_of(4096) + index.next_multiple_of(4096)
}

/// Returns the paths of a worker's slots under the node's arena directory.
#[must_use]
pub fn slot_paths(directory: &Path, local_rank: u32, slots: u32) -> Vec<PathBuf> {
    (0..slots).map(|i| directory.join(format!("local-{local_rank}-slot-{i}"))).collect()
}

/// A file on tmpfs that holds one captured step.
#[derive(Debug)]
pub struct Slot<M = Mapping> {
    memory: M,
    path: PathBuf,
}

impl Slot {
    /// Makes room for a slot of at least `bytes`, and keeps its contents.
    ///
    /// # Errors
    /// Those of the file system; `StorageFull` when there is not enough memory.
    pub fn reserve(path: &Path, bytes: u64) -> io::Result<Self> {
        let held = std::fs::metadata(path).map_or(0, |m| m.len());
        match Mapping::create(path, bytes.max(held)) {
            Ok(memory) => Ok(Slot { memory, path: path.into() }),
            Err(e) => {
                if held == 0 {
                    let _ = everstep_wire::private::remove(path);
                }
                Err(e)
            }
        }
    }

    /// Opens an existing slot.
    ///
    /// # Errors
    /// Those of the file system; `InvalidData` when the file is too short to be a slot.
    pub fn open(path: &Path) -> io::Result<Self> {
        let memory = Mapping::open(path)?;
        if memory.len() < REGION_AT {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{} is not a slot", path.display())));
        }
        Ok(Slot { memory, path: path.into() })
    }

    /// Makes every page of the slot present; see [`Mapping::populate`].
    ///
    /// # Errors
    /// The same as for [`Mapping::populate`].
    pub fn populate(&self) -> io::Result<()> {
        self.memory.populate()
    }
}

impl<M: Memory> Slot<M> {
    /// Returns the path of the slot's file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the length in bytes, including the superblock and the index.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Returns the memory, including the superblock and the index.
    ///
    /// # Safety
    /// A caller that writes through the memory has begun to write the slot ([`Slot::begin`]), or
    /// knows that no process reads it in place. The words of the superblock change only as the
    /// protocol allows.
    #[must_use]
    pub unsafe fn memory(&self) -> &M {
        &self.memory
    }

    fn get(&self, word: usize) -> u64 {
        self.memory.word(word * 8).load(Ordering::Acquire)
    }

    fn set(&self, word: usize, value: u64) {
        self.memory.word(word * 8).store(value, Ordering::Release);
    }

    fn state_word(&self) -> StateWord<'_, AtomicU64> {
        StateWord(self.memory.word(STATE * 8))
    }

    fn is_slot(&self) -> bool {
        self.get(0) == MAGIC
    }

    /// Returns the state of the slot. A file that was never a slot is free.
    #[must_use]
    pub fn state(&self) -> State {
        if self.is_slot() { self.state_word().state() } else { State::Free }
    }

    /// Returns whether the slot has a pin, that is, whether its contents are still needed.
    #[must_use]
    pub fn pinned(&self) -> bool {
        self.is_slot() && self.state_word().pinned()
    }

    /// Returns whether the slot cannot be written now: it has a pin, is being read in place, or is
    /// being repaired.
    #[must_use]
    pub fn in_use(&self) -> bool {
        self.is_slot() && self.state_word().in_use()
    }

    /// Returns whether the slot has this pin.
    #[must_use]
    pub fn pinned_for(&self, pin: Pin) -> bool {
        self.is_slot() && self.state_word().pinned_for(pin)
    }

    /// Pins a sealed slot. Returns false if the slot is not sealed, or no longer sealed. Callers
    /// must read the label after they have pinned the slot.
    #[must_use]
    pub fn pin(&self, pin: Pin) -> bool {
        self.is_slot() && self.state_word().pin(pin)
    }

    /// Removes a pin. Readers that read the slot in place continue undisturbed.
    pub fn release(&self, pin: Pin) {
        self.state_word().release(pin);
    }

    /// Returns the notes for people.
    #[must_use]
    pub fn notes(&self) -> Notes {
        Notes { sealed_at: self.get(SEALED_AT), replicas: self.get(REPLICAS), durable: self.get(DURABLE) != 0 }
    }

    /// Records how many copies other nodes have.
    pub fn note_replicas(&self, replicas: u64) {
        self.set(REPLICAS, replicas);
    }

    /// Records a digest of the bytes that ranks with the same state have in common. It identifies
    /// this version of them.
    pub fn note_digest(&self, digest: u64) {
        self.set(DIGEST, digest.max(1));
    }

    /// Returns the digest that [`Slot::note_digest`] has recorded, if any.
    #[must_use]
    pub fn digest(&self) -> Option<u64> {
        Some(self.get(DIGEST)).filter(|d| *d > 0)
    }

    /// Records that the step is on durable storage.
    pub fn note_durable(&self) {
        self.set(DURABLE, 1);
    }

    /// Returns whether a region of `region` bytes fits into the slot beside an index of
    /// `index_bytes`.
    #[must_use]
    pub fn fits(&self, region: u64, index_bytes: u64) -> bool {
        slot_bytes(region, index_bytes) <= self.memory.len() as u64
    }

    /// Replaces the generation that counts as the writer of the slot. No other process may use the
    /// slot meanwhile.
    pub fn relabel(&self, generation: u64) {
        self.set(GENERATION, generation);
        self.set(SUM, self.sum());
    }

    fn sum(&self) -> u64 {
        let mut bytes = [0; (SUM - FIRST_SUMMED) * 8];
        for (word, bytes) in (FIRST_SUMMED..SUM).zip(bytes.as_chunks_mut::<8>().0) {
            *bytes = self.get(word).to_le_bytes();
        }
        crc(&bytes)
    }

    /// Returns the label and the index of a sealed slot, both verified. The region is not read.
    ///
    /// # Errors
    /// [`SlotError`].
    pub fn inspect(&self) -> Result<(Label, Index), SlotError> {
        if self.state() != State::Sealed {
            return Err(SlotError::NotSealed);
        }
        let (label, json) = self.described()?;
        let index = self.parse(&json)?;
        Ok((label, index))
    }

    /// Returns the label of a sealed slot, verified. The cost does not depend on the number of
    /// tensors.
    #[must_use]
    pub fn label(&self) -> Option<Label> {
        (self.state() == State::Sealed && self.get(SUM) == self.sum()).then(|| self.raw_label())
    }

    /// Returns the length of the region of a described slot, in bytes. It is not verified.
    #[must_use]
    pub fn region_bytes(&self) -> u64 {
        self.get(REGION_BYTES)
    }

    fn raw_label(&self) -> Label {
        let purpose = match self.get(PURPOSE) {
            1 => Purpose::Epoch,
            2 => Purpose::User,
            _ => Purpose::Recovery,
        };
        Label {
            run: self.get(RUN),
            rank: self.get(RANK),
            world_size: self.get(WORLD),
            generation: self.get(GENERATION),
            step: self.get(STEP),
            purpose,
            shared: self.get(SHARED) != 0,
        }
    }

    /// Returns the label and the index bytes of a described slot, verified against the superblock.
    ///
    /// # Errors
    /// [`SlotError::Damaged`].
    pub fn described(&self) -> Result<(Label, Vec<u8>), SlotError> {
        let damaged = |what: &str| SlotError::Damaged(what.into());
        if self.get(SUM) != self.sum() {
            return Err(damaged("superblock"));
        }
        let (at, bytes) = (self.get(INDEX_AT), self.get(INDEX_BYTES));
        if bytes > INDEX_BYTES_MAX {
            return Err(damaged("index length"));
        }
        let place = usize::try_from(at).ok().zip(usize::try_from(bytes).ok());
        let json = place.and_then(|(at, n)| self.memory.load(at, n)).ok_or_else(|| damaged("index lies outside"))?;
        if crc(&json) != self.get(INDEX_CRC) {
            return Err(damaged("index"));
        }
        Ok((self.raw_label(), json))
    }

    fn parse(&self, json: &[u8]) -> Result<Index, SlotError> {
        let damaged = |what: &str| SlotError::Damaged(what.into());
        let index: Index = serde_json::from_slice(json).map_err(|e| damaged(&e.to_string()))?;
        let bytes = index.bytes();
        let fits = (REGION_AT as u64).checked_add(bytes).is_some_and(|end| end <= self.memory.len() as u64);
        if bytes != self.get(REGION_BYTES) || !fits {
            return Err(damaged("region length"));
        }
        Ok(index)
    }
}

mod region;
mod writing;
pub use region::{Reader, Repair};
pub use writing::Writing;

#[cfg(test)]
mod protocol;
