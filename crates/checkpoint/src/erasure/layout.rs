//! Which bytes of whose shard lie beside each other in a stripe.

use super::code::GRAIN;
use crate::format::digest::CHUNK_BYTES;
use std::ops::Range;

/// The chunks of a region of `bytes` that are its `part`-th of `parts`.
#[must_use]
pub fn part(bytes: u64, parts: usize, part: usize) -> Range<usize> {
    let chunks = usize::try_from(bytes.div_ceil(CHUNK_BYTES as u64)).unwrap_or(usize::MAX);
    let each = chunks.div_ceil(parts.max(1));
    chunks.min(part * each)..chunks.min((part + 1) * each)
}

/// A stripe over the regions of its members (0 where a node has no such rank): position by position, one chunk of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    regions: Vec<u64>,
}

impl Layout {
    /// For members whose regions have these lengths.
    #[must_use]
    pub fn new(regions: Vec<u64>) -> Self {
        Layout { regions }
    }

    /// Number of positions.
    #[must_use]
    pub fn positions(&self) -> usize {
        let parts = self.regions.len();
        self.regions.iter().enumerate().map(|(i, bytes)| part(*bytes, parts, i).len()).max().unwrap_or(0)
    }

    /// Where in the member's region its bytes of this position are, if it has any.
    #[must_use]
    pub fn bytes(&self, member: usize, position: usize) -> Option<Range<usize>> {
        let region = *self.regions.get(member)?;
        let chunk = part(region, self.regions.len(), member).nth(position)?;
        let region = usize::try_from(region).ok()?;
        Some(chunk * CHUNK_BYTES..region.min((chunk + 1) * CHUNK_BYTES))
    }

    /// The chunk of the member's region that is at this position.
    #[must_use]
    pub fn chunk(&self, member: usize, position: usize) -> Option<usize> {
        self.bytes(member, position).map(|b| b.start / CHUNK_BYTES)
    }

    /// The position of a chunk of the member's region, if it is in this stripe.
    #[must_use]
    pub fn position(&self, member: usize, chunk: usize) -> Option<usize> {
        let own = part(*self.regions.get(member)?, self.regions.len(), member);
        own.contains(&chunk).then(|| chunk - own.start)
    }

    /// Bytes of a parity shard at this position: those of the longest chunk there.
    #[must_use]
    pub fn length(&self, position: usize) -> usize {
        let of = |member| self.bytes(member, position).map_or(0, |b| b.len());
        (0..self.regions.len()).map(of).max().unwrap_or(0).next_multiple_of(GRAIN)
    }

    /// Where in a parity shard this position is.
    #[must_use]
    pub fn parity(&self, position: usize) -> Range<usize> {
        position * CHUNK_BYTES..position * CHUNK_BYTES + self.length(position)
    }

    /// Bytes of a parity shard.
    #[must_use]
    pub fn parity_bytes(&self) -> u64 {
        self.positions().checked_sub(1).map_or(0, |last| self.parity(last).end as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_is_in_one_part(bytes in 0u64..40 << 20, parts in 1usize..9) {
            let all: Vec<usize> = (0..parts).flat_map(|i| part(bytes, parts, i)).collect();
            prop_assert_eq!(all, (0..bytes.div_ceil(1 << 20) as usize).collect::<Vec<_>>());
        }

        #[test]
        fn positions_cover_their_members(regions in prop::collection::vec(0u64..30 << 20, 1..7)) {
            let layout = Layout::new(regions.clone());
            for (member, region) in regions.iter().enumerate() {
                let own = part(*region, regions.len(), member);
                let there: Vec<usize> = (0..layout.positions()).filter_map(|x| layout.chunk(member, x)).collect();
                prop_assert_eq!(&there, &own.clone().collect::<Vec<_>>());
                for chunk in own {
                    let position = layout.position(member, chunk).unwrap_or(usize::MAX);
                    prop_assert_eq!(layout.chunk(member, position), Some(chunk));
                    prop_assert!(layout.bytes(member, position).is_some_and(|b| b.len() <= layout.length(position)));
                }
            }
            // Only the last position may be shorter than a chunk.
            for position in 1..layout.positions() {
                prop_assert_eq!(layout.length(position - 1), CHUNK_BYTES);
            }
        }
    }
}
