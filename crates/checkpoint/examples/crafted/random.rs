//! Numbers from a seed: an input is made again from its seed and its number.

/// SplitMix64.
pub struct Random(u64);

/// Where code that trusts numbers goes wrong.
const EDGES: [u64; 18] = [
    0,
    1,
    7,
    8,
    4095,
    4096,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 1,
    (1 << 31) - 1,
    1 << 32,
    1 << 44,
    (1 << 53) + 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX - 4096,
    u64::MAX,
];

impl Random {
    /// The numbers of one input.
    pub fn new(seed: u64, input: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ input.wrapping_mul(0xd1b5_4a32_d192_ed03))
    }

    /// Any number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// One in `n`.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of them.
    pub fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// A number near `n`, or one at an edge, or any.
    pub fn instead_of(&mut self, n: u64) -> u64 {
        match self.below(8) {
            0..=3 => n.wrapping_add(self.next() % 17).wrapping_sub(8),
            4 => n.wrapping_mul(1 + self.next() % 4),
            5 | 6 => *self.of(&EDGES),
            _ => self.next(),
        }
    }
}
