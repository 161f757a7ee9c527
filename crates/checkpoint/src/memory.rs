//! Memory that other threads and processes may use at the same time, and sound access to it.
//!
//! Words are atomics, and [`Memory::load`] and [`Memory::store`] go through them. Even if others
//! write at the same time, a load returns valid bytes. They may come from two writers, which a
//! checksum detects. Slices are for bulk data. They are `unsafe`, because only the protocol for the
//! contents of the memory (for slots: [`crate::arena`]) ensures that the bytes do not change under
//! them.

use crate::copy_crc::Running;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// A range of memory shared with other threads and perhaps with other processes.
///
/// # Safety
/// [`Memory::start`] is aligned to 8 bytes and valid for reads and writes of [`Memory::len`] bytes
/// for as long as the value lives. Each of the two always returns the same result. The only
/// references to the bytes are those that this trait gives out. The provided methods are not
/// overridden.
pub unsafe trait Memory: Send + Sync {
    /// Returns the address of the first byte.
    fn start(&self) -> *mut u8;

    /// Returns the length in bytes.
    fn len(&self) -> usize;

    /// Returns whether the memory has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the 64-bit word at `offset` (a multiple of 8).
    ///
    /// # Panics
    /// When `offset` lies outside the memory or is not aligned: offsets are constants of a format.
    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(WORD) && offset + WORD <= self.len(), "word outside the memory");
        // SAFETY: in bounds and aligned (checked, and `start` is aligned); atomics may be shared.
        unsafe { AtomicU64::from_ptr(self.start().add(offset).cast()) }
    }

    /// Returns the lower half of the 64-bit word at `offset` (little endian: the first four bytes),
    /// for use as a futex.
    ///
    /// # Panics
    /// The same as for [`Memory::word`].
    fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(WORD) && offset + WORD <= self.len(), "word outside the memory");
        // SAFETY: in bounds and aligned (checked, and `start` is aligned); atomics may be shared.
        unsafe { AtomicU32::from_ptr(self.start().add(offset).cast()) }
    }

    /// Returns the words from `offset` (a multiple of 8) to the end.
    ///
    /// # Panics
    /// The same as for [`Memory::word`].
    fn words(&self, offset: usize) -> &[AtomicU64] {
        assert!(offset.is_multiple_of(WORD) && offset <= self.len(), "words outside the memory");
        // SAFETY: in bounds and aligned (checked, and `start` is aligned); atomics may be shared.
        unsafe { std::slice::from_raw_parts(self.start().add(offset).cast(), (self.len() - offset) / WORD) }
    }

    /// Fills `bytes` from `offset` on, word by word. Returns false if the range lies outside the
    /// memory, or ends in a word that lies partly outside.
    #[must_use]
    fn load_into(&self, offset: usize, bytes: &mut [u8]) -> bool {
        let end = offset.checked_add(bytes.len()).and_then(|end| end.checked_next_multiple_of(WORD));
        if end.is_none_or(|end| end > self.len()) {
            return false;
        }
        let skip = offset % WORD;
        let mut words = self.words(offset - skip).iter().map(|w| w.load(Ordering::Relaxed).to_le_bytes());
        let (head, rest) = bytes.split_at_mut(if skip > 0 { bytes.len().min(WORD - skip) } else { 0 });
        if !head.is_empty() {
            let word = words.next().unwrap_or_default();
            head.iter_mut().zip(word.iter().skip(skip)).for_each(|(to, from)| *to = *from);
        }
        let (whole, tail) = rest.as_chunks_mut::<WORD>();
        whole.iter_mut().zip(&mut words).for_each(|(to, from)| *to = from);
        if !tail.is_empty() {
            let word = words.next().unwrap_or_default();
            tail.iter_mut().zip(word).for_each(|(to, from)| *to = from);
        }
        true
    }

    /// Returns a copy of `len` bytes, loaded as by [`Memory::load_into`]; `None` where that returns
    /// false.
    fn load(&self, offset: usize, len: usize) -> Option<Vec<u8>> {
        self.check(offset, len).ok()?;
        let mut bytes = vec![0; len];
        self.load_into(offset, &mut bytes).then_some(bytes)
    }

    /// Copies `parts` in one after the other, word by word. The other bytes of the first and the
    /// last word keep their values if no other thread writes to these words meanwhile. Returns
    /// where the last part ends.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit, or end in a word that lies partly outside. Nothing is
    /// written then.
    fn store(&self, offset: usize, parts: &[&[u8]]) -> io::Result<usize> {
        let end = parts.iter().try_fold(offset, |end, part| end.checked_add(part.len())).unwrap_or(usize::MAX);
        self.check(0, end.checked_next_multiple_of(WORD).unwrap_or(usize::MAX))?;
        let skip = offset % WORD;
        let mut words = self.words(offset - skip);
        let old = |words: &[AtomicU64]| words.first().map_or([0; WORD], |w| w.load(Ordering::Relaxed).to_le_bytes());
        let (mut word, mut filled) = (old(words), skip);
        for part in parts {
            let (head, rest) = part.split_at(if filled > 0 { part.len().min(WORD - filled) } else { 0 });
            word.iter_mut().skip(filled).zip(head).for_each(|(to, from)| *to = *from);
            filled += head.len();
            if filled == WORD {
                words = put(words, &[word]);
                filled = 0;
            }
            let (whole, tail) = rest.as_chunks::<WORD>();
            words = put(words, whole);
            word.iter_mut().zip(tail).for_each(|(to, from)| *to = *from);
            filled += tail.len();
        }
        if filled > 0 {
            word.iter_mut().zip(old(words)).skip(filled).for_each(|(to, from)| *to = from);
            put(words, &[word]);
        }
        Ok(end)
    }

    /// Returns bytes in place.
    ///
    /// # Safety
    /// No thread writes to them, in this process or another, while the slice lives.
    unsafe fn slice(&self, offset: usize, len: usize) -> Option<&[u8]> {
        self.check(offset, len).ok()?;
        // SAFETY: in bounds (checked), and bytes have no invalid values; the caller guarantees that
        // no thread writes to them while the slice lives.
        Some(unsafe { std::slice::from_raw_parts(self.start().add(offset), len) })
    }

    /// Returns bytes to be filled in place.
    ///
    /// # Safety
    /// No other thread reads or writes them, in this process or another, while the slice lives.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice_mut(&self, offset: usize, len: usize) -> io::Result<&mut [u8]> {
        self.check(offset, len)?;
        // SAFETY: in bounds (checked), and bytes have no invalid values; the caller guarantees that
        // no other thread uses them while the slice lives.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start().add(offset), len) })
    }

    /// Copies `len` bytes from `source`.
    ///
    /// # Safety
    /// `source` is readable for `len` bytes and does not overlap this memory. No other thread reads
    /// or writes the target meanwhile.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit.
    unsafe fn copy_from(&self, offset: usize, source: *const u8, len: usize) -> io::Result<()> {
        self.check(offset, len)?;
        // SAFETY: the target is in bounds (checked); the caller guarantees that `source` is
        // readable and does not overlap it, and that no other thread uses the target.
        unsafe { std::ptr::copy_nonoverlapping(source, self.start().add(offset), len) };
        Ok(())
    }

    /// Copies `len` bytes from `source` and adds them to a checksum, in one pass. Other threads may
    /// not see the copy before this one has called [`crate::copy_crc::fence`].
    ///
    /// # Safety
    /// The same as for [`Memory::copy_from`].
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit.
    unsafe fn sum_from(&self, offset: usize, source: *const u8, len: usize, sum: &mut Running) -> io::Result<()> {
        self.check(offset, len)?;
        // SAFETY: the target is in bounds (checked); the caller guarantees that `source` is
        // readable and does not overlap it, and that no other thread uses the target.
        unsafe { sum.copy_piece(self.start().add(offset), source, len) };
        Ok(())
    }

    /// Returns the address of `len` bytes, for a device or a system call to fill.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit.
    fn address(&self, offset: usize, len: usize) -> io::Result<*mut u8> {
        self.check(offset, len)?;
        Ok(self.start().wrapping_add(offset))
    }

    /// Checks that a range lies inside the memory.
    ///
    /// # Errors
    /// `InvalidInput` if it does not.
    fn check(&self, offset: usize, len: usize) -> io::Result<()> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len());
        fits.then_some(()).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "does not fit into the memory"))
    }
}

