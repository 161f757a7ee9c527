//! The trace of a simulation, as lines and as one hash. Two runs of a seed must give the same hash.

/// A running FNV-1a hash of the trace and, on request, its lines.
#[derive(Debug, Default)]
pub struct Trace {
    hash: u64,
    keep: bool,
    lines: Vec<String>,
}

impl Trace {
    /// Returns an empty trace, which stores its lines if `keep` is set.
    #[must_use]
    pub fn new(keep: bool) -> Self {
        Trace { hash: 0xcbf2_9ce4_8422_2325, keep, lines: Vec::new() }
    }

    /// Appends a line at the simulated time `now`, in milliseconds.
    pub fn line(&mut self, now: u64, text: &str) {
        for byte in now.to_le_bytes().into_iter().chain(text.bytes()) {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if self.keep {
            self.lines.push(format!("{:>9.3} {text}", now as f64 / 1000.0));
        }
    }

    /// Returns the hash of all lines so far.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Returns the lines, or nothing if they are not kept.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        &self.lines
    }
}
