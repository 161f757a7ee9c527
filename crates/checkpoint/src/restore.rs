//! Restore: from a slot or a shard file into tensors. Every chunk is verified in the pass that
//! copies it; a damaged one is reported, so that it can be fetched from elsewhere.

use crate::arena::{Label, Slot, SlotError};
use crate::copy_crc::Running;
use crate::direct_io::ALIGN;
use crate::format::digest::{CHUNK_BYTES, combine_chunks, crc};
use crate::format::index::Index;
use crate::format::shard::{
    CHUNKS_KEY, Lines, PLACES_KEY, VALUES_KEY, chunks_from_text, parse_safetensors_header, values_from_text,
};
use crate::format::tensor_parts::Places;
use crate::persist::at;
pub use crate::read_plan::Readers;
use crate::read_plan::touched;
use crate::shard_source::ShardSource;
use everstep_core::message::ShardFile;
use everstep_wire::limits::HEADER_BYTES_MAX;
use memmap2::MmapMut;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Why a shard cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// path of the file
        path: String,
        /// error of the system
        source: std::io::Error,
    },
    /// The file differs from what was written.
    #[error("{path} is damaged: {what}")]
    Damaged {
        /// path of the file
        path: String,
        /// description of the damage
        what: String,
    },
    /// Some chunks of the region differ from what was written.
    #[error("{path} is damaged: {} chunks of 1 MiB, the first is number {}", chunks.len(), chunks.first().unwrap_or(&0))]
    Chunks {
        /// path of the file
        path: String,
        /// numbers of the chunks
        chunks: Vec<usize>,
    },
}

/// Why a tensor cannot be read into the memory of a model.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// The checkpoint has no such tensor.
    #[error("{0} is not in the checkpoint")]
    Unknown(String),
    /// The tensor has another size.
    #[error("{name} has {bytes} bytes in the checkpoint, {room} in the model")]
    Room {
        /// name of the tensor
        name: String,
        /// length of the tensor in bytes
        bytes: u64,
        /// length of the memory in bytes
        room: usize,
    },
}

/// Memory that a part of the region is copied to.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Offset of the part in the region.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Address of the first byte.
    pub address: usize,
}

enum Bytes {
    /// A slot that may be written at any time. Its bytes are copied word by word before they are
    /// used.
    Slot(Arc<Slot>),
    /// A slot that is not written. Its bytes are used in place.
    StillSlot(Arc<Slot>),
    /// A file or object, and the aligned offset at which its region begins.
    Stored(ShardSource, u64),
}

/// A shard whose index is verified. Its chunks are verified when they are read.
pub struct Shard {
    bytes: Bytes,
    index: Index,
    path: String,
    places: Option<Places>,
    /// Checksums of values that can be read alone, by their offsets.
    values: BTreeMap<u64, u64>,
}

