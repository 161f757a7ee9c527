//! The only source of randomness of a simulation: SplitMix64 (Steele, Lea, Flood 2014), seeded
//! once.
#![forbid(unsafe_code)]

/// A small deterministic generator.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Returns a generator for `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Rng(seed ^ 0x6a09_e667_f3bc_c909)
    }

    /// Returns the next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a uniform number in `low..high`.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.bits() % (high - low).max(1)
    }

    /// Returns true with probability `percent`/100.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.range(0, 100) < percent
    }

    /// Returns a random element, or `None` if there are none.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        if items.is_empty() { None } else { items.get(usize::try_from(self.bits() % items.len() as u64).unwrap_or(0)) }
    }

    /// Returns a uniform number above 0, up to and including 1.
    pub fn open(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Returns a standard normal number.
    pub fn normal(&mut self) -> f64 {
        libm::sqrt(-2.0 * libm::log(self.open())) * libm::cos(2.0 * std::f64::consts::PI * self.open())
    }

    /// Returns a uniform number between `low` and `high`.
    pub fn between(&mut self, [low, high]: [f64; 2]) -> f64 {
        low + (high - low) * self.open()
    }

    /// Returns a number between `low` and `high`, both positive, uniform on a logarithmic scale.
    pub fn log_between(&mut self, [low, high]: [f64; 2]) -> f64 {
        libm::exp(self.between([libm::log(low), libm::log(high)]))
    }

    /// Returns a log-normal number with this median, whose logarithm has the standard deviation
    /// `spread`.
    pub fn log_normal(&mut self, median: f64, spread: f64) -> f64 {
        median * libm::exp(spread * self.normal())
    }

    /// Returns true with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.open() <= probability
    }
}
