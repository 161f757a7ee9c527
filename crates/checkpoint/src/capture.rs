//! Capture: tensors → slot, one copy, several threads, checksums while the bytes are in cache.
//!
//! Two phases (CheckFreq §4.1): what changes outside the optimizer is copied before `step()`
//! returns; parameters and optimizer state are copied while the next iteration computes, and the
//! next weight update waits for them ([`Capture::wait`], the fence).
//!
//! In that window the script may write to its weights in ways that go unnoticed (`p.data`, a NumPy
//! view, a kernel). So, with [`Plan::compare`], checksums of what is copied late are computed
//! before [`start`] returns, which takes a read instead of a copy. If those of the copy differ, the
//! capture is [`Torn`] and the slot is not sealed.

mod pass;

use crate::arena::{Label, Pin, Slot, Writing};
use crate::copiers::{BACKGROUND, FOREGROUND};
use crate::copy_crc::Running;
use crate::format::digest::CHUNK_BYTES;
use crate::format::index::{Index, Tensor};
use crate::format::readable::Header;
use crate::memory::Memory;
use crate::shm::Mapping;
use crate::step_board::Board;
use pass::Pass;
use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// Memory of one tensor: contiguous, on the host, and kept alive until the capture is done.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Address of the first byte in this process.
    pub address: usize,
    /// Length in bytes.
    pub bytes: usize,
    /// Whether it changes outside the optimizer, so that it is copied before [`start`] returns.
    pub eager: bool,
}

/// The state was written to while it was copied.
#[derive(Debug, thiserror::Error)]
#[error("{chunks} of {of} MiB were written to while they were copied")]
pub struct Torn {
    /// Number of chunks that differ from what they were when the step ended.
    pub chunks: usize,
    /// Number of chunks of the snapshot.
    pub of: usize,
}

/// A capture in progress.
#[derive(Debug)]
pub struct Capture {
    running: Option<Receiver<io::Result<()>>>,
}

/// How the index of every capture begins.
const INDEX_BEGINS: &[u8] = b"{\"tensors\":[";

/// Tensors as a slot's index lists them, encoded once for many captures.
#[derive(Clone, Debug, Default)]
pub struct Described {
    /// JSON of the tensors that all captures have.
    shared: Arc<[u8]>,
    /// JSON of the values that were added for one capture.
    own: Vec<u8>,
    bytes: u64,
    header: Header,
}

impl Described {
    /// Describes these tensors, in the order of their bytes.
    ///
    /// # Errors
    /// `InvalidInput` when readers would refuse them; otherwise the same as for
    /// [`Described::push`].
    pub fn of(tensors: &[Tensor]) -> io::Result<Self> {
        Index::new(tensors.to_vec()).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e.to_string()))?;
        let mut described = Described::default();
        described.push(tensors)?;
        described.shared = std::mem::take(&mut described.own).into();
        Ok(described)
    }

    /// Appends tensors or values. Their names must not be in use yet.
    ///
    /// # Errors
    /// Fails when a name cannot be written as JSON.
    pub fn push(&mut self, tensors: &[Tensor]) -> io::Result<()> {
        for tensor in tensors {
            if self.json_bytes() > 0 {
                self.own.push(b',');
            }
            serde_json::to_writer(&mut self.own, tensor).map_err(io::Error::other)?;
            self.bytes += tensor.bytes;
            self.header.add(tensor);
        }
        Ok(())
    }

    fn json_bytes(&self) -> usize {
        self.shared.len() + self.own.len()
    }

    fn chunks(&self) -> usize {
        usize::try_from(self.bytes.div_ceil(CHUNK_BYTES as u64)).unwrap_or(usize::MAX)
    }

    /// Returns the JSON of an [`Index`] after [`INDEX_BEGINS`] in two parts: the tensors that all
    /// captures have, and the rest.
    fn index(&self, crcs: &[u64]) -> io::Result<(&[u8], Vec<u8>)> {
        let mut rest = Vec::with_capacity(self.own.len() + crcs.len() * 21 + 32);
        rest.extend_from_slice(&self.own);
        rest.extend_from_slice(b"],\"crcs\":");
        serde_json::to_writer(&mut rest, crcs).map_err(io::Error::other)?;
        rest.push(b'}');
        Ok((&self.shared, rest))
    }
}

