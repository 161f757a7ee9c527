//! A check of the nodes, in rounds: the tests of a node, and their results.

use crate::id::NodeId;
use crate::node_check::Speed;
use crate::time::Time;
use serde::{Deserialize, Serialize};

/// One node's part in a round of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// The check, named by the time at which it began.
    pub check: Time,
    /// Number of the round in the check.
    pub round: u32,
    /// Whether to measure this machine first.
    pub measure: bool,
    /// Then run a collective with each of these nodes, all at the same time.
    pub partners: Vec<Partner>,
}

/// A node to test a collective with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partner {
    /// Id of the other node.
    pub node: NodeId,
    /// Host of the store at which the two nodes meet.
    pub host: String,
    /// Port of that store.
    pub port: u16,
    /// Whether this node's ranks come first, and it serves the store.
    pub first: bool,
}

/// The result of one node's part in a round of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checked {
    /// The check, as in [`Check`].
    pub check: Time,
    /// The round, as in [`Check`].
    pub round: u32,
    /// The node's speed, or why its own work failed; `None`: it was not asked to measure itself.
    pub speed: Option<Result<Speed, String>>,
    /// By partner: duration of the collective in microseconds, or `None` if it failed.
    pub pairs: Vec<(NodeId, Option<u64>)>,
    /// Why nothing could be checked, which is not evidence about the machine.
    pub cannot: Option<String>,
}
