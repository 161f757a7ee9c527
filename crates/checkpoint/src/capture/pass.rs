//! One pass over the sources of a capture, part by part and by several threads: copies and sums, or
//! sums only.
//!
//! A part is usually a chunk. A state of few chunks has smaller parts, so that several threads can
//! share it; their checksums are combined into those of the chunks.

use super::Source;
use crate::arena::Slot;
use crate::copiers::Copiers;
use crate::copy_crc::{Running, fence};
use crate::format::digest::{CHUNK_BYTES, SMALL_PART, combine};
use crate::memory::Memory;
use crate::shm::Mapping;
use std::hint::spin_loop;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// States up to this size are divided into small parts.
const SMALL_BYTES: usize = 4 * CHUNK_BYTES;

/// The work that the threads of a pass share, and its results.
pub struct Pass<M = Mapping> {
    slot: Arc<Slot<M>>,
    bytes: usize,
    /// Offset in the region and memory of each source; shared by the passes of one capture.
    pieces: Arc<[(usize, Source)]>,
    copies: bool,
    /// Bytes per part; the first part of a chunk has the remainder.
    part: usize,
    parts: usize,
    next: AtomicUsize,
    /// Number of parts that are not complete. It changes under the lock of `done`.
    left: AtomicUsize,
    done: Mutex<Done>,
    changed: Condvar,
}

struct Done {
    /// Checksum of each part.
    sums: Vec<u64>,
    failed: Option<io::Error>,
}

