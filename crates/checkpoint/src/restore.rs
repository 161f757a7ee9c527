//! Restore: from a slot or a shard file into tensors, verified before the first byte is handed out.

use crate::arena::{Label, REGION_AT, Slot};
use crate::format::digest::crc;
use crate::format::shard::{Index, parse_safetensors_header};
use everstep_core::message::ShardFile;
use everstep_wire::limits::HEADER_BYTES_MAX;
use memmap2::Mmap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Why a shard cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The file cannot be opened.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// the file
        path: String,
        /// what the system said
        source: std::io::Error,
    },
    /// The file is not what was written.
    #[error("{path} is damaged: {what}")]
    Damaged {
        /// the file
        path: String,
        /// what is wrong
        what: String,
    },
}

/// A verified shard in memory or in a mapped file.
#[derive(Debug)]
pub enum Shard {
    /// In a slot.
    Slot(Arc<Slot>, Index),
    /// In a file; the region starts at the offset.
    File(Mmap, Index, usize),
}

impl Shard {
    /// Opens and verifies a slot.
    ///
    /// # Errors
    /// As [`Slot::verify`].
    pub fn from_slot(slot: Arc<Slot>) -> Result<(Self, Label), crate::arena::SlotError> {
        let (label, index) = slot.verify()?;
        Ok((Shard::Slot(slot, index), label))
    }

    /// Opens a shard file and verifies it against its manifest's entry.
    ///
    /// # Errors
    /// [`RestoreError`].
    pub fn from_file(directory: &Path, entry: &ShardFile) -> Result<Self, RestoreError> {
        let path = directory.join(&entry.file);
        let name = path.display().to_string();
        let unreadable = |source| RestoreError::Unreadable { path: name.clone(), source };
        let damaged = |what: &str| RestoreError::Damaged { path: name.clone(), what: what.into() };
        if entry.file.contains('/') || entry.file.starts_with('.') {
            return Err(damaged("its manifest names a file outside the checkpoint"));
        }
        let file = File::open(&path).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        if length != entry.bytes {
            return Err(damaged(&format!("{length} bytes long, {} were written", entry.bytes)));
        }
        // SAFETY: a published checkpoint is never written again; the checksum is verified on this very mapping.
        let map = unsafe { Mmap::map(&file) }.map_err(unreadable)?;
        if format!("{:016x}", crc(&map)) != entry.crc {
            return Err(damaged("its checksum differs"));
        }
        let head = map.first_chunk::<8>().map(|h| u64::from_le_bytes(*h)).ok_or_else(|| damaged("too short"))?;
        let end = usize::try_from(head).ok().filter(|_| head <= HEADER_BYTES_MAX).map(|n| n + 8);
        let json = end.and_then(|end| map.get(8..end)).ok_or_else(|| damaged("header length"))?;
        let (index, _) = parse_safetensors_header(json).map_err(|e| damaged(&e))?;
        let at = 8 + json.len();
        if at as u64 + index.bytes() != length {
            return Err(damaged("tensors do not fill the file"));
        }
        Ok(Shard::File(map, index, at))
    }

    /// What it holds.
    #[must_use]
    pub fn index(&self) -> &Index {
        match self {
            Shard::Slot(_, index) | Shard::File(_, index, _) => index,
        }
    }

    /// Bytes of the region.
    #[must_use]
    pub fn bytes(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let (offset, len) = (usize::try_from(offset).ok()?, usize::try_from(len).ok()?);
        match self {
            Shard::Slot(slot, _) => slot.map().bytes(REGION_AT + offset, len),
            Shard::File(map, _, at) => map.get(at + offset..at + offset + len),
        }
    }
}
