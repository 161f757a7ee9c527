//! Which chunks of a shard are read, by how many threads.

use crate::format::digest::CHUNK_BYTES;
use crate::restore::Target;
use std::ops::Range;

/// Chunks that one thread takes at a time: one request to a file.
const CHUNKS_AT_ONCE: usize = 8;

/// How many threads read, and how many chunks each at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readers {
    pub(crate) threads: usize,
    pub(crate) chunks: usize,
}

impl Readers {
    /// At most `threads` threads, whose buffers together take at most `room` bytes, or one chunk:
    /// with the largest tensor for `room`, loading never needs more memory than that beside the
    /// state.
    #[must_use]
    pub fn within(threads: usize, room: u64) -> Self {
        let room = usize::try_from(room / CHUNK_BYTES as u64).unwrap_or(usize::MAX).max(1);
        let threads = threads.clamp(1, room);
        Readers { threads, chunks: (room / threads).min(CHUNKS_AT_ONCE) }
    }

    /// Chunks as they are read.
    pub(crate) fn requests(self, ranges: impl IntoIterator<Item = Range<usize>>) -> Vec<Range<usize>> {
        let cut = |r: Range<usize>| r.clone().step_by(self.chunks).map(move |at| at..(at + self.chunks).min(r.end));
        ranges.into_iter().flat_map(cut).collect()
    }
}

/// Chunks that hold some of these parts, which are in order.
pub(crate) fn touched(parts: &[Target]) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for part in parts {
        let first = (part.offset / CHUNK_BYTES as u64) as usize;
        let end = (part.offset + part.bytes).div_ceil(CHUNK_BYTES as u64) as usize;
        match found.last_mut().filter(|r| r.end >= first) {
            Some(last) => last.end = last.end.max(end),
            None => found.push(first..end),
        }
    }
    found
}
