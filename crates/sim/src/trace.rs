//! What happened, as lines and as one number: two runs of a seed must give the same number.

/// A growing hash of the trace (FNV-1a), and the lines themselves when asked for.
#[derive(Debug, Default)]
pub struct Trace {
    hash: u64,
    keep: bool,
    lines: Vec<String>,
}

impl Trace {
    /// An empty trace; `keep` stores the lines.
    #[must_use]
    pub fn new(keep: bool) -> Self {
        Trace { hash: 0xcbf2_9ce4_8422_2325, keep, lines: Vec::new() }
    }

    /// Adds a line.
    pub fn line(&mut self, now: u64, text: &str) {
        for byte in now.to_le_bytes().into_iter().chain(text.bytes()) {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if self.keep {
            self.lines.push(format!("{:>9.3} {text}", now as f64 / 1000.0));
        }
    }

    /// Hash of all lines so far.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The lines, if kept.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        &self.lines
    }
}