impl<M: Memory + 'static> Pass<M> {
    /// Prepares a pass over `bytes` of the region. With `copies`, lazy sources are copied into the
    /// slot on the way; otherwise they are only read.
    ///
    /// # Safety
    /// The sources must stay readable until [`Pass::run`], [`Pass::finish`] or [`Pass::wait`]
    /// returns, and until then no other thread may use the region, except to copy it out word by
    /// word.
    pub unsafe fn new(slot: Arc<Slot<M>>, bytes: usize, pieces: Arc<[(usize, Source)]>, copies: bool) -> Self {
        let part = if bytes <= SMALL_BYTES { SMALL_PART } else { CHUNK_BYTES };
        let (whole, rest) = (bytes / CHUNK_BYTES, bytes % CHUNK_BYTES);
        let parts = whole * (CHUNK_BYTES / part) + rest.div_ceil(part);
        let done = Mutex::new(Done { sums: vec![0; parts], failed: None });
        let (next, left) = (AtomicUsize::new(0), AtomicUsize::new(parts));
        Pass { slot, bytes, pieces, copies, part, parts, next, left, done, changed: Condvar::new() }
    }

    /// Processes the pass with up to `threads` threads, including this one, and returns the
    /// checksum of every chunk.
    ///
    /// # Errors
    /// Fails when the region lies outside the slot.
    pub fn run(self, threads: usize, copiers: &'static Copiers) -> io::Result<Vec<u64>> {
        let pass = Arc::new(self);
        // Waking a thread takes as long as copying a few parts.
        pass.begin(threads.saturating_sub(1).min(pass.bytes.div_ceil(CHUNK_BYTES).saturating_sub(1)), copiers);
        pass.finish(Duration::ZERO)
    }

    /// Lets up to `helpers` threads begin, while this one does something else.
    pub fn begin(self: &Arc<Self>, helpers: usize, copiers: &'static Copiers) {
        for _ in 0..helpers {
            let helper = Arc::clone(self);
            if copiers.submit(Box::new(move || helper.work())).is_err() {
                break;
            }
        }
    }

    /// Processes the parts that no thread has begun, and returns the checksum of every chunk when
    /// all parts are complete. Spins for up to `patience` before it yields the processor.
    ///
    /// # Errors
    /// Fails when the region lies outside the slot.
    pub fn finish(&self, patience: Duration) -> io::Result<Vec<u64>> {
        let mut done = self.complete(patience);
        match done.failed.take() {
            Some(e) => Err(e),
            None => Ok(done.sums.chunks(CHUNK_BYTES / self.part).map(|of_chunk| self.combined(of_chunk)).collect()),
        }
    }

    /// Processes the parts that no thread has begun, and waits until no thread reads the sources
    /// any more.
    pub fn wait(&self) {
        drop(self.complete(Duration::ZERO));
    }

    fn complete(&self, patience: Duration) -> MutexGuard<'_, Done> {
        self.work();
        let began = Instant::now();
        while self.left.load(Ordering::Acquire) > 0 && began.elapsed() < patience {
            spin_loop();
        }
        let mut done = self.lock();
        while self.left.load(Ordering::Acquire) > 0 {
            // A helper finishes the part that it has taken; one that comes late finds nothing to
            // take.
            done = self.changed.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
        done
    }

    fn lock(&self) -> MutexGuard<'_, Done> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the checksum of a chunk from those of its parts. All parts but the first have the
    /// same length.
    fn combined(&self, sums: &[u64]) -> u64 {
        sums.iter().copied().reduce(|sum, part| combine(sum, part, self.part as u64)).unwrap_or_default()
    }

    fn work(&self) {
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= self.parts {
                return;
            }
            let sum = self.sum(self.range(part));
            let mut done = self.lock();
            match sum {
                Ok(sum) => {
                    if let Some(place) = done.sums.get_mut(part) {
                        *place = sum;
                    }
                }
                Err(e) => done.failed = Some(e),
            }
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.changed.notify_all();
            }
        }
    }

    /// Returns the range of a part in the region.
    fn range(&self, part: usize) -> Range<usize> {
        let each = CHUNK_BYTES / self.part;
        let (chunk, number) = (part / each, part % each);
        let (from, to) = (chunk * CHUNK_BYTES, ((chunk + 1) * CHUNK_BYTES).min(self.bytes));
        let behind = ((to - from).div_ceil(self.part) - 1 - number) * self.part;
        let end = to - behind;
        end.saturating_sub(self.part).max(from)..end
    }

    /// Copies the lazy sources in a range if the pass copies, and returns the checksum of the
    /// range.
    fn sum(&self, Range { start: from, end: to }: Range<usize>) -> io::Result<u64> {
        let first = self.pieces.partition_point(|(at, s)| at + s.bytes <= from);
        let mut sum = Running::default();
        for (at, source) in self.pieces.iter().skip(first).take_while(|(at, _)| *at < to) {
            let (start, end) = ((*at).max(from), (at + source.bytes).min(to));
            if source.eager {
                // SAFETY: an eager source was in the slot before the pass began, the pass does not
                // write there, and the caller of `new` guarantees that no other thread does.
                sum.read(unsafe { self.slot.still_region(start, end - start) }.unwrap_or_default());
                continue;
            }
            let address = (source.address + (start - at)) as *const u8;
            // SAFETY: within the source (start >= at, end <= at + bytes), which the caller of `new`
            // keeps readable; each part belongs to one thread, and only this pass uses the slot.
            unsafe {
                if self.copies {
                    self.slot.sum_from(start, address, end - start, &mut sum)?;
                } else {
                    sum.read(std::slice::from_raw_parts(address, end - start));
                }
            }
        }
        fence();
        Ok(sum.value())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::arena::slot_bytes;
    use crate::copiers::FOREGROUND;
    use crate::format::digest::crc;

    /// Checks that the checksums are those of the chunks, no matter how the work is shared.
    #[test]
    fn parts_are_combined_to_chunks() {
        let directory = tempfile::tempdir().unwrap();
        let sizes =
            [1, 65_535, 65_536, 65_537, 1_000_000, CHUNK_BYTES, CHUNK_BYTES + 1, SMALL_BYTES - 3, SMALL_BYTES + 3];
        for bytes in sizes {
            let data: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
            let slot =
                Slot::reserve(&directory.path().join(bytes.to_string()), slot_bytes(bytes as u64, 4096)).unwrap();
            let slot = Arc::new(slot);
            let cut = bytes / 3;
            let source = |from: usize, to: usize| Source {
                address: data[from..].as_ptr() as usize,
                bytes: to - from,
                eager: false,
            };
            let pieces: Arc<[_]> = [(0, source(0, cut)), (cut, source(cut, bytes))].into();
            for (threads, copies) in [(1, true), (3, true), (2, false)] {
                // SAFETY: `data` outlives the pass, and only this thread's pass uses the slot.
                let pass = unsafe { Pass::new(Arc::clone(&slot), bytes, Arc::clone(&pieces), copies) };
                let expected: Vec<u64> = data.chunks(CHUNK_BYTES).map(crc).collect();
                assert_eq!(pass.run(threads, &FOREGROUND).unwrap(), expected, "{bytes}");
            }
            let mut copy = vec![0; bytes];
            assert!(slot.load(0, &mut copy) && copy == data, "{bytes}");
        }
    }
}