/// What to capture.
#[derive(Debug)]
pub struct Plan {
    /// The tensors, in the order of their bytes in the region.
    pub tensors: Described,
    /// Their memory, in the same order.
    pub sources: Vec<Source>,
    /// Whose state it is, and of which step.
    pub label: Label,
    /// Whether to pin the slot until it is on durable storage.
    pub persist: bool,
    /// Number of threads that copy, including the calling one.
    pub threads: usize,
    /// Whether to copy while the next iteration computes; otherwise the copy is complete when
    /// [`start`] returns.
    pub background: bool,
    /// Whether to compare a background copy with the state at the time [`start`] returned.
    pub compare: bool,
}

/// Returns the number of bytes that ranks with the same state have in common: those before the
/// first source that changes outside the optimizer.
fn alike(sources: &[Source]) -> usize {
    sources.iter().take_while(|s| !s.eager).map(|s| s.bytes).sum()
}

/// Returns the sources that are not empty with their offsets in the region, and their total bytes.
fn in_order(sources: &[Source]) -> (Vec<(usize, Source)>, usize) {
    let mut end = 0;
    let mut pieces = Vec::with_capacity(sources.len());
    for source in sources.iter().filter(|s| s.bytes > 0) {
        pieces.push((end, *source));
        end += source.bytes;
    }
    (pieces, end)
}

/// Sources in the form that [`Early::begin`] takes, prepared once for many captures.
#[derive(Clone, Debug)]
pub struct InOrder {
    pieces: Arc<[(usize, Source)]>,
    bytes: usize,
    alike: usize,
}

impl InOrder {
    /// Prepares these sources, which are in the order of their bytes in the region.
    #[must_use]
    pub fn of(sources: &[Source]) -> Self {
        let (mut pieces, bytes) = in_order(sources);
        // One pass copies all of them: every early copy is complete before training goes on.
        pieces.iter_mut().for_each(|(_, source)| source.eager = false);
        InOrder { pieces: pieces.into(), bytes, alike: alike(sources) }
    }
}

/// Starts to fill `slot`.
///
/// # Safety
/// Every source must stay readable until [`Capture::wait`] returns, and lie outside the slot. The
/// caller may write the slot until then, as [`Slot::begin`] requires.
///
/// # Errors
/// `StorageFull` when the state has outgrown the slot; `ResourceBusy` when it has just been pinned
/// or begun to be read.
pub unsafe fn start<M: Memory + 'static>(
    slot: Arc<Slot<M>>,
    plan: Plan,
    board: Option<Arc<Board>>,
) -> io::Result<Capture> {
    // SAFETY: the caller guarantees that no other thread writes the slot until it is sealed or
    // dropped.
    let filling = unsafe { Filling::begin(slot, plan.tensors, plan.label, plan.persist, alike(&plan.sources))? };
    let slot = Arc::clone(filling.slot.slot());
    let (pieces, bytes) = in_order(&plan.sources);
    for (at, source) in pieces.iter().filter(|(_, s)| s.eager) {
        // SAFETY: the caller keeps the source readable until the capture is done, and `filling` is
        // the only writer of this slot.
        unsafe { slot.copy_from(*at, source.address as *const u8, source.bytes)? };
    }
    let (threads, pieces): (usize, Arc<[_]>) = (plan.threads.max(1), pieces.into());
    // SAFETY: the caller keeps the sources readable until the capture is done.
    let pass = |copies| unsafe { Pass::new(Arc::clone(&slot), bytes, Arc::clone(&pieces), copies) };
    if !plan.background {
        let crcs = pass(true).run(threads, &FOREGROUND)?;
        filling.finish(&crcs, board.as_deref())?;
        return Ok(Capture { running: None });
    }
    let expected = if plan.compare { Some(pass(false).run(threads, &FOREGROUND)?) } else { None };
    let copy = pass(true);
    let (sender, running) = channel();
    let job = Box::new(move || {
        let copied = copy.run(threads, &BACKGROUND).and_then(|crcs| {
            let wrong = expected.map_or(0, |e| e.iter().zip(&crcs).filter(|(a, b)| a != b).count());
            if wrong > 0 {
                return Err(io::Error::other(Torn { chunks: wrong, of: crcs.len() }));
            }
            filling.finish(&crcs, board.as_deref())
        });
        let _ = sender.send(copied);
    });
    if let Err(job) = BACKGROUND.submit(job) {
        job();
    }
    Ok(Capture { running: Some(running) })
}

