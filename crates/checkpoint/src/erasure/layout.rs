//! Which bytes of the members' shards lie beside each other in a stripe.

use super::reed_solomon::GRAIN;
use crate::format::digest::CHUNK_BYTES;
use std::ops::Range;

/// Divides the chunks of a region of `bytes` into `parts` parts. Returns the number of chunks in
/// each part, and the number of parts that have one more. That one comes from the region's end:
/// where it is short, so is the parity that is computed from it.
fn shares(bytes: u64, parts: usize) -> (usize, usize) {
    let chunks = usize::try_from(bytes.div_ceil(CHUNK_BYTES as u64)).unwrap_or(usize::MAX);
    (chunks / parts.max(1), chunks % parts.max(1))
}

/// Returns the part that a chunk of a region of `bytes` is in, and its position there.
#[must_use]
pub fn place(bytes: u64, parts: usize, chunk: usize) -> (usize, usize) {
    let (each, _) = shares(bytes, parts);
    match chunk.checked_sub(each * parts) {
        Some(part) => (part, each),
        None => (chunk / each.max(1), chunk % each.max(1)),
    }
}

/// A stripe over the regions of its members (0 where a node has no such rank): position by
/// position, one chunk of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    regions: Vec<u64>,
}

impl Layout {
    /// Creates the layout for members whose regions have these lengths, in bytes.
    #[must_use]
    pub fn new(regions: Vec<u64>) -> Self {
        Layout { regions }
    }

    /// Returns the number of positions.
    #[must_use]
    pub fn positions(&self) -> usize {
        let parts = self.regions.len();
        let of = |(member, bytes): (usize, &u64)| {
            let (each, more) = shares(*bytes, parts);
            each + usize::from(member < more)
        };
        self.regions.iter().enumerate().map(of).max().unwrap_or(0)
    }

    /// Returns where in the member's region its bytes of this position are, if it has any.
    #[must_use]
    pub fn bytes(&self, member: usize, position: usize) -> Option<Range<usize>> {
        let region = *self.regions.get(member)?;
        let parts = self.regions.len();
        let (each, more) = shares(region, parts);
        let chunk = match position.checked_sub(each) {
            None => member * each + position,
            Some(0) if member < more => each * parts + member,
            Some(_) => return None,
        };
        let region = usize::try_from(region).ok()?;
        Some(chunk * CHUNK_BYTES..region.min((chunk + 1) * CHUNK_BYTES))
    }

    /// Returns the chunk of the member's region that is at this position, if there is one.
    #[must_use]
    pub fn chunk(&self, member: usize, position: usize) -> Option<usize> {
        self.bytes(member, position).map(|b| b.start / CHUNK_BYTES)
    }

    /// Returns the length of a parity shard at this position in bytes: that of the longest chunk
    /// there.
    #[must_use]
    pub fn length(&self, position: usize) -> usize {
        let of = |member| self.bytes(member, position).map_or(0, |b| b.len());
        (0..self.regions.len()).map(of).max().unwrap_or(0).next_multiple_of(GRAIN)
    }

    /// Returns where in a parity shard this position is, in bytes.
    #[must_use]
    pub fn parity(&self, position: usize) -> Range<usize> {
        position * CHUNK_BYTES..position * CHUNK_BYTES + self.length(position)
    }

    /// Returns the length of a parity shard in bytes.
    #[must_use]
    pub fn parity_bytes(&self) -> u64 {
        self.positions().checked_sub(1).map_or(0, |last| self.parity(last).end as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_a_shard_costs() {
        // A little less than 17 MiB: four chunks each, and a short one.
        let layout = Layout::new(vec![(17 << 20) - 900_000; 4]);
        assert_eq!((layout.positions(), layout.parity_bytes()), (5, (4 << 20) + 148_608));
        for mib in 17..200u64 {
            let bytes = (mib << 20) - 1000;
            let parity = 2 * Layout::new(vec![bytes; 4]).parity_bytes();
            assert!((parity as f64) < 0.6 * bytes as f64, "{mib} MiB: {parity}");
        }
    }

    proptest! {
        #[test]
        fn positions_cover_their_members(regions in prop::collection::vec(0u64..30 << 20, 1..7)) {
            let layout = Layout::new(regions.clone());
            for (member, region) in regions.iter().enumerate() {
                let chunks = region.div_ceil(1 << 20) as usize;
                let own: Vec<usize> = (0..chunks).filter(|c| place(*region, regions.len(), *c).0 == member).collect();
                let mut there: Vec<usize> = (0..layout.positions()).filter_map(|x| layout.chunk(member, x)).collect();
                for chunk in &own {
                    let (_, position) = place(*region, regions.len(), *chunk);
                    prop_assert_eq!(layout.chunk(member, position), Some(*chunk));
                    prop_assert!(layout.bytes(member, position).is_some_and(|b| b.len() <= layout.length(position)));
                }
                there.sort_unstable();
                prop_assert_eq!(there, own);
            }
            // Only the last position may be shorter than a chunk.
            for position in 1..layout.positions() {
                prop_assert_eq!(layout.length(position - 1), CHUNK_BYTES);
            }
        }
    }
}
