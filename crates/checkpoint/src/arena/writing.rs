//! The writer of a slot: only a [`Writing`] and a repair change the bytes of a region.

use super::{
    DIGEST, DURABLE, GENERATION, INDEX_AT, INDEX_BYTES, INDEX_CRC, Label, MAGIC, PURPOSE, Pin, RANK, REGION_AT,
    REGION_BYTES, REPLICAS, RUN, SEALED_AT, SHARED, STEP, SUM, Slot, State, WORLD,
};
use crate::copy_crc::Running;
use crate::memory::Memory;
use crate::shm::Mapping;
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// A slot that is being written. Dropping it leaves the slot without contents.
#[derive(Debug)]
pub struct Writing<M: Memory = Mapping> {
    slot: Arc<Slot<M>>,
}

impl<M: Memory> Slot<M> {
    /// Begins to write, which discards the contents of the slot. Returns `None` if the slot is in
    /// use ([`Slot::in_use`]).
    ///
    /// # Safety
    /// Until the result is sealed or dropped, no other thread begins to write this slot, in this
    /// process or another. The slots of a worker are written by the worker, and by its agent while
    /// the worker waits for it or does not run. Slots with copies and parity of other nodes are
    /// written by the agent.
    #[must_use]
    pub unsafe fn begin(self: &Arc<Self>) -> Option<Writing<M>> {
        if self.is_slot() {
            if !self.state_word().begin() {
                return None;
            }
        } else {
            self.state_word().begin_new();
            self.set(0, MAGIC);
        }
        self.set(SUM, 0);
        Some(Writing { slot: Arc::clone(self) })
    }

    /// Continues to write a slot that was begun and has not been sealed. Returns `None` if the slot
    /// is in any other state.
    ///
    /// # Safety
    /// The same as for [`Slot::begin`], and the thread that began to write no longer writes.
    #[must_use]
    pub unsafe fn resume(self: &Arc<Self>) -> Option<Writing<M>> {
        (self.state() == State::Writing).then(|| Writing { slot: Arc::clone(self) })
    }
}

impl<M: Memory> Writing<M> {
    /// Returns the slot.
    #[must_use]
    pub fn slot(&self) -> &Arc<Slot<M>> {
        &self.slot
    }

    /// Copies bytes into the region, word by word.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit.
    pub fn store(&self, from: usize, bytes: &[u8]) -> io::Result<()> {
        self.slot.store(from, bytes)
    }

    /// Writes the label, the index and the length of what the region contains or will contain.
    ///
    /// # Errors
    /// Fails when the index does not fit.
    pub fn describe(&self, label: Label, index: &[u8], region: u64) -> io::Result<()> {
        self.describe_in_parts(label, &[index], region)
    }

    /// Does what [`Writing::describe`] does, for an index that comes in several parts.
    ///
    /// # Errors
    /// The same as for [`Writing::describe`].
    pub fn describe_in_parts(&self, label: Label, index: &[&[u8]], region: u64) -> io::Result<()> {
        let at = REGION_AT as u64 + region.next_multiple_of(4096);
        let begins = usize::try_from(at).map_err(io::Error::other)?;
        let end = self.memory.store(begins, index)?;
        let mut sum = Running::default();
        index.iter().for_each(|part| sum.read(part));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        for (word, value) in [
            (RUN, label.run),
            (RANK, label.rank),
            (WORLD, label.world_size),
            (GENERATION, label.generation),
            (STEP, label.step),
            (PURPOSE, label.purpose as u64),
            (SHARED, u64::from(label.shared)),
            (INDEX_AT, at),
            (INDEX_BYTES, (end - begins) as u64),
            (INDEX_CRC, sum.value()),
            (REGION_BYTES, region),
            (SEALED_AT, now),
            (REPLICAS, 0),
            (DURABLE, 0),
            (DIGEST, 0),
        ] {
            self.set(word, value);
        }
        self.set(SUM, self.sum());
        Ok(())
    }

    /// Seals the slot with an optional pin. Everything else must be in place before.
    pub fn seal(self, pin: Option<Pin>) {
        self.state_word().seal(pin);
    }
}

impl<M: Memory> Deref for Writing<M> {
    type Target = Slot<M>;

    fn deref(&self) -> &Slot<M> {
        &self.slot
    }
}