/// How long the training thread spins for the rest of an early copy before it yields its processor:
/// in a virtual machine, waking up takes as long as copying 300 kB. Zero on a machine with one
/// processor, which the copy needs.
static PATIENCE: LazyLock<Duration> = LazyLock::new(|| {
    let alone = std::thread::available_parallelism().is_ok_and(|n| n.get() == 1);
    if alone { Duration::ZERO } else { Duration::from_micros(100) }
});

/// A copy that another thread has begun while the values behind the tensors are still being
/// collected.
///
/// Dropping it waits until no thread reads the sources any more; the slot is then empty.
pub struct Early<M: Memory + 'static = Mapping> {
    filling: Option<Filling<M>>,
    pass: Arc<Pass<M>>,
}

impl<M: Memory + 'static> Early<M> {
    /// Takes `slot` and lets another thread begin to copy. Nothing is sealed before
    /// [`Early::finish`].
    ///
    /// # Safety
    /// The same as for [`start`], until `finish` returns or this is dropped. Until then the sources
    /// must not change either.
    ///
    /// # Errors
    /// The same as for [`start`].
    pub unsafe fn begin(
        slot: Arc<Slot<M>>,
        tensors: Described,
        sources: &InOrder,
        label: Label,
        persist: bool,
    ) -> io::Result<Self> {
        // SAFETY: the caller guarantees that no other thread writes the slot until it is sealed or
        // dropped.
        let filling = unsafe { Filling::begin(slot, tensors, label, persist, sources.alike)? };
        // SAFETY: the caller keeps the sources readable and unchanged, and `filling` alone writes
        // the slot.
        let pass =
            unsafe { Pass::new(Arc::clone(filling.slot.slot()), sources.bytes, Arc::clone(&sources.pieces), true) };
        let pass = Arc::new(pass);
        pass.begin(1, &FOREGROUND);
        Ok(Early { filling: Some(filling), pass })
    }

    /// Completes the copy, adds these values behind it, and seals the slot.
    ///
    /// # Errors
    /// The same as for [`start`]; the slot is then empty.
    pub fn finish(mut self, values: Vec<(Tensor, &[u8])>, board: Option<&Board>) -> io::Result<()> {
        let mut crcs = self.pass.finish(*PATIENCE)?;
        let Some(mut filling) = self.filling.take() else { return Ok(()) };
        let mut at = usize::try_from(filling.tensors.bytes).map_err(io::Error::other)?;
        let (described, values): (Vec<Tensor>, Vec<&[u8]>) = values.into_iter().unzip();
        filling.tensors.push(&described)?;
        check(&filling.slot, &filling.tensors)?;
        for mut bytes in values {
            while !bytes.is_empty() {
                let (piece, rest) = bytes.split_at(bytes.len().min(CHUNK_BYTES - at % CHUNK_BYTES));
                let mut sum = if at.is_multiple_of(CHUNK_BYTES) { None } else { crcs.pop() }
                    .map_or_else(Running::default, Running::after);
                filling.slot.store(at, piece)?;
                sum.read(piece);
                crcs.push(sum.value());
                at += piece.len();
                bytes = rest;
            }
        }
        filling.finish(&crcs, board)
    }
}

impl<M: Memory + 'static> Drop for Early<M> {
    fn drop(&mut self) {
        self.pass.wait();
    }
}

/// A slot that is being filled: by [`start`], or by a device with copies of its own.
#[derive(Debug)]
pub struct Filling<M: Memory = Mapping> {
    slot: Writing<M>,
    tensors: Described,
    label: Label,
    persist: bool,
    alike: usize,
}

