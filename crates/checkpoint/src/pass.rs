//! One pass over the sources of a capture, chunk by chunk and by several threads: copies and sums, or sums only.

use crate::arena::{REGION_AT, Slot};
use crate::capture::Source;
use crate::copiers::Copiers;
use crate::format::digest::CHUNK_BYTES;
use crate::fused::{Running, fence};
use crate::memory::Memory;
use crate::shm::Mapping;
use std::hint::spin_loop;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Who shares a pass, and what has come of it.
pub struct Pass<M = Mapping> {
    slot: Arc<Slot<M>>,
    bytes: usize,
    /// Offset in the region and memory of each source; shared by the passes of one capture.
    pieces: Arc<[(usize, Source)]>,
    copies: bool,
    next: AtomicUsize,
    /// Chunks that are not complete. It changes under the lock of `done`.
    left: AtomicUsize,
    done: Mutex<Done>,
    complete: Condvar,
}

struct Done {
    sums: Vec<u64>,
    failed: Option<io::Error>,
}

impl<M: Memory + 'static> Pass<M> {
    /// Over `bytes` of the region. `copies`: lazy sources go into the slot on the way; else they are only read.
    ///
    /// # Safety
    /// The sources must stay readable until [`Pass::run`] returns, and so long nobody else may use the slot.
    pub unsafe fn new(slot: Arc<Slot<M>>, bytes: usize, pieces: Arc<[(usize, Source)]>, copies: bool) -> Self {
        let chunks = bytes.div_ceil(CHUNK_BYTES);
        let done = Mutex::new(Done { sums: vec![0; chunks], failed: None });
        let (next, left) = (AtomicUsize::new(0), AtomicUsize::new(chunks));
        Pass { slot, bytes, pieces, copies, next, left, done, complete: Condvar::new() }
    }

    /// Does it with up to `threads` threads, this one included, and returns the checksum of every chunk.
    ///
    /// # Errors
    /// When the region lies outside the slot.
    pub fn run(self, threads: usize, copiers: &'static Copiers) -> io::Result<Vec<u64>> {
        let pass = Arc::new(self);
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

    /// Does what nobody has begun, and returns the checksum of every chunk when all are complete. Does not give the
    /// processor away for `patience`.
    ///
    /// # Errors
    /// When the region lies outside the slot.
    pub fn finish(&self, patience: Duration) -> io::Result<Vec<u64>> {
        self.work();
        let began = Instant::now();
        while self.left.load(Ordering::Acquire) > 0 && began.elapsed() < patience {
            spin_loop();
        }
        let mut done = self.lock();
        while self.left.load(Ordering::Acquire) > 0 {
            // What a helper has taken it will finish; one that comes late finds nothing to take.
            done = self.complete.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
        match done.failed.take() {
            Some(e) => Err(e),
            None => Ok(std::mem::take(&mut done.sums)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Done> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let chunk = self.next.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.bytes.div_ceil(CHUNK_BYTES) {
                return;
            }
            let sum = self.chunk(chunk);
            let mut done = self.lock();
            match sum {
                Ok(sum) => {
                    if let Some(place) = done.sums.get_mut(chunk) {
                        *place = sum;
                    }
                }
                Err(e) => done.failed = Some(e),
            }
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.complete.notify_all();
            }
        }
    }

    fn chunk(&self, chunk: usize) -> io::Result<u64> {
        let (from, to) = (chunk * CHUNK_BYTES, ((chunk + 1) * CHUNK_BYTES).min(self.bytes));
        let first = self.pieces.partition_point(|(at, s)| at + s.bytes <= from);
        let mut sum = Running::default();
        for (at, source) in self.pieces.iter().skip(first).take_while(|(at, _)| *at < to) {
            let (start, end) = ((*at).max(from), (at + source.bytes).min(to));
            if source.eager {
                // SAFETY: an eager source is in the slot since before the pass, which does not write there.
                sum.read(unsafe { self.slot.region(start, end - start) }.unwrap_or_default());
                continue;
            }
            let address = (source.address + (start - at)) as *const u8;
            // SAFETY: within the source (start >= at, end <= at + bytes), which the caller of `new` keeps readable; each chunk
            // is one thread's, and the slot is the pass's alone.
            unsafe {
                if self.copies {
                    self.slot.memory().sum_from(REGION_AT + start, address, end - start, &mut sum)?;
                } else {
                    sum.read(std::slice::from_raw_parts(address, end - start));
                }
            }
        }
        fence();
        Ok(sum.value())
    }
}