/// Stores `bytes` into the first words, and returns the remaining words.
fn put<'a>(words: &'a [AtomicU64], bytes: &[[u8; WORD]]) -> &'a [AtomicU64] {
    for (word, bytes) in words.iter().zip(bytes) {
        word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
    }
    words.get(bytes.len()..).unwrap_or_default()
}

/// Memory of this process alone. Miri tests the protocols on it, because it cannot map files.
#[cfg(test)]
pub struct Heap(Vec<std::cell::UnsafeCell<u64>>);

#[cfg(test)]
mod heap {
    use super::{Heap, Memory, WORD};
    use std::cell::UnsafeCell;

    // SAFETY: only raw pointers to the words are given out; the contract of `Memory` states which
    // threads may use them, and when.
    unsafe impl Sync for Heap {}

    // SAFETY: the words of a vector are aligned. They do not move and the length does not change,
    // because nothing here takes `&mut` to the vector.
    unsafe impl Memory for Heap {
        fn start(&self) -> *mut u8 {
            self.0.as_ptr().cast_mut().cast()
        }

        fn len(&self) -> usize {
            self.0.len() * WORD
        }
    }

    impl Heap {
        /// Returns `bytes` bytes of zeros, like a new file.
        pub fn new(bytes: usize) -> Self {
            Heap((0..bytes.div_ceil(WORD)).map(|_| UnsafeCell::new(0)).collect())
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_at_any_offset_is_loaded_and_nothing_beside_it_changes() {
        let memory = Heap::new(64);
        let all: Vec<u8> = (1..=64).collect();
        // Miri is a thousand times slower.
        let every = if cfg!(miri) { 5 } else { 1 };
        for from in (0..20).step_by(every) {
            for first in (0..12).step_by(every) {
                for second in (0..12).step_by(every) {
                    memory.store(0, &[&all]).unwrap();
                    let (a, b) = (vec![200; first], vec![201; second]);
                    assert_eq!(memory.store(from, &[&a, &b]).unwrap(), from + first + second);
                    let mut expected = all.clone();
                    expected[from..from + first].fill(200);
                    expected[from + first..from + first + second].fill(201);
                    assert_eq!(memory.load(0, 64).unwrap(), expected, "{from} {first} {second}");
                    assert_eq!(memory.load(from, first + second).unwrap(), [a, b].concat());
                }
            }
        }
    }

    #[test]
    fn nothing_lies_outside() {
        let memory = Heap::new(64);
        assert!(memory.store(60, &[&[0; 5]]).is_err() && memory.load(60, 5).is_none());
        assert!(memory.load(usize::MAX, 2).is_none() && memory.address(64, 1).is_err());
        // SAFETY: this test is the only user of the memory.
        unsafe {
            assert!(memory.slice(57, 8).is_none() && memory.slice(56, 8).is_some());
            assert!(memory.slice_mut(64, 1).is_err() && memory.copy_from(64, [1].as_ptr(), 1).is_err());
        }
    }
}
