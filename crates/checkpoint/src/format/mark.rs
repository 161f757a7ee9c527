//! The writer's mark: who wrote a checkpoint, or half of one. What carries no mark of this
//! directory's run is not ours to touch.

use everstep_core::id::RunId;
use serde::{Deserialize, Serialize};

/// Name of the file with the mark, the first one in a directory that is not published yet; it stays
/// when it is.
pub const MARK_FILE: &str = "everstep-mark.json";

/// Who writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// The directory's identity.
    pub run: RunId,
    /// Which ownership of the directory; rises when another job takes it over.
    pub epoch: u64,
    /// Generation of the job; 0 outside `everstep run`.
    pub generation: u64,
    /// Restarts of the job so far.
    pub attempt: u64,
}

impl Mark {
    /// Where the writer stands among those of its run: what is less is over.
    #[must_use]
    pub fn turn(&self) -> (u64, u64) {
        (self.epoch, self.generation)
    }

    /// [`Mark::turn`] as it stands in names: `EPOCH.GENERATION`.
    #[must_use]
    pub fn turn_text(&self) -> String {
        format!("{}.{}", self.epoch, self.generation)
    }
}

/// Reads [`Mark::turn_text`], or the generation alone as it was written before directories had
/// owners.
#[must_use]
pub fn turn_of(text: &str) -> Option<(u64, u64)> {
    match text.split_once('.') {
        Some((epoch, generation)) => Some((epoch.parse().ok()?, generation.parse().ok()?)),
        None => Some((0, text.parse().ok()?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_read_from_names() {
        let mark = Mark { epoch: 3, generation: 12, ..Mark::default() };
        assert_eq!(turn_of(&mark.turn_text()), Some((3, 12)));
        assert_eq!(turn_of("7"), Some((0, 7)));
        assert_eq!([turn_of(""), turn_of("a.1"), turn_of("1.")], [None, None, None]);
    }
}
