//! Detection of silent corruption (X5): ranks that should hold the same state must hold the same
//! bits. Only digests are compared, which captures compute anyway.

use crate::id::Rank;
use std::collections::BTreeMap;

/// Ranks whose state differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Odd {
    /// The ranks that differ from the majority; without a majority, all ranks.
    pub ranks: Vec<Rank>,
    /// More than half of the ranks agree, and these do not agree with them.
    pub certain: bool,
}

/// Compares the digests of the ranks' states; returns `None` if all are equal.
#[must_use]
pub fn odd_ones(digests: &BTreeMap<Rank, u64>) -> Option<Odd> {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    for digest in digests.values() {
        *counts.entry(*digest).or_default() += 1;
    }
    if counts.len() < 2 {
        return None;
    }
    let most = counts.iter().find(|(_, n)| **n * 2 > digests.len()).map(|(digest, _)| *digest);
    let ranks = digests.iter().filter(|(_, d)| Some(**d) != most).map(|(rank, _)| *rank).collect();
    Some(Odd { ranks, certain: most.is_some() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(digests: &[u64]) -> Option<(Vec<u32>, bool)> {
        let ranks = (0u32..).zip(digests).map(|(r, d)| (Rank(r), *d)).collect();
        odd_ones(&ranks).map(|odd| (odd.ranks.iter().map(|r| r.0).collect(), odd.certain))
    }

    #[test]
    fn most_are_right_and_two_cannot_tell() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[7]), None);
        assert_eq!(of(&[7, 7, 7]), None);
        assert_eq!(of(&[7, 7, 8]), Some((vec![2], true)));
        assert_eq!(of(&[7, 8]), Some((vec![0, 1], false)));
        assert_eq!(of(&[7, 8, 9]), Some((vec![0, 1, 2], false)));
        assert_eq!(of(&[7, 7, 8, 8]), Some((vec![0, 1, 2, 3], false)));
        assert_eq!(of(&[1, 7, 7, 8, 7]), Some((vec![0, 3], true)));
    }

    proptest! {
        #[test]
        fn whoever_is_alone_among_equals_is_named(n in 3u32..40, odd in any::<prop::sample::Index>(), good: u64, flip in 0u32..64) {
            let odd = odd.index(n as usize);
            let digests: Vec<u64> = (0..n as usize).map(|r| if r == odd { good ^ (1 << flip) } else { good }).collect();
            prop_assert_eq!(of(&digests), Some((vec![u32::try_from(odd).unwrap()], true)));
        }
    }
}
