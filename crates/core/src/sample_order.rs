//! The order of an epoch's samples: a keyed bijection of `0..n`, so that any rank can compute any
//! position of any epoch without storing a permutation; and the exactly-once hash over samples.
//!
//! The bijection is an unbalanced Feistel network over the smallest power of two not below `n`,
//! with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The hash
//! is the sum and the exclusive or of a keyed hash of each sample: it does not depend on their
//! order, and a sample that is missing or used twice changes it.

/// Rounds of the Feistel network.
const ROUNDS: usize = 6;

/// Mixes all bits of a 64-bit value (the finalizer of SplitMix64).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Computes the round function of the network: a multiplication and its upper half, which depends
/// on all bits below.
fn round(x: u64, key: u64) -> u64 {
    let product = (x ^ key).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    (product ^ (product >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 32
}

fn key(seed: u64, epoch: u64, purpose: u64) -> u64 {
    mix(mix(mix(seed ^ 0x9E37_79B9_7F4A_7C15).wrapping_add(epoch)).wrapping_add(purpose))
}

/// The order of one epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    n: u64,
    shuffle: bool,
    left_bits: u32,
    right_bits: u32,
    keys: [u64; ROUNDS],
    hash_key: u64,
}

impl Order {
    /// Creates the order of `n` samples in `epoch` under `seed`. If `shuffle` is false, samples
    /// keep their positions.
    #[must_use]
    pub fn new(n: u64, seed: u64, epoch: u64, shuffle: bool) -> Self {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        let mut keys = [0; ROUNDS];
        for (round, k) in (0..).zip(&mut keys) {
            *k = key(seed, epoch, round);
        }
        let hash_key = key(seed, epoch, 1 << 32);
        Order { n, shuffle, left_bits: bits / 2, right_bits: bits - bits / 2, keys, hash_key }
    }

    /// Returns the number of samples.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.n
    }

    /// Returns the sample at `position` (`0..n`).
    #[must_use]
    pub fn sample(&self, position: u64) -> u64 {
        if !self.shuffle || self.n < 2 {
            return position;
        }
        let mut x = position;
        // The domain is less than twice as large as `n`, so fewer than two walks suffice on
        // average.
        loop {
            x = self.permute(x);
            if x < self.n {
                return x;
            }
        }
    }

    fn permute(&self, x: u64) -> u64 {
        let right_mask = (1u64 << self.right_bits) - 1;
        let left_mask = (1u64 << self.left_bits) - 1;
        let (mut left, mut right) = (x >> self.right_bits, x & right_mask);
        for pair in self.keys.chunks_exact(2) {
            left ^= round(right, pair[0]) & left_mask;
            right ^= round(left, pair[1]) & right_mask;
        }
        left << self.right_bits | right
    }

    /// Returns the hash of one sample.
    #[must_use]
    pub fn hash(&self, sample: u64) -> Exactly {
        let h = mix(sample.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ self.hash_key);
        Exactly { sum: h, xor: mix(h) }
    }

    /// Returns the hash of the samples at positions `from..to`.
    #[must_use]
    pub fn hash_range(&self, from: u64, to: u64) -> Exactly {
        (from..to).fold(Exactly::default(), |all, p| all.with(self.hash(self.sample(p))))
    }

    /// Returns the hash of an epoch in which every sample was used exactly once.
    #[must_use]
    pub fn hash_of_all(&self) -> Exactly {
        (0..self.n).fold(Exactly::default(), |all, s| all.with(self.hash(s)))
    }
}

/// A hash of a collection of samples, 16 bytes long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exactly {
    /// Sum of the samples' hashes modulo 2^64.
    pub sum: u64,
    /// Exclusive or of a second hash of each sample.
    pub xor: u64,
}

impl Exactly {
    /// Returns the hash of both collections together.
    #[must_use]
    pub fn with(self, other: Exactly) -> Exactly {
        Exactly { sum: self.sum.wrapping_add(other.sum), xor: self.xor ^ other.xor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_order_is_the_same_on_every_machine() {
        let order = Order::new(10, 7, 3, true);
        let samples: Vec<u64> = (0..10).map(|p| order.sample(p)).collect();
        assert_eq!(samples, [4, 9, 2, 8, 7, 1, 5, 3, 0, 6]);
    }

    #[test]
    fn positions_and_samples_are_not_correlated() {
        // Over many seeds, the first of 8 samples ends up in each place about equally often.
        let mut places = [0u32; 8];
        for seed in 0..8000 {
            let order = Order::new(8, seed, 0, true);
            places[(0..8).position(|p| order.sample(p) == 0).unwrap()] += 1;
        }
        assert!(places.iter().all(|n| (850..1150).contains(n)), "{places:?}");
    }

    proptest! {
        #[test]
        fn every_sample_is_there_once(n in 0u64..3000, seed: u64, epoch in 0u64..5, shuffle: bool) {
            let order = Order::new(n, seed, epoch, shuffle);
            let mut all: Vec<u64> = (0..n).map(|p| order.sample(p)).collect();
            prop_assert_eq!(order.hash_range(0, n), order.hash_of_all());
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..n));
        }

        #[test]
        fn a_sample_missing_or_used_twice_shows(n in 2u64..500, seed: u64, missing: prop::sample::Index, twice: prop::sample::Index) {
            let order = Order::new(n, seed, 0, true);
            let (missing, twice) = (missing.index(n as usize) as u64, twice.index(n as usize) as u64);
            let used = (0..n).filter(|s| *s != missing).chain([twice]);
            let hash = used.fold(Exactly::default(), |all, s| all.with(order.hash(s)));
            prop_assert_eq!(hash == order.hash_of_all(), missing == twice);
        }
    }
}