impl<M: Memory + 'static> Filling<M> {
    /// Takes a slot for `tensors`, one after the other from [`Filling::place`] on. The first
    /// `alike` bytes are what ranks with the same state have in common: what the optimizer updates,
    /// and its state.
    ///
    /// # Safety
    /// The same as for [`Slot::begin`].
    ///
    /// # Errors
    /// The same as for [`start`].
    pub unsafe fn begin(
        slot: Arc<Slot<M>>,
        tensors: Described,
        label: Label,
        persist: bool,
        alike: usize,
    ) -> io::Result<Self> {
        check(&slot, &tensors)?;
        // SAFETY: the caller guarantees that no other thread writes the slot until it is sealed or
        // dropped.
        let slot = unsafe { slot.begin() }.ok_or(io::ErrorKind::ResourceBusy)?;
        Ok(Filling { slot, tensors, label, persist, alike })
    }

    /// Returns the address of the first tensor, and the total bytes of all tensors.
    ///
    /// # Errors
    /// Fails when the slot is too short for them.
    pub fn place(&self) -> io::Result<(usize, usize)> {
        let bytes = usize::try_from(self.tensors.bytes).map_err(io::Error::other)?;
        Ok((self.slot.region_address(bytes)?, bytes))
    }

    /// Computes the checksums of a filled slot, then seals it.
    ///
    /// # Errors
    /// Fails when the index does not fit; the slot is then empty.
    pub fn seal(self, threads: usize, board: Option<&Board>) -> io::Result<()> {
        let (address, bytes) = self.place()?;
        let all: Arc<[_]> = Arc::new([(0, Source { address, bytes, eager: true })]);
        // SAFETY: the source is the slot itself, which `self` keeps mapped and is the only one to
        // write. A device or system call that has filled it through its address has finished before
        // it is sealed.
        let pass = unsafe { Pass::new(Arc::clone(self.slot.slot()), bytes, all, false) };
        let crcs = pass.run(threads.max(1), &BACKGROUND)?;
        self.finish(&crcs, board)
    }

    fn finish(self, crcs: &[u64], board: Option<&Board>) -> io::Result<()> {
        let (shared, rest) = self.tensors.index(crcs)?;
        self.slot.describe_in_parts(self.label, &[INDEX_BEGINS, shared, &rest], self.tensors.bytes)?;
        if self.label.shared && self.alike > 0 {
            self.slot.note_digest(digest(&self.slot, crcs, self.alike));
        }
        self.slot.seal(self.persist.then_some(Pin::Persist));
        if let Some(board) = board {
            board.announce_sealed(self.label.step);
        }
        Ok(())
    }
}

/// Checks that readers accept the tensors, and that they fit into the slot.
fn check<M: Memory>(slot: &Slot<M>, tensors: &Described) -> io::Result<()> {
    let index_bytes = tensors.json_bytes() + tensors.chunks() * 21 + 32;
    let readable = tensors.header.check(tensors.json_bytes() as u64, tensors.bytes);
    readable.map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
    if !slot.fits(tensors.bytes, index_bytes as u64) {
        return Err(io::Error::new(io::ErrorKind::StorageFull, "the state has outgrown its slot"));
    }
    Ok(())
}

/// Returns a digest of the first `bytes` of a region. Whole chunks have checksums already; the
/// bytes of a partial one are read again.
fn digest<M: Memory>(slot: &Slot<M>, crcs: &[u64], bytes: usize) -> u64 {
    let (whole, rest) = (bytes / CHUNK_BYTES, bytes % CHUNK_BYTES);
    let mut sum = Running::default();
    crcs.iter().take(whole).for_each(|crc| sum.read(&crc.to_le_bytes()));
    // SAFETY: the slot is complete and not sealed yet: its only writer, a `Writing` that the caller
    // owns, does not write any more, and no other thread can begin to write.
    sum.read(unsafe { slot.still_region(whole * CHUNK_BYTES, rest) }.unwrap_or_default());
    sum.read(&bytes.to_le_bytes());
    sum.value()
}

impl Capture {
    /// Returns whether there is nothing left to wait for: the copy was complete when [`start`]
    /// returned, or [`Capture::wait`] was called.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.running.is_none()
    }

    /// Waits until the slot is sealed.
    ///
    /// # Errors
    /// Those of the capture ([`Torn`] among them); the slot is then empty.
    pub fn wait(&mut self) -> io::Result<()> {
        match self.running.take() {
            Some(running) => running.recv().unwrap_or_else(|_| Err(io::Error::other("capture panicked"))),
            None => Ok(()),
        }
    }
}
