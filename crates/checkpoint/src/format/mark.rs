//! The writer's mark: identifies the writer of a checkpoint, or of an incomplete one. Files without
//! a mark of this directory's run are never changed.

use everstep_core::id::RunId;
use serde::{Deserialize, Serialize};

/// Name of the file with the mark. It is the first file in a directory that is not published yet,
/// and stays there after the publication.
pub const MARK_FILE: &str = "everstep-mark.json";

/// Identifies a writer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// The directory's identity.
    pub run: RunId,
    /// Number of the ownership of the directory; it rises when another job takes the directory
    /// over.
    pub epoch: u64,
    /// Generation of the job; 0 outside `everstep run`.
    pub generation: u64,
    /// Restarts of the job so far.
    pub attempt: u64,
}

impl Mark {
    /// Returns the writer's place in the order of the writers of its run: those with a lower turn
    /// are over.
    #[must_use]
    pub fn turn(&self) -> (u64, u64) {
        (self.epoch, self.generation)
    }

    /// Returns [`Mark::turn`] as it is written in names: `EPOCH.GENERATION`.
    #[must_use]
    pub fn turn_text(&self) -> String {
        format!("{}.{}", self.epoch, self.generation)
    }
}

/// Parses [`Mark::turn_text`], or the generation alone as it was written before directories had
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
