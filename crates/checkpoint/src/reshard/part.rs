//! Parts of a tensor: blocks, and ranges of the flattened tensor.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// One number for each dimension. One or two of them need no allocation: a checkpoint of 256 ranks
/// has a quarter of a million parts.
pub type Dimensions = SmallVec<[u64; 2]>;

/// Some elements of a whole tensor, without gaps, in the order of the whole tensor's rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// `sizes[d]` elements from `offsets[d]` on in each dimension.
    Block {
        /// first element
        offsets: Dimensions,
        /// number of elements
        sizes: Dimensions,
    },
    /// Elements `first..last` of the flattened tensor.
    Flat {
        /// first element
        first: u64,
        /// after the last element
        last: u64,
    },
}

/// A block of a tensor: in each dimension from where, and how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub offsets: Dimensions,
    pub sizes: Dimensions,
}

impl Part {
    /// Returns the part that is all of a tensor.
    #[must_use]
    pub fn whole(shape: &[u64]) -> Self {
        Part::Block { offsets: smallvec::smallvec![0; shape.len()], sizes: shape.into() }
    }

    /// Returns the number of elements; `None` when it does not fit into 64 bits.
    #[must_use]
    pub fn elements(&self) -> Option<u64> {
        match self {
            Part::Block { sizes, .. } => sizes.iter().try_fold(1u64, |n, s| n.checked_mul(*s)),
            Part::Flat { first, last } => last.checked_sub(*first),
        }
    }

    /// Returns whether the part lies within a tensor of this shape.
    #[must_use]
    pub fn fits(&self, shape: &[u64]) -> bool {
        let Some(all) = shape.iter().try_fold(1u64, |n, s| n.checked_mul(*s)) else { return false };
        match self {
            Part::Block { offsets, sizes } => {
                let within = |((o, s), all): ((&u64, &u64), &u64)| o.checked_add(*s).is_some_and(|end| end <= *all);
                offsets.len() == shape.len()
                    && sizes.len() == shape.len()
                    && offsets.iter().zip(sizes).zip(shape).all(within)
            }
            Part::Flat { first, last } => first <= last && *last <= all,
        }
    }

    /// Returns the blocks of the part, without empty ones. The part must fit.
    pub(super) fn blocks(&self, shape: &[u64]) -> Vec<Block> {
        match self {
            Part::Block { offsets, sizes } if sizes.iter().all(|s| *s > 0) => {
                vec![Block { offsets: offsets.clone(), sizes: sizes.clone() }]
            }
            Part::Block { .. } => Vec::new(),
            Part::Flat { first, last } => flat_blocks(shape, *first, *last),
        }
    }

    /// Returns the part's first element in the flattened tensor, and one after its last. All of its
    /// elements are in this range.
    pub(super) fn span(&self, shape: &[u64]) -> (u64, u64) {
        match self {
            Part::Flat { first, last } => (*first, *last),
            Part::Block { offsets, sizes } if sizes.iter().all(|s| *s > 0) => {
                let last = offsets.iter().zip(sizes).map(|(o, s)| o + s - 1);
                (flat(shape, offsets.iter().copied()), flat(shape, last) + 1)
            }
            Part::Block { .. } => (0, 0),
        }
    }

    /// Returns the position of the element at `index` of the whole tensor in this part.
    pub(super) fn place(&self, shape: &[u64], index: &[u64]) -> u64 {
        match self {
            Part::Flat { first, .. } => flat(shape, index.iter().copied()) - first,
            Part::Block { offsets, sizes } => flat(sizes, index.iter().zip(offsets).map(|(i, o)| i - o)),
        }
    }

    /// Returns the length of dimension `d` in this part's memory: a block must fill it to continue
    /// in the next row.
    pub(super) fn row(&self, shape: &[u64], d: usize) -> u64 {
        let all = match self {
            Part::Flat { .. } => shape,
            Part::Block { sizes, .. } => sizes,
        };
        all.get(d).copied().unwrap_or(1)
    }
}

impl Block {
    /// Returns the intersection; `None` if it is empty.
    pub(super) fn both(&self, other: &Block) -> Option<Block> {
        let (mut offsets, mut sizes) = (Dimensions::new(), Dimensions::new());
        let mine = self.offsets.iter().zip(&self.sizes);
        for ((a, n), (b, m)) in mine.zip(other.offsets.iter().zip(&other.sizes)) {
            let (from, to) = ((*a).max(*b), (a + n).min(b + m));
            if from >= to {
                return None;
            }
            offsets.push(from);
            sizes.push(to - from);
        }
        Some(Block { offsets, sizes })
    }

    /// Returns this block without `hole`, which lies in it: at most two blocks per dimension.
    pub(super) fn without(&self, hole: &Block) -> Vec<Block> {
        let mut rest = self.clone();
        let mut found = Vec::new();
        for d in 0..self.sizes.len() {
            let (Some(from), Some(n)) = (rest.offsets.get(d).copied(), rest.sizes.get(d).copied()) else { continue };
            let (Some(hole_from), Some(hole_n)) = (hole.offsets.get(d).copied(), hole.sizes.get(d).copied()) else {
                continue;
            };
            for (start, end) in [(from, hole_from), (hole_from + hole_n, from + n)] {
                if start < end {
                    let mut piece = rest.clone();
                    (piece.offsets[d], piece.sizes[d]) = (start, end - start);
                    found.push(piece);
                }
            }
            (rest.offsets[d], rest.sizes[d]) = (hole_from, hole_n);
        }
        found
    }
}

/// Returns the position of an element in the flattened tensor.
pub(super) fn flat(shape: &[u64], index: impl IntoIterator<Item = u64>) -> u64 {
    shape.iter().zip(index).fold(0, |at, (n, i)| at * n + i)
}

/// Returns a range of the flattened tensor as blocks: the end of a row, whole rows, and the
/// beginning of a row, in each dimension.
fn flat_blocks(shape: &[u64], first: u64, last: u64) -> Vec<Block> {
    if first >= last {
        return Vec::new();
    }
    let Some((rows, inner)) = shape.split_first() else {
        return vec![Block { offsets: Dimensions::new(), sizes: Dimensions::new() }];
    };
    let row: u64 = inner.iter().product();
    let mut found = Vec::new();
    let mut add = |from: u64, n: u64, inside: Vec<Block>| {
        for block in inside {
            let offsets = std::iter::once(from).chain(block.offsets).collect();
            let sizes = std::iter::once(n).chain(block.sizes).collect();
            found.push(Block { offsets, sizes });
        }
    };
    let (a, b) = (first / row, last / row);
    if a == b {
        add(a, 1, flat_blocks(inner, first % row, last % row));
        return found;
    }
    let whole_from = if first.is_multiple_of(row) { a } else { a + 1 };
    if whole_from > a {
        add(a, 1, flat_blocks(inner, first % row, row));
    }
    if whole_from < b {
        add(
            whole_from,
            b - whole_from,
            vec![Block { offsets: smallvec::smallvec![0; inner.len()], sizes: inner.into() }],
        );
    }
    if b < *rows && !last.is_multiple_of(row) {
        add(b, 1, flat_blocks(inner, 0, last % row));
    }
    found
}
