//! Capture: tensors → slot, one copy, several threads, checksums while the bytes are in cache.
//!
//! Two phases (CheckFreq §4.1): what changes outside the optimizer is copied before `step()`
//! returns; parameters and optimizer state are copied while the next iteration computes, and the
//! next weight update waits for them ([`Capture::wait`], the fence).

use crate::arena::{Label, Pin, REGION_AT, Slot};
use crate::board::Board;
use crate::format::digest::CHUNK_BYTES;
use crate::format::index::{Index, Tensor};
use crate::fused::Running;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// Memory of one tensor: contiguous, on the host, and kept alive and unchanged until the capture is done.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Address of the first byte.
    pub address: usize,
    /// Length in bytes.
    pub bytes: usize,
    /// Changes outside the optimizer: copied before [`start`] returns.
    pub eager: bool,
}

/// A capture on its way.
#[derive(Debug)]
pub struct Capture {
    thread: Option<JoinHandle<io::Result<()>>>,
    step: u64,
}

/// What to capture.
#[derive(Debug)]
pub struct Plan {
    /// The tensors, in the order of their bytes in the region.
    pub tensors: Vec<Tensor>,
    /// Their memory, in the same order.
    pub sources: Vec<Source>,
    /// Whose, and which step.
    pub label: Label,
    /// Keep the slot until it is on durable storage.
    pub persist: bool,
    /// Threads that copy.
    pub threads: usize,
    /// Nobody waits for it yet: whatever else wants a core goes first.
    pub background: bool,
}

/// Nice value of threads that copy while the next iteration computes.
const BACKGROUND: i32 = 10;

/// Starts to fill `slot`.
///
/// # Safety
/// Every source must stay readable and, unless eager, unchanged until [`Capture::wait`] returns.
///
/// # Errors
/// `StorageFull` when the state has outgrown the slot; `ResourceBusy` when somebody has just pinned it.
pub unsafe fn start(slot: Arc<Slot>, plan: Plan, board: Option<Arc<Board>>) -> io::Result<Capture> {
    let alike = plan.sources.iter().take_while(|s| !s.eager).map(|s| s.bytes).sum();
    let filling = Filling::begin(slot, plan.tensors, plan.label, plan.persist, alike)?;
    let slot = &filling.slot;
    let mut at = 0;
    let mut pieces = Vec::with_capacity(plan.sources.len());
    for source in &plan.sources {
        if source.eager {
            // SAFETY: the caller promises that the source is readable.
            unsafe { slot.map().write_from(REGION_AT + at, source.address as *const u8, source.bytes)? };
        }
        if source.bytes > 0 {
            pieces.push((at, *source));
        }
        at += source.bytes;
    }
    let (threads, background, step) = (plan.threads.max(1), plan.background, plan.label.step);
    let thread = std::thread::Builder::new().name("everstep-capture".into()).spawn(move || {
        if background {
            // This thread's alone, and that of its helpers.
            let _ = rustix::process::setpriority_process(None, BACKGROUND);
        }
        let crcs = copy_chunks(&filling.slot, at, &pieces, threads)?;
        filling.finish(crcs, board.as_deref())
    })?;
    Ok(Capture { thread: Some(thread), step })
}

/// A slot that is being filled: by [`start`], or by a device with copies of its own.
#[derive(Debug)]
pub struct Filling {
    slot: Arc<Slot>,
    index: Index,
    label: Label,
    persist: bool,
    alike: usize,
}