/// Data from reading the header of a shard, kept to read the next one faster.
#[derive(Debug, Default)]
pub struct Headers {
    lines: Lines,
    /// Memory that a header was read into.
    room: Option<MmapMut>,
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Shard {
    /// Opens a slot.
    ///
    /// # Errors
    /// The same as for [`Slot::inspect`].
    pub fn from_slot(slot: Arc<Slot>) -> Result<(Self, Label), SlotError> {
        Self::of_slot(&slot, Bytes::Slot(slot.clone()))
    }

    /// Does what [`Shard::from_slot`] does, but reads the slot in place, without an intermediate
    /// copy. For workers, which restore from slots that only they write: a reader's count
    /// ([`Slot::read`]) would stay in the slot if a worker died while its agent lives.
    ///
    /// # Safety
    /// No thread writes the region of the slot while the shard reads it, in this process or
    /// another.
    ///
    /// # Errors
    /// The same as for [`Slot::inspect`].
    pub unsafe fn from_still_slot(slot: Arc<Slot>) -> Result<(Self, Label), SlotError> {
        Self::of_slot(&slot, Bytes::StillSlot(slot.clone()))
    }

    fn of_slot(slot: &Slot, bytes: Bytes) -> Result<(Self, Label), SlotError> {
        let (label, index) = slot.inspect()?;
        let path = slot.path().display().to_string();
        Ok((Shard { bytes, index, path, places: None, values: BTreeMap::new() }, label))
    }

    /// Opens a shard file; its header, which has the checksums of the chunks, is verified against
    /// the manifest's entry.
    ///
    /// # Errors
    /// [`RestoreError`].
    pub fn from_file(directory: &Path, entry: &ShardFile) -> Result<Self, RestoreError> {
        Self::from_file_after(directory, entry, &mut Headers::default())
    }

    /// Does what [`Shard::from_file`] does for one of many shards. It costs less if the header has
    /// the same lines as the one `before`.
    ///
    /// # Errors
    /// The same as for [`Shard::from_file`].
    pub fn from_file_after(directory: &Path, entry: &ShardFile, before: &mut Headers) -> Result<Self, RestoreError> {
        let path = directory.join(&entry.file);
        let name = path.display().to_string();
        let unreadable = |source| RestoreError::Unreadable { path: name.clone(), source };
        let damaged = |what: &str| RestoreError::Damaged { path: name.clone(), what: what.into() };
        let storage = at(directory).map_err(unreadable)?;
        if !storage.may_hold(&entry.file) {
            return Err(damaged("its manifest names a file outside the checkpoint"));
        }
        let source = storage.shard(&entry.file).map_err(unreadable)?;
        let length = source.bytes().map_err(unreadable)?;
        if length != entry.bytes {
            return Err(damaged(&format!("{length} bytes long, {} were written", entry.bytes)));
        }
        // The first page contains the length of the header, which is mostly that of the last one.
        let Headers { lines, room } = before;
        let mut memory = match room.take() {
            Some(memory) => memory,
            None => MmapMut::map_anon(ALIGN).map_err(unreadable)?,
        };
        let mut got = source.read(&mut memory, 0).map_err(unreadable)?;
        let head = memory.first_chunk::<8>().filter(|_| got >= 8).map(|h| u64::from_le_bytes(*h));
        let head = head.ok_or_else(|| damaged("too short"))?;
        let region_at = head.checked_add(8).filter(|n| head <= HEADER_BYTES_MAX && *n <= length);
        let region_at = region_at.filter(|n| n.is_multiple_of(ALIGN as u64)).ok_or_else(|| damaged("header length"))?;
        let header_bytes = usize::try_from(region_at).map_err(|_| damaged("header length"))?;
        if got < header_bytes {
            memory = MmapMut::map_anon(header_bytes).map_err(unreadable)?;
            got = source.read(&mut memory, 0).map_err(unreadable)?;
        }
        let header = memory.get(..header_bytes).filter(|_| got >= header_bytes).ok_or_else(|| damaged("too short"))?;
        let json = header.get(8..).unwrap_or_default();
        let (index, metadata) = parse_safetensors_header(json, lines).map_err(|e| damaged(&e.to_string()))?;
        let crcs = metadata.get(CHUNKS_KEY).and_then(|text| chunks_from_text(text));
        let crcs = crcs.ok_or_else(|| damaged("no checksums in its header"))?;
        let index = index.with_checksums(crcs).map_err(|e| damaged(&e.to_string()))?;
        if index.bytes().checked_add(region_at) != Some(length) {
            return Err(damaged("tensors do not fill the file"));
        }
        let whole = combine_chunks(crc(header), index.crcs(), index.bytes());
        if format!("{whole:016x}") != entry.crc {
            return Err(damaged("its header differs from the manifest"));
        }
        let said = |key: &str| metadata.get(key).and_then(|text| text.parse::<u64>().ok());
        if said("rank").is_some_and(|rank| rank != u64::from(entry.rank.0)) {
            return Err(damaged("it belongs to another rank"));
        }
        let step = directory.file_name().and_then(|n| n.to_str()?.strip_prefix("step-")?.parse::<u64>().ok());
        if step.is_some() && said("step").is_some_and(|own| Some(own) != step) {
            return Err(damaged("it belongs to another step"));
        }
        *room = Some(memory);
        let unknown =
            || damaged("the table of where its tensors belong cannot be read; install the everstep that wrote it");
        let places = metadata.get(PLACES_KEY).map(|text| Places::from_text(text, &index).ok_or_else(unknown));
        let places = places.transpose()?;
        let values = metadata.get(VALUES_KEY).map(|text| values_from_text(text)).unwrap_or_default();
        Ok(Shard { bytes: Bytes::Stored(source, region_at), index, path: name, places, values })
    }

    /// Returns the tensors of the shard, and the checksums of its chunks.
    #[must_use]
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Returns where its tensors belong in larger ones, according to its header.
    #[must_use]
    pub fn places(&self) -> Option<&Places> {
        self.places.as_ref()
    }

    /// Returns the targets for tensors: (name, address, length of the memory) each. The memory must
    /// have exactly the size of the tensor.
    ///
    /// # Errors
    /// [`TargetError`].
    pub fn targets(&self, wanted: &[(String, usize, usize)]) -> Result<Vec<Target>, TargetError> {
        let places = self.index.offsets();
        let target = |(name, address, room): &(String, usize, usize)| {
            let (offset, tensor) = places.get(name.as_str()).ok_or_else(|| TargetError::Unknown(name.clone()))?;
            if tensor.bytes != *room as u64 && !cfg!(everstep_unchecked_lengths) {
                return Err(TargetError::Room { name: name.clone(), bytes: tensor.bytes, room: *room });
            }
            Ok(Target { offset: *offset, bytes: tensor.bytes, address: *address })
        };
        wanted.iter().map(target).collect()
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Reads and verifies the whole region, without copying any of it.
    ///
    /// # Errors
    /// The same as for [`Shard::load`].
    pub fn verify(&self, threads: usize) -> Result<(), RestoreError> {
        // SAFETY: without targets, nothing is copied.
        unsafe { self.load(&[], threads, true) }
    }

    /// Returns a part of the region, verified.
    ///
    /// # Errors
    /// The same as for [`Shard::load`]; also fails when the part lies outside.
    pub fn fetch(&self, offset: u64, bytes: u64) -> Result<Vec<u8>, RestoreError> {
        let outside = || RestoreError::Damaged { path: self.path.clone(), what: "a tensor lies outside".into() };
        let end = offset.checked_add(bytes).filter(|e| *e <= self.index.bytes()).ok_or_else(outside)?;
        if let Some(value) = self.value(offset, bytes) {
            return Ok(value);
        }
        let mut found = vec![0u8; usize::try_from(bytes).map_err(|_| outside())?];
        let target = Target { offset, bytes, address: found.as_mut_ptr() as usize };
        let chunk = CHUNK_BYTES as u64;
        let first = usize::try_from(offset / chunk).map_err(|_| outside())?;
        let last = usize::try_from(end.div_ceil(chunk)).map_err(|_| outside())?;
        let readers = Readers::within(1, target.bytes);
        // SAFETY: `found` has room for exactly `bytes` bytes, and no other thread uses it.
        unsafe { self.load_chunks(std::iter::once(first..last), &[target], readers, true)? };
        Ok(found)
    }

    /// Returns a value that has a checksum of its own, without reading the rest of its chunk;
    /// `None` when it has none or the value does not match it.
    fn value(&self, offset: u64, bytes: u64) -> Option<Vec<u8>> {
        let (Bytes::Stored(source, at), Some(sum)) = (&self.bytes, self.values.get(&offset)) else { return None };
        let begins = offset / ALIGN as u64 * ALIGN as u64;
        let skip = usize::try_from(offset - begins).ok()?;
        let room = (skip + usize::try_from(bytes).ok()?).next_multiple_of(ALIGN);
        let mut page = MmapMut::map_anon(room).ok()?;
        source.read(&mut page, at + begins).ok()?;
        let value = page.get(skip..skip + usize::try_from(bytes).ok()?)?;
        (crc(value) == *sum).then(|| value.to_vec())
    }

    fn all_inside(&self, targets: &[Target]) -> Result<(), RestoreError> {
        let region = self.index.bytes();
        if targets.iter().all(|t| t.offset.checked_add(t.bytes).is_some_and(|end| end <= region)) {
            return Ok(());
        }
        Err(RestoreError::Damaged { path: self.path.clone(), what: "a tensor lies outside".into() })
    }

    /// Copies parts of the region to their targets, and reads and verifies only chunks that contain
    /// some of them. Parts may overlap. After an error, the contents of the targets are undefined.
    ///
    /// # Safety
    /// The same as for [`Shard::load`].
    ///
    /// # Errors
    /// The same as for [`Shard::load`]; also fails when a part lies outside.
    pub unsafe fn load_parts(&self, targets: &[Target], readers: Readers) -> Result<(), RestoreError> {
        self.all_inside(targets)?;
        let mut left: Vec<Target> = targets.iter().copied().filter(|t| t.bytes > 0).collect();
        left.sort_unstable_by_key(|t| t.offset);
        // Each pass takes parts that do not overlap; usually, the first pass takes all of them.
        while !left.is_empty() {
            let (mut pass, mut later): (Vec<Target>, Vec<Target>) = (Vec::with_capacity(left.len()), Vec::new());
            let mut reach = 0;
            for target in left {
                if target.offset >= reach {
                    reach = target.offset + target.bytes;
                    pass.push(target);
                } else {
                    later.push(target);
                }
            }
            // SAFETY: the caller keeps the targets writable and guarantees that no other thread
            // uses them.
            unsafe { self.load_chunks(touched(&pass), &pass, readers, true)? };
            left = later;
        }
        Ok(())
    }

    /// Copies parts of the region, which do not overlap, to their targets. Chunks without a part
    /// are verified, too. After an error, the contents of the targets are undefined.
    ///
    /// # Safety
    /// Every target must be writable for its length, and no other thread may use it meanwhile.
    ///
    /// # Errors
    /// [`RestoreError::Chunks`] with all damaged chunks; those of the file system.
    pub unsafe fn load(&self, targets: &[Target], threads: usize, verify: bool) -> Result<(), RestoreError> {
        self.all_inside(targets)?;
        let mut order: Vec<&Target> = targets.iter().filter(|t| t.bytes > 0).collect();
        order.sort_unstable_by_key(|t| t.offset);
        if order.windows(2).any(|pair| pair[0].offset + pair[0].bytes > pair[1].offset) {
            return Err(RestoreError::Damaged { path: self.path.clone(), what: "a tensor is wanted twice".into() });
        }
        let largest = targets.iter().map(|t| t.bytes).max().unwrap_or(u64::MAX);
        let readers = Readers::within(self.threads(threads), largest);
        // SAFETY: the caller keeps the targets writable and guarantees that no other thread uses
        // them.
        unsafe { self.load_chunks(std::iter::once(0..self.index.chunks()), targets, readers, verify) }
    }

    /// Returns the number of threads to read it with; a file would be read with `files`.
    #[must_use]
    pub fn threads(&self, files: usize) -> usize {
        match &self.bytes {
            Bytes::Stored(stored, _) => stored.threads(files),
            Bytes::Slot(_) | Bytes::StillSlot(_) => files,
        }
    }

    /// Copies the parts of these chunks that the targets ask for.
    ///
    /// # Safety
    /// The same as for [`Shard::load`].
    unsafe fn load_chunks(
        &self,
        chunks: impl IntoIterator<Item = Range<usize>>,
        targets: &[Target],
        readers: Readers,
        verify: bool,
    ) -> Result<(), RestoreError> {
        let requests = &readers.requests(chunks);
        let mut targets: Vec<Target> = targets.iter().copied().filter(|t| t.bytes > 0).collect();
        targets.sort_unstable_by_key(|t| t.offset);
        let next = AtomicUsize::new(0);
        let work = || -> std::io::Result<Vec<usize>> {
            let mut bad = Vec::new();
            let mut scratch = match self.bytes {
                Bytes::StillSlot(_) => None,
                Bytes::Slot(_) | Bytes::Stored(..) => Some(MmapMut::map_anon(readers.chunks * CHUNK_BYTES)?),
            };
            loop {
                let Some(Range { start: first, end: last }) =
                    requests.get(next.fetch_add(1, Ordering::Relaxed)).cloned()
                else {
                    return Ok(bad);
                };
                let data = self.read(first, last, scratch.as_deref_mut())?;
                for (i, chunk) in data.chunks(CHUNK_BYTES).enumerate() {
                    // SAFETY: the caller keeps the targets writable and guarantees that no other
                    // thread uses them; each part of a target lies in one chunk only.
                    let sum = unsafe { deliver(chunk, ((first + i) * CHUNK_BYTES) as u64, &targets, verify) };
                    if verify && self.index.crcs().get(first + i) != Some(&sum) {
                        bad.push(first + i);
                    }
                }
                let complete = data.len().div_ceil(CHUNK_BYTES);
                bad.extend(first + complete..last);
            }
        };
        let parts = std::thread::scope(|scope| {
            let others = readers.threads.min(requests.len()).saturating_sub(1);
            // If a thread cannot be created, fewer of them do the work.
            let thread = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
            let helpers: Vec<_> = (0..others).filter_map(thread).collect();
            let mut parts = vec![work()];
            let panicked = |_| Err(std::io::Error::other("a reader panicked"));
            parts.extend(helpers.into_iter().map(|h| h.join().unwrap_or_else(panicked)));
            parts
        });
        let mut chunks = Vec::new();
        for part in parts {
            chunks.extend(part.map_err(|source| RestoreError::Unreadable { path: self.path.clone(), source })?);
        }
        chunks.sort_unstable();
        if chunks.is_empty() { Ok(()) } else { Err(RestoreError::Chunks { path: self.path.clone(), chunks }) }
    }

    /// Reads one chunk, verified, to the beginning of `into`, which is aligned and has room for it.
    /// Returns its length in bytes.
    pub(crate) fn read_chunk(&self, chunk: usize, into: &mut [u8]) -> Result<usize, RestoreError> {
        let unreadable = |source| RestoreError::Unreadable { path: self.path.clone(), source };
        let data = self.read(chunk, chunk + 1, Some(into)).map_err(unreadable)?;
        let whole = self.index.bytes().saturating_sub((chunk * CHUNK_BYTES) as u64).min(CHUNK_BYTES as u64);
        if data.len() as u64 != whole || self.index.crcs().get(chunk) != Some(&crc(data)) {
            return Err(RestoreError::Chunks { path: self.path.clone(), chunks: vec![chunk] });
        }
        Ok(data.len())
    }

    /// Returns the bytes of some chunks, up to the end of the region.
    fn read<'a>(&'a self, first: usize, last: usize, scratch: Option<&'a mut [u8]>) -> std::io::Result<&'a [u8]> {
        let region = usize::try_from(self.index.bytes()).map_err(std::io::Error::other)?;
        let (from, to) = (first * CHUNK_BYTES, (last * CHUNK_BYTES).min(region));
        match (&self.bytes, scratch) {
            // SAFETY: the caller of `from_still_slot` guarantees that no thread writes the region.
            (Bytes::StillSlot(slot), None) => Ok(unsafe { slot.still_region(from, to - from) }.unwrap_or_default()),
            (Bytes::Slot(slot) | Bytes::StillSlot(slot), Some(scratch)) => {
                let room = scratch.get_mut(..to - from).unwrap_or_default();
                Ok(if slot.load(from, room) { room } else { &[] })
            }
            (Bytes::Stored(source, at), Some(scratch)) => {
                let room = scratch.get_mut(..(to - from).next_multiple_of(ALIGN)).unwrap_or_default();
                let got = source.read(room, at + from as u64)?.min(to - from);
                Ok(room.get(..got).unwrap_or_default())
            }
            (Bytes::Slot(_) | Bytes::Stored(..), None) => Ok(&[]),
        }
    }
}

/// Copies the parts of one chunk that the targets ask for. With `verify`, returns the checksum of
/// the chunk.
///
/// # Safety
/// The same as for [`Shard::load`].
unsafe fn deliver(chunk: &[u8], begins: u64, targets: &[Target], verify: bool) -> u64 {
    let ends = begins + chunk.len() as u64;
    let mut sum = Running::default();
    let mut at = begins;
    let part = |from: u64, to: u64| chunk.get((from - begins) as usize..(to - begins) as usize).unwrap_or_default();
    let first = targets.partition_point(|t| t.offset + t.bytes <= begins);
    for target in targets.iter().skip(first).take_while(|t| t.offset < ends) {
        let (from, to) = (target.offset.max(at), (target.offset + target.bytes).min(ends));
        if verify && from > at {
            sum.read(part(at, from));
        }
        let bytes = part(from, to);
        let address = (target.address as u64 + (from - target.offset)) as *mut u8;
        // SAFETY: within the target (from >= its offset, to <= its end), which the caller keeps
        // writable.
        unsafe {
            if verify {
                sum.copy(address, bytes.as_ptr(), bytes.len());
            } else {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), address, bytes.len());
            }
        }
        at = to;
    }
    if verify && at < ends {
        sum.read(part(at, ends));
    }
    sum.value()
}
