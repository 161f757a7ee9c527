//! Identifiers as distinct types, so that a step cannot be passed as a generation.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }

        impl $name {
            /// Returns the next value.
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
    /// One world of one job. The number rises at every start of the workers; a failed proposal uses
    /// up its number.
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
    /// Number of one write to the store.
    PersistId(u64)
);

/// Identity of a checkpoint directory: drawn at first use, stored in the directory, and the label
/// of everything that belongs to it. A directory that was deleted and created again has a new one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId(pub u128);

impl RunId {
    /// Derives the identity of another kind of state in the same directory, so that the two are
    /// never confused. An empty kind returns the id unchanged.
    #[must_use]
    pub fn kind(self, kind: &str) -> Self {
        // FNV-1a over the kind, starting from the run id.
        Self(
            kind.bytes()
                .fold(self.0, |h, b| (h ^ u128::from(b)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)),
        )
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl std::str::FromStr for RunId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // Only one spelling is accepted: a manifest whose bytes have changed must not parse as the
        // same.
        let whole = text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let number = u128::from_str_radix(text, 16).ok().filter(|_| whole);
        number.map(Self).ok_or_else(|| format!("{text:?} is not a run id: it has 32 lower-case hexadecimal digits"))
    }
}

impl Serialize for RunId {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RunId {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Name of a job: `--name`, else `--rdzv-id`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct JobId(pub String);

/// Maps by job are searched by name, without a copy of it.
impl Borrow<str> for JobId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Stable name of a node: `--node-rank`, the scheduler's index, or an id kept on disk.
///
/// Nodes are ordered by this id, so that rank 0 stays where it was: numeric ids come first, by
/// value; all others follow in lexical order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
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
    fn run_ids_are_32_digits() {
        let id = RunId(0xab);
        assert_eq!(id.to_string().parse(), Ok(id));
        assert!("ab".parse::<RunId>().is_err() && format!("+{}", &id.to_string()[1..]).parse::<RunId>().is_err());
        assert_eq!(id.kind(""), id);
        assert_ne!(id.kind("dcp"), id.kind("pcd"));
    }

    #[test]
    fn nodes_are_ordered_by_number_then_by_name() {
        let mut ids: Vec<_> = ["10", "b", "2", "a", "1"].map(|s| NodeId(s.into())).into();
        ids.sort();
        assert_eq!(ids.iter().map(|n| n.0.as_str()).collect::<Vec<_>>(), ["1", "2", "10", "a", "b"]);
    }
}
