//! A detector's finding that machines behave unlike their peers.

use crate::id::NodeId;
use crate::severity::{Table, Verdict};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A finding of a detector.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    /// The machines; more than one if they went bad together.
    pub nodes: Vec<NodeId>,
    /// The metrics that show it, the clearest first. Empty: samples stopped arriving.
    pub metrics: Vec<String>,
    /// Distance from the peers, in hundredths of their usual spread.
    pub score: u64,
    /// Whether it concerns a group (a switch, a rack), so that no single machine is at fault.
    pub group: bool,
    /// Whether it has two witnesses.
    pub sure: bool,
    /// File with the machine's curves against the others' (SVG), on the coordinator's host; empty:
    /// none.
    #[serde(default)]
    pub picture: String,
}

impl Finding {
    /// Returns the finding as the rest of a sentence.
    pub(crate) fn why(&self) -> String {
        let spread = self.score as f64 / 100.0;
        match self.metrics.as_slice() {
            [] if self.nodes.len() > 1 => "their samples stopped arriving".into(),
            [] => "its samples stopped arriving".into(),
            all => format!("{} ({spread:.1} times the usual spread)", all.join(", ")),
        }
    }

    /// Returns whether only a higher sampling rate shows which machine was first.
    #[must_use]
    pub fn needs_a_burst(&self) -> bool {
        self.group || self.nodes.len() > 1
    }

    /// Returns the class of the finding, with what was seen.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let class = if self.group { "group-outlier" } else { "machine-outlier" };
        Verdict { line: self.why(), ..Table::built_in().named(class) }
    }
}
