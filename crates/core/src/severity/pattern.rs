//! The patterns of rules: pieces of one line, in order, with `*` between them, ignoring case. A
//! match starts at the beginning of a word (`rdma` does not match `cardmap`), unless the pattern
//! starts with `*`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Pieces that must follow each other in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    pieces: Vec<String>,
    /// Whether the first piece may start in the middle of a word.
    anywhere: bool,
}

impl Pattern {
    /// Parses the written form: `*` stands for any characters of the same line; case is ignored.
    /// Returns `None` if the pattern is empty.
    #[must_use]
    pub fn new(written: &str) -> Option<Pattern> {
        let pieces: Vec<String> = written.split('*').filter(|p| !p.is_empty()).map(str::to_lowercase).collect();
        let anywhere = written.starts_with('*');
        (!pieces.iter().all(|p| p.trim().is_empty())).then_some(Pattern { pieces, anywhere })
    }

    /// Returns whether a line, already in lower case, contains all pieces in order.
    #[must_use]
    pub fn is_in(&self, lower: &str) -> bool {
        let Some((first, others)) = self.pieces.split_first() else { return false };
        let begins = |at: usize| {
            let before = lower.get(..at).and_then(|b| b.chars().next_back());
            let word = first.starts_with(char::is_alphanumeric) && before.is_some_and(char::is_alphanumeric);
            self.anywhere || !word
        };
        // If the rest does not follow the first valid start, it does not follow a later one either.
        let Some((at, _)) = lower.match_indices(first.as_str()).find(|(at, _)| begins(*at)) else { return false };
        let mut rest = lower.get(at + first.len()..).unwrap_or_default();
        others.iter().all(|piece| match rest.split_once(piece.as_str()) {
            Some((_, after)) => {
                rest = after;
                true
            }
            None => false,
        })
    }
}

impl Serialize for Pattern {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        format!("{}{}", if self.anywhere { "*" } else { "" }, self.pieces.join("*")).serialize(to)
    }
}

impl<'de> Deserialize<'de> for Pattern {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let written = String::deserialize(from)?;
        Pattern::new(&written).ok_or_else(|| serde::de::Error::custom("a pattern must name something to look for"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_must_follow_each_other() {
        let p = Pattern::new("mat1 and * cannot be Multiplied").unwrap();
        assert!(p.is_in("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"));
        assert!(!p.is_in("cannot be multiplied: mat1 and mat2"));
        assert_eq!(Pattern::new("* *"), None);
    }

    #[test]
    fn a_pattern_begins_with_a_word() {
        assert!(!Pattern::new("roce").unwrap().is_in("a process ended"));
        assert!(Pattern::new("roce").unwrap().is_in("a process ended; roce port down"));
        assert!(Pattern::new("is_lost").unwrap().is_in("nvml_error_gpu_is_lost"));
        assert!(Pattern::new("*eccuncorrectable").unwrap().is_in("cudaerroreccuncorrectable"));
    }
}
