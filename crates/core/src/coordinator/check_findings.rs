//! The findings of a node check.

use crate::id::NodeId;

/// The findings of a check, by node id.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
pub struct Found {
    /// Nodes that are certainly bad, and why.
    pub faulty: Vec<(NodeId, String)>,
    /// Slow nodes, and what is slow.
    pub slow: Vec<(NodeId, String)>,
    /// Bad links between two good nodes.
    pub links: Vec<(NodeId, NodeId)>,
    /// Any further bad nodes are among these, and any further bad links between them.
    pub suspects: Vec<NodeId>,
    /// Nodes without any evidence.
    pub untested: Vec<NodeId>,
}

impl Found {
    /// Returns whether nothing was found.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        *self == Found::default()
    }
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = |of: &[NodeId]| of.iter().map(|n| n.0.as_str()).collect::<Vec<_>>().join(", ");
        let mut parts = Vec::new();
        parts.extend(self.faulty.iter().map(|(n, why)| format!("node {n} is bad ({why})")));
        parts.extend(self.slow.iter().map(|(n, why)| format!("node {n} is slow ({why})")));
        parts.extend(
            self.links.iter().map(|(a, b)| format!("nodes {a} and {b} are good, but the link between them is not")),
        );
        if !self.suspects.is_empty() {
            parts.push(format!(
                "one of nodes {} or a link between them is bad; to find out which, check them together with two good \
                 nodes",
                names(&self.suspects)
            ));
        }
        match self.untested.as_slice() {
            [] => {}
            [node] => parts.push(format!("node {node} was not tested")),
            nodes => parts.push(format!("nodes {} were not tested", names(nodes))),
        }
        if parts.is_empty() {
            parts.push("nothing is wrong with them".into());
        }
        f.write_str(&parts.join("; "))
    }
}