impl Filling {
    /// Takes a slot for `tensors`, one behind the other from [`Filling::place`] on. The first `alike` bytes are what ranks
    /// with the same state have in common: what the optimizer updates, and its state.
    ///
    /// # Errors
    /// As [`start`].
    pub fn begin(slot: Arc<Slot>, tensors: Vec<Tensor>, label: Label, persist: bool, alike: usize) -> io::Result<Self> {
        let index = Index::new(tensors).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e.to_string()))?;
        let index_bytes = serde_json::to_vec(&index).map_err(io::Error::other)?.len() + index.chunks() * 21;
        if !slot.fits(index.bytes(), index_bytes as u64) {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "the state has outgrown its slot"));
        }
        if !slot.begin() {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        Ok(Filling { slot, index, label, persist, alike })
    }

    /// Where the first tensor begins, and the bytes of all.
    ///
    /// # Errors
    /// When the slot is shorter than it says.
    pub fn place(&self) -> io::Result<(usize, usize)> {
        let bytes = usize::try_from(self.index.bytes()).map_err(io::Error::other)?;
        Ok((self.slot.map().target(REGION_AT, bytes)? as usize, bytes))
    }

    /// Everything is there: checksums, then the seal.
    ///
    /// # Errors
    /// When the index does not fit; the slot then holds nothing.
    pub fn seal(self, threads: usize, board: Option<&Board>) -> io::Result<()> {
        let (address, bytes) = self.place()?;
        let all = [(0, Source { address, bytes, eager: true })];
        let crcs = copy_chunks(&self.slot, bytes, &all, threads.max(1))?;
        self.finish(crcs, board)
    }

    fn finish(mut self, crcs: Vec<u64>, board: Option<&Board>) -> io::Result<()> {
        self.index = self.index.with_checksums(crcs).map_err(io::Error::other)?;
        let json = serde_json::to_vec(&self.index).map_err(io::Error::other)?;
        self.slot.describe(self.label, &json, self.index.bytes())?;
        if self.label.shared && self.alike > 0 {
            self.slot.note_digest(digest(&self.slot, self.index.crcs(), self.alike));
        }
        self.slot.finish(self.persist.then_some(Pin::Persist));
        if let Some(board) = board {
            board.announce_sealed(self.label.step);
        }
        Ok(())
    }
}

/// Tells the first bytes of a region: the checksums of its chunks are there, what lies in half of one is read again.
fn digest(slot: &Slot, crcs: &[u64], bytes: usize) -> u64 {
    let (whole, rest) = (bytes / CHUNK_BYTES, bytes % CHUNK_BYTES);
    let mut sum = Running::default();
    crcs.iter().take(whole).for_each(|crc| sum.read(&crc.to_le_bytes()));
    sum.read(slot.map().bytes(REGION_AT + whole * CHUNK_BYTES, rest).unwrap_or_default());
    sum.read(&bytes.to_le_bytes());
    sum.value()
}

/// Copies the lazy pieces chunk by chunk, each byte read once, and returns the checksum of every chunk.
fn copy_chunks(slot: &Slot, bytes: usize, pieces: &[(usize, Source)], threads: usize) -> io::Result<Vec<u64>> {
    let chunks = bytes.div_ceil(CHUNK_BYTES);
    let next = AtomicUsize::new(0);
    let work = || -> io::Result<Vec<(usize, u64)>> {
        let mut done = Vec::new();
        loop {
            let chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= chunks {
                return Ok(done);
            }
            let (from, to) = (chunk * CHUNK_BYTES, ((chunk + 1) * CHUNK_BYTES).min(bytes));
            let first = pieces.partition_point(|(at, s)| at + s.bytes <= from);
            let mut sum = Running::default();
            for (at, source) in pieces[first..].iter().take_while(|(at, _)| *at < to) {
                let (start, end) = ((*at).max(from), (at + source.bytes).min(to));
                if source.eager {
                    sum.read(slot.map().bytes(REGION_AT + start, end - start).unwrap_or_default());
                    continue;
                }
                // SAFETY: within the source (start >= at, end <= at + bytes), which the caller of `start` keeps readable.
                unsafe {
                    let address = (source.address + (start - at)) as *const u8;
                    slot.map().sum_from(REGION_AT + start, address, end - start, &mut sum)?;
                }
            }
            done.push((chunk, sum.value()));
        }
    };
    let parts = std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads.min(chunks)).map(|_| scope.spawn(work)).collect();
        let mut parts = vec![work()];
        parts.extend(helpers.into_iter().map(|h| h.join().unwrap_or_else(|_| Err(io::Error::other("copy panicked")))));
        parts
    });
    let mut all = Vec::with_capacity(chunks);
    for part in parts {
        all.extend(part?);
    }
    all.sort_unstable();
    Ok(all.into_iter().map(|(_, crc)| crc).collect())
}

impl Capture {
    /// The step being captured.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// True when nothing is left to wait for.
    #[must_use]
    pub fn done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the slot is sealed.
    ///
    /// # Errors
    /// Those of the capture; the slot then holds nothing.
    pub fn wait(&mut self) -> io::Result<()> {
        match self.thread.take() {
            Some(thread) => thread.join().unwrap_or_else(|_| Err(io::Error::other("capture panicked"))),
            None => Ok(()),
        }
    }
}
