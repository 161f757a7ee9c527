//! Sets of numbers in a table: `8, 11, 39-41`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ops::RangeInclusive;

/// A set of numbers, written as single numbers and ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Codes(Vec<RangeInclusive<u32>>);

impl Codes {
    /// Parses the written form; returns `None` if it is invalid.
    #[must_use]
    pub fn new(written: &str) -> Option<Codes> {
        let one = |part: &str| {
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            let (from, to) = (from.trim().parse().ok()?, to.trim().parse().ok()?);
            (from <= to).then_some(from..=to)
        };
        written.split(',').map(one).collect::<Option<Vec<_>>>().map(Codes)
    }

    /// Returns whether `code` is in the set.
    #[must_use]
    pub fn has(&self, code: u32) -> bool {
        self.0.iter().any(|r| r.contains(&code))
    }
}

impl Serialize for Codes {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let parts: Vec<String> = self.0.iter().map(|r| format!("{}-{}", r.start(), r.end())).collect();
        parts.join(",").serialize(to)
    }
}

impl<'de> Deserialize<'de> for Codes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let written = String::deserialize(from)?;
        Codes::new(&written).ok_or_else(|| serde::de::Error::custom("codes look like \"8, 11, 39-41\""))
    }
}
