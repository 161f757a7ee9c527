//! Where the tensors of a shard belong, when they are parts of larger ones.

use super::dtype::tensor_bytes;
use super::index::{Index, Tensor};
use super::shard::places_from_text;
use crate::reshard::part::Part;
use everstep_wire::limits::TENSOR_DIMENSIONS_MAX;

/// The table of a shard, checked against its index: see [`super::shard::PLACES`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places(Vec<u64>);

/// A tensor that is a part of a larger one.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Number of the tensor in the shard.
    pub number: usize,
    /// Shape of the whole tensor.
    pub shape: &'a [u64],
    /// Where the part begins: one number for a range, otherwise one for each dimension.
    offsets: &'a [u64],
    flat: bool,
}

impl Place<'_> {
    /// Returns which elements of the whole the tensor contains.
    #[must_use]
    pub fn part(&self, tensor: &Tensor) -> Part {
        if self.flat {
            let first = self.offsets.first().copied().unwrap_or(0);
            let elements = tensor.shape.iter().fold(1u64, |n, size| n.saturating_mul(*size));
            return Part::Flat { first, last: first.saturating_add(elements) };
        }
        Part::Block { offsets: self.offsets.into(), sizes: tensor.shape.as_slice().into() }
    }
}

/// Returns the first place of a table, and the rest of the table.
fn first(table: &[u64]) -> Option<(Place<'_>, &[u64])> {
    let ([number, flat, dimensions], rest) = table.split_first_chunk::<3>()?;
    let number = usize::try_from(*number).ok()?;
    let dimensions = usize::try_from(*dimensions).ok().filter(|n| *n <= TENSOR_DIMENSIONS_MAX)?;
    let flat = match flat {
        0 => false,
        1 => true,
        _ => return None,
    };
    let (shape, rest) = rest.split_at_checked(dimensions)?;
    let (offsets, rest) = rest.split_at_checked(if flat { 1 } else { dimensions })?;
    Some((Place { number, shape, offsets, flat }, rest))
}

impl Places {
    /// Parses the text of a header. Returns `None` when it is not a table, or contradicts the
    /// index.
    #[must_use]
    pub fn from_text(text: &str, index: &Index) -> Option<Self> {
        let words = places_from_text(text)?;
        let (mut left, mut next) = (words.as_slice(), 0);
        while !left.is_empty() {
            let (place, rest) = first(left)?;
            let tensor = index.tensors().get(place.number).filter(|_| place.number >= next)?;
            // The whole must be a valid tensor too, and the part must lie within it.
            tensor_bytes(&tensor.dtype, place.shape)?;
            if !place.part(tensor).fits(place.shape) {
                return None;
            }
            (left, next) = (rest, place.number + 1);
        }
        Some(Places(words))
    }

    /// Returns the numbers of the table.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.0
    }

    /// Returns the places, in the order of the shard's tensors.
    pub fn iter(&self) -> impl Iterator<Item = Place<'_>> {
        let mut left = self.0.as_slice();
        std::iter::from_fn(move || {
            let (place, rest) = first(left)?;
            left = rest;
            Some(place)
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn index() -> Index {
        let tensor = |name: &str| Tensor { name: name.into(), dtype: "F32".into(), shape: vec![2, 3], bytes: 24 };
        Index::new(vec![tensor("a"), tensor("b")]).unwrap()
    }

    fn reads(words: &[u64]) -> bool {
        let text: Vec<String> = words.iter().map(|w| format!("{w:x}")).collect();
        Places::from_text(&text.join(" "), &index()).is_some()
    }

    #[test]
    fn tables_that_contradict_the_index_are_none() {
        let (block, range) = ([0, 0, 2, 4, 3, 2, 0], [1, 1, 2, 4, 3, 6]);
        assert!(reads(&block) && reads(&range) && reads(&[&block[..], &range].concat()));
        assert!(!reads(&[&range[..], &block].concat()), "in the order of the shard");
        assert!(!reads(&[&block[..], &block].concat()), "twice");
        for (at, value) in [(0, 2), (1, 2), (2, 1), (2, 65), (2, u64::MAX), (3, 3), (4, 2), (5, 3), (5, u64::MAX)] {
            let mut bad = block;
            bad[at] = value;
            assert!(!reads(&bad), "word {at} is {value}");
        }
        for (at, value) in [(3, 3), (4, u64::MAX), (5, 7), (5, u64::MAX)] {
            let mut bad = range;
            bad[at] = value;
            assert!(!reads(&bad), "word {at} is {value} in a range");
        }
        assert!(!reads(&block[..6]) && !reads(&[0, 0]));
    }
}
