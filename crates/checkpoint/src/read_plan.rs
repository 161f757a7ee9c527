//! Which chunks of a shard are read, by how many threads.

use crate::format::digest::CHUNK_BYTES;
use crate::restore::Target;
use std::ops::Range;

/// Maximum number of chunks in one request of a thread.
const CHUNKS_AT_ONCE: usize = 8;

/// Number of threads that read, and of chunks that each reads at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readers {
    pub(crate) threads: usize,
    pub(crate) chunks: usize,
}

impl Readers {
    /// Returns at most `threads` readers, whose buffers together take at most `room` bytes, or one
    /// chunk. With the size of the largest tensor as `room`, loading never needs more memory than
    /// that beside the state.
    #[must_use]
    pub fn within(threads: usize, room: u64) -> Self {
        let room = usize::try_from(room / CHUNK_BYTES as u64).unwrap_or(usize::MAX).max(1);
        let threads = threads.clamp(1, room);
        Readers { threads, chunks: (room / threads).min(CHUNKS_AT_ONCE) }
    }

    /// Splits ranges of chunks into requests.
    pub(crate) fn requests(self, ranges: impl IntoIterator<Item = Range<usize>>) -> Vec<Range<usize>> {
        let cut = |r: Range<usize>| r.clone().step_by(self.chunks).map(move |at| at..(at + self.chunks).min(r.end));
        ranges.into_iter().flat_map(cut).collect()
    }
}

/// Returns the ranges of chunks that contain these parts, which are in order.
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
