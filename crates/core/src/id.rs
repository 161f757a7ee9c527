//! Names of things, as types, so that a step can never be passed for a generation.

use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }

        impl $name {
            /// The value after this one.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0 + 1)
            }
        }
    };
}

number!(
    /// Global rank of a worker in its world, `0..world_size`.
    Rank(u32)
);
number!(
    /// Number of completed optimizer steps; step `n` is the state after `n` steps.
    Step(u64)
);
number!(
    /// One world of one job. Rises at every start of the processes; a failed proposal burns its number.
    Generation(u64)
);
number!(
    /// One life of an agent: unique per node, larger for a later life.
    Incarnation(u64)
);
number!(
    /// One life of the coordinator, issued by the store with compare-and-swap.
    Epoch(u64)
);
number!(
    /// One connection between an agent and the coordinator, numbered by the coordinator's driver.
    Session(u64)
);
number!(
    /// One write to the store.
    PersistId(u64)
);

/// Name of a job: `--name`, else `--rdzv-id`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub String);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Stable name of a node: `--node-rank`, a scheduler's index, or an id kept on disk.
///
/// Nodes are ordered by this id, so that rank 0 stays where it was: ids that are numbers come
/// first and by value, all others follow in lexical order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub String);

impl NodeId {
    fn number(&self) -> Option<u64> {
        self.0.parse().ok()
    }
}

impl Ord for NodeId {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self.number(), other.number()) {
            (Some(a), Some(b)) => a.cmp(&b).then_with(|| self.0.cmp(&other.0)),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => self.0.cmp(&other.0),
        }
    }
}

impl PartialOrd for NodeId {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_ordered_by_number_then_by_name() {
        let mut ids: Vec<_> = ["10", "b", "2", "a", "1"].map(|s| NodeId(s.into())).into();
        ids.sort();
        assert_eq!(ids.iter().map(|n| n.0.as_str()).collect::<Vec<_>>(), ["1", "2", "10", "a", "b"]);
    }
}
