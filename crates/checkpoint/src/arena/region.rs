//! Access to the region of a slot: in place by counted readers, by the writer, and by a repair;
//! copied out by all others.

use super::{REGION_AT, Slot};
use crate::copy_crc::Running;
use crate::memory::Memory;
use crate::shm::Mapping;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

/// A reader of a sealed slot. While it exists, the region is not written.
#[derive(Debug)]
pub struct Reader<M: Memory = Mapping> {
    slot: Arc<Slot<M>>,
}

impl<M: Memory> Reader<M> {
    /// Returns bytes of the region in place; `None` if they lie outside the slot.
    #[must_use]
    pub fn region(&self, from: usize, len: usize) -> Option<&[u8]> {
        // SAFETY: the slot was sealed when this reader was counted. Until it is dropped, the count
        // makes `begin` and `repair` fail, in every process, and nothing but a `Writing`, which the
        // seal has consumed, and a `Repair` writes to the region. The callers of `begin`,
        // `region_mut`, `memory` and `forget_readers` promise the rest. Only this crate maps the
        // file (see `Mapping`).
        unsafe { self.slot.still_region(from, len) }
    }
}

impl<M: Memory> Deref for Reader<M> {
    type Target = Slot<M>;

    fn deref(&self) -> &Slot<M> {
        &self.slot
    }
}

impl<M: Memory> Drop for Reader<M> {
    fn drop(&mut self) {
        self.slot.state_word().end_read();
    }
}

/// A repair of a sealed slot. While it exists, the region is not read in place, and
/// [`Repair::store`] replaces parts of it.
#[derive(Debug)]
pub struct Repair<'a, M: Memory = Mapping> {
    slot: &'a Slot<M>,
}

impl<M: Memory> Repair<'_, M> {
    /// Copies bytes into the region, word by word.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit.
    pub fn store(&self, from: usize, bytes: &[u8]) -> io::Result<()> {
        self.slot.store(from, bytes)
    }
}

impl<M: Memory> Deref for Repair<'_, M> {
    type Target = Slot<M>;

    fn deref(&self) -> &Slot<M> {
        self.slot
    }
}

impl<M: Memory> Drop for Repair<'_, M> {
    fn drop(&mut self) {
        self.slot.state_word().end_repair();
    }
}

impl<M: Memory> Slot<M> {
    /// Begins to read in place. Returns `None` if the slot is not sealed, is being repaired, or has
    /// too many readers.
    ///
    /// A process that may die before it has dropped the reader must be an agent, whose successor
    /// clears the count, or the only one that can open the slot.
    #[must_use]
    pub fn read(self: &Arc<Self>) -> Option<Reader<M>> {
        (self.is_slot() && self.state_word().read()).then(|| Reader { slot: Arc::clone(self) })
    }

    /// Begins to replace damaged bytes. Returns `None` if the slot is not sealed, is being read in
    /// place, or is being repaired. Only agents repair: the next agent ends what a dead one has
    /// begun.
    #[must_use]
    pub fn repair(&self) -> Option<Repair<'_, M>> {
        // Not `then_some`: a value that is dropped at once would end another's repair.
        (self.is_slot() && self.state_word().repair()).then(|| Repair { slot: self })
    }

    /// Returns whether the slot is being repaired.
    #[must_use]
    pub fn under_repair(&self) -> bool {
        self.is_slot() && self.state_word().under_repair()
    }

    /// Forgets readers and repairs of an agent that has ended.
    ///
    /// # Safety
    /// No [`Reader`] and no [`Repair`] of this slot exists, in this process or another. The caller
    /// has the node's lock, so that its predecessor has ended, and has not begun to read.
    pub unsafe fn forget_readers(&self) {
        if self.is_slot() {
            self.state_word().forget_readers();
        }
    }

    /// Returns bytes of the region in place, without counting a reader.
    ///
    /// # Safety
    /// No thread writes to these bytes while the slice lives: the caller is the slot's writer and
    /// does not write itself, or knows that the processes that may write do not.
    #[must_use]
    pub unsafe fn still_region(&self, from: usize, len: usize) -> Option<&[u8]> {
        let at = from.checked_add(REGION_AT)?;
        // SAFETY: the caller guarantees that no thread writes these bytes while the slice lives.
        unsafe { self.memory.slice(at, len) }
    }

    /// Returns bytes of the region to be filled in place.
    ///
    /// # Safety
    /// The caller has a [`super::Writing`] of the slot, and no other thread reads or writes these
    /// bytes while the slice lives. The only exception is [`Slot::load`] by a reader of the slot's
    /// previous contents, which detects the change by the checksums.
    ///
    /// # Errors
    /// `InvalidInput` when they lie outside the slot.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn region_mut(&self, from: usize, len: usize) -> io::Result<&mut [u8]> {
        let at = from.checked_add(REGION_AT).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the caller guarantees that no other thread uses these bytes while the slice
        // lives.
        unsafe { self.memory.slice_mut(at, len) }
    }

    /// Copies bytes out of the region, word by word. If the slot is not in use, they may come from
    /// two writers. Returns false if they lie outside the slot.
    #[must_use]
    pub fn load(&self, from: usize, into: &mut [u8]) -> bool {
        from.checked_add(REGION_AT).is_some_and(|at| self.memory.load_into(at, into))
    }

    /// Copies bytes into the region, word by word. It may be called by a `Writing` and a [`Repair`]
    /// only.
    pub(super) fn store(&self, from: usize, bytes: &[u8]) -> io::Result<()> {
        let at = from.checked_add(REGION_AT).ok_or(io::ErrorKind::InvalidInput)?;
        self.memory.store(at, &[bytes]).map(drop)
    }

    /// Copies into the region; see [`Memory::copy_from`].
    ///
    /// # Safety
    /// The same as for [`Slot::region_mut`]. `source` is readable for `len` bytes and does not
    /// overlap the slot.
    pub(crate) unsafe fn copy_from(&self, from: usize, source: *const u8, len: usize) -> io::Result<()> {
        let at = from.checked_add(REGION_AT).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the caller keeps the source readable and guarantees that no other thread uses the
        // target.
        unsafe { self.memory.copy_from(at, source, len) }
    }

    /// Copies into the region and sums the bytes; see [`Memory::sum_from`].
    ///
    /// # Safety
    /// The same as for [`Slot::copy_from`].
    pub(crate) unsafe fn sum_from(
        &self,
        from: usize,
        source: *const u8,
        len: usize,
        sum: &mut Running,
    ) -> io::Result<()> {
        let at = from.checked_add(REGION_AT).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the caller keeps the source readable and guarantees that no other thread uses the
        // target.
        unsafe { self.memory.sum_from(at, source, len, sum) }
    }

    /// Returns the address of `len` bytes from the beginning of the region, for a device or a
    /// system call to fill.
    ///
    /// # Errors
    /// `InvalidInput` when they lie outside the slot.
    pub fn region_address(&self, len: usize) -> io::Result<usize> {
        self.memory.address(REGION_AT, len).map(|address| address as usize)
    }
}
