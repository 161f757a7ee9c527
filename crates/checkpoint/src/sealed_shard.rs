//! A sealed slot as a file: builds the header in front of its bytes.

use crate::arena::{Label, Reader, Slot};
use crate::direct_io::ALIGN;
use crate::format::digest::{CHUNK_BYTES, combine_chunks, crc};
use crate::format::index::Index;
use crate::format::manifest::VERSION;
use crate::format::shard::{
    CHUNKS_KEY, PLACES, PLACES_KEY, VALUE_PREFIX, VALUES_KEY, chunks_to_text, object_of, places_to_text, values_to_text,
};
use everstep_core::id::Rank;
use everstep_core::message::ShardFile;
use memmap2::MmapMut;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// How often to check whether a repair of the slot has ended.
const REPAIR_POLL: Duration = Duration::from_millis(10);

/// One rank's shard: a header, and the region of a slot behind it.
pub struct SealedShard {
    /// The slot, which is not written while this value exists, even if its pin is released.
    pub reader: Arc<Reader>,
    /// Label of the slot when this value was created.
    pub label: Label,
    /// Its tensors and the checksums of its chunks.
    pub index: Index,
    /// Header of the file: page-aligned, whole pages.
    pub header: MmapMut,
    /// Length of the region in bytes.
    pub region: usize,
    /// Rank that the shard belongs to.
    pub rank: Rank,
    /// Name of the file.
    pub name: String,
}

impl SealedShard {
    /// Counts a reader of the slot, and builds the header.
    ///
    /// # Errors
    /// `InvalidData` when the slot does not contain `step` any more, or is not pinned.
    pub fn of(slot: &Arc<Slot>, step: u64, rank: Rank) -> io::Result<Self> {
        // Counted first: a slot that is being read keeps its contents.
        let reader = reader(slot).ok_or_else(|| stale(step))?;
        // A step whose pin has been released is not wanted any more.
        let pinned = reader.pinned();
        let (label, index) = reader.inspect().map_err(io::Error::other)?;
        if !pinned || label.step != step {
            return Err(stale(step));
        }
        let mut metadata = BTreeMap::from([
            ("everstep".to_owned(), VERSION.to_string()),
            ("step".to_owned(), step.to_string()),
            ("rank".to_owned(), rank.to_string()),
            ("world_size".to_owned(), label.world_size.to_string()),
            (CHUNKS_KEY.to_owned(), chunks_to_text(index.crcs())),
        ]);
        metadata.extend(asides(&reader, &index));
        let text = index.safetensors_header(&metadata).map_err(io::Error::other)?;
        let mut header = MmapMut::map_anon(text.len())?;
        header.copy_from_slice(&text);
        let region = usize::try_from(index.bytes()).map_err(io::Error::other)?;
        Ok(SealedShard {
            reader: Arc::new(reader),
            label,
            index,
            header,
            region,
            rank,
            name: format!("rank-{rank}.safetensors"),
        })
    }

    /// Returns the region up to the end of its last page: the index begins on the next one.
    ///
    /// # Errors
    /// `InvalidData` when the slot does not contain the step any more.
    pub fn body(&self) -> io::Result<&[u8]> {
        let bytes = self.reader.region(0, self.region.next_multiple_of(ALIGN));
        bytes.ok_or_else(|| stale(self.label.step))
    }

    /// Returns whether a chunk of the region matches the checksum of its capture.
    #[must_use]
    pub fn holds(&self, chunk: usize) -> bool {
        holds(&self.reader, &self.index, self.region, chunk)
    }

    /// Returns the manifest's entry for the shard, once it is written as `file`.
    ///
    /// # Errors
    /// `InvalidData` when the slot does not contain the step any more.
    pub fn written(&self, file: String) -> io::Result<ShardFile> {
        if self.reader.inspect().ok().map(|(l, _)| l) != Some(self.label) {
            return Err(stale(self.label.step));
        }
        let sum = combine_chunks(crc(&self.header), self.index.crcs(), self.index.bytes());
        let bytes = (self.header.len() + self.region) as u64;
        let objects = self.index.tensors().iter().filter_map(|t| object_of(&t.name)).map(str::to_owned).collect();
        Ok(ShardFile { rank: self.rank, file, bytes, crc: format!("{sum:016x}"), purpose: self.label.purpose, objects })
    }
}

fn stale(step: u64) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the slot does not hold step {step} any more"))
}

/// Counts a reader, as soon as no repair is in progress. `None` if the slot is not sealed.
fn reader(slot: &Arc<Slot>) -> Option<Reader> {
    loop {
        match slot.read() {
            // The repair is this agent's own. It replaces bytes that would otherwise be written as
            // they are.
            None if slot.under_repair() => std::thread::sleep(REPAIR_POLL),
            reader => return reader,
        }
    }
}

fn holds(slot: &Reader, index: &Index, region: usize, chunk: usize) -> bool {
    let from = chunk * CHUNK_BYTES;
    let data = slot.region(from, CHUNK_BYTES.min(region.saturating_sub(from)));
    data.is_some_and(|d| index.crcs().get(chunk) == Some(&crc(d)))
}

/// Reads bytes of a slot whose chunks match the checksums of their capture.
struct Verified<'a> {
    slot: &'a Reader,
    index: &'a Index,
    chunks: BTreeMap<usize, bool>,
}

impl Verified<'_> {
    fn bytes(&mut self, at: u64, bytes: u64) -> Option<&[u8]> {
        let (at, bytes) = (usize::try_from(at).ok()?, usize::try_from(bytes).ok()?);
        let region = usize::try_from(self.index.bytes()).ok()?;
        for chunk in at / CHUNK_BYTES..(at + bytes).div_ceil(CHUNK_BYTES) {
            if !*self.chunks.entry(chunk).or_insert_with(|| holds(self.slot, self.index, region, chunk)) {
                return None;
            }
        }
        self.slot.region(at, bytes)
    }
}

/// Returns the metadata of the header about the tensors: where they belong, and checksums of the
/// values that any rank may read alone. For damaged memory, there is no entry that could be taken
/// for a valid one.
fn asides(slot: &Reader, index: &Index) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut verified = Verified { slot, index, chunks: BTreeMap::new() };
    let mut values = BTreeMap::new();
    let mut at = 0;
    for tensor in index.tensors().iter() {
        if tensor.name == PLACES {
            let text = verified.bytes(at, tensor.bytes).map_or_else(|| "damaged".into(), places_to_text);
            found.insert(PLACES_KEY.to_owned(), text);
        } else if tensor.name.starts_with(VALUE_PREFIX)
            && let Some(data) = verified.bytes(at, tensor.bytes).filter(|d| !d.is_empty())
        {
            values.insert(at, crc(data));
        }
        at += tensor.bytes;
    }
    if !values.is_empty() {
        found.insert(VALUES_KEY.to_owned(), values_to_text(&values));
    }
    found
}
