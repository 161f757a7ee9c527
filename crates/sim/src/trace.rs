//! The trace of a simulation, as lines and as one hash. Two runs of a seed must give the same hash.

use std::fmt::{self, Write};

/// What is kept of the trace. Describing every event takes time, and most runs need no trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Keep {
    /// Nothing.
    #[default]
    Nothing,
    /// A hash of the lines.
    Hash,
    /// The lines, and their hash.
    Lines,
}

/// A running FNV-1a hash of the trace and, on request, its lines.
#[derive(Debug)]
pub struct Trace {
    hash: Hash,
    keep: Keep,
    lines: Vec<String>,
}

#[derive(Debug)]
struct Hash(u64);

impl Hash {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

impl Write for Hash {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add(text.as_bytes());
        Ok(())
    }
}

impl Trace {
    /// Returns an empty trace, of which this is kept.
    #[must_use]
    pub fn new(keep: Keep) -> Self {
        Trace { hash: Hash(0xcbf2_9ce4_8422_2325), keep, lines: Vec::new() }
    }

    /// Appends a line at the simulated time `now`, in milliseconds.
    pub fn line(&mut self, now: u64, text: fmt::Arguments<'_>) {
        if self.keep >= Keep::Hash {
            self.hash.add(&now.to_le_bytes());
            // A hash takes any text.
            let _ = self.hash.write_fmt(text);
        }
        if self.keep == Keep::Lines {
            self.lines.push(format!("{:>9.3} {text}", now as f64 / 1000.0));
        }
    }

    /// Returns the hash of all lines so far.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash.0
    }

    /// Returns the lines, or nothing if they are not kept.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        &self.lines
    }
}
