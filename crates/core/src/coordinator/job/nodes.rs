//! The nodes of a job: which are attached, which may come back, and which may still run workers of
//! the previous world.

use crate::id::{Generation, Incarnation, NodeId, Session};
use crate::message::{Hello, World};
use crate::spec::Ladder;
use crate::time::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// A node that has not ended its workers within this time after a fence is not waited for.
const FENCE_PATIENCE: Duration = Duration::from_secs(20);
/// Two late messages within this time are a bad network, not a hiccup.
const LATE_WITHIN: Duration = Duration::from_mins(1);
/// The network counts as bad for this long after the last late message.
const BAD_FOR: Duration = Duration::from_mins(10);

/// A node that is attached, or was a moment ago.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its connection; `None` while it may come back.
    pub session: Option<Session>,
    /// When the connection was lost.
    pub lost_at: Option<Time>,
    /// What it last reported about itself.
    pub hello: Hello,
    /// Whether no worker is alive there.
    pub clean: bool,
    /// Time at which it joined.
    pub joined_at: Time,
    /// Time at which it was ordered to end its workers; after a while, the job no longer waits for
    /// it.
    pub fenced_at: Option<Time>,
    /// When a message from it last came late.
    pub late: Option<Time>,
    /// Until then, it gets longer to reconnect, because its messages keep coming late.
    pub bad_network_until: Time,
}

impl Node {
    /// Records a message that arrived late on a live connection.
    fn late(&mut self, now: Time) {
        if self.late.is_some_and(|at| now.since(at) < LATE_WITHIN) {
            self.bad_network_until = now.after(BAD_FOR);
        }
        self.late = Some(now);
    }

    /// Returns when the node counts as lost unless it comes back; `None` while it is attached.
    fn lost_until(&self, ladder: &Ladder) -> Option<Time> {
        let at = self.lost_at?;
        let patience = if at < self.bad_network_until { ladder.reconnect_late } else { ladder.reconnect };
        Some(at.after(patience))
    }

    /// Returns whether it is attached and has no workers.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.session.is_some() && self.clean
    }
}

/// The world that may still be training while the next one forms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct OldWorld {
    /// Its nodes and the lives of their agents.
    members: BTreeMap<NodeId, Incarnation>,
    /// Whether one of them has no workers left: a collective job cannot train without it.
    confirmed: bool,
}

/// The nodes of a job by id, and those of its previous world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    by_id: BTreeMap<NodeId, Node>,
    old: OldWorld,
}

impl Nodes {
    /// Returns no nodes. Those of `world` are expected to come back, and may still have workers.
    #[must_use]
    pub fn expected(world: &World) -> Self {
        let mut nodes = Nodes::default();
        nodes.begin(world);
        nodes.old.confirmed = world.slots.is_empty();
        nodes
    }

    /// Returns a node.
    #[must_use]
    pub fn get(&self, id: &NodeId) -> Option<&Node> {
        self.by_id.get(id)
    }

    /// Returns a node, to change it.
    pub(crate) fn get_mut(&mut self, id: &NodeId) -> Option<&mut Node> {
        self.by_id.get_mut(id)
    }

    /// Returns whether a node is attached or may come back.
    #[must_use]
    pub fn contains(&self, id: &NodeId) -> bool {
        self.by_id.contains_key(id)
    }

    /// Returns the connection of a node, if it is attached.
    #[must_use]
    pub fn session(&self, id: &NodeId) -> Option<Session> {
        self.by_id.get(id)?.session
    }

    /// Returns all nodes in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = (&NodeId, &Node)> {
        self.by_id.iter()
    }

    /// Returns the connections of all attached nodes.
    pub fn sessions(&self) -> impl Iterator<Item = (&NodeId, Session)> {
        self.by_id.iter().filter_map(|(id, n)| n.session.map(|s| (id, s)))
    }

    /// Returns the number of nodes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    pub(crate) fn insert(&mut self, id: NodeId, node: Node) {
        self.by_id.insert(id, node);
    }

    pub(crate) fn remove(&mut self, id: &NodeId) -> Option<Node> {
        self.by_id.remove(id)
    }

    /// Records a late message of a node.
    pub(crate) fn late(&mut self, now: Time, id: &NodeId) {
        if let Some(node) = self.by_id.get_mut(id) {
            node.late(now);
        }
    }

    /// Records that workers run on the nodes of this world from now on.
    pub(crate) fn begin(&mut self, world: &World) {
        self.old = OldWorld {
            members: world.slots.iter().map(|s| (s.node.clone(), s.incarnation)).collect(),
            confirmed: false,
        };
        for slot in &world.slots {
            self.set_unclean(&slot.node);
        }
    }

    /// Records that workers run on this node from now on.
    pub(crate) fn set_unclean(&mut self, id: &NodeId) {
        if let Some(node) = self.by_id.get_mut(id) {
            node.clean = false;
        }
    }

    /// Records that a node has ended the workers of this generation.
    pub(crate) fn set_clean(&mut self, id: &NodeId, generation: Generation, store_port: u16) {
        if let Some(node) = self.by_id.get_mut(id) {
            node.clean = true;
            node.fenced_at = None;
            node.hello.store_port = store_port;
            node.hello.seen = node.hello.seen.max(generation);
        }
    }

    /// Records that nodes with workers are ordered to end them, all or only one. Returns the
    /// connections of those that are attached.
    pub(crate) fn fence(&mut self, now: Time, only: Option<&NodeId>) -> Vec<Session> {
        let told = self.by_id.iter_mut().filter(|(id, n)| !n.clean && only.is_none_or(|only| only == *id));
        told.filter_map(|(_, node)| {
            node.fenced_at = Some(now);
            node.session
        })
        .collect()
    }

    /// Records that a member of the old world has no workers left, if `id` shows it.
    pub(crate) fn confirm(&mut self, id: &NodeId, generation: Generation) {
        let Some(node) = self.by_id.get(id) else { return };
        let Some(life) = self.old.members.get(id) else { return };
        // A later life attaches only when the processes of the earlier one are gone (node lock).
        let no_workers_left = node.clean && node.hello.seen >= generation;
        if node.hello.incarnation != *life || no_workers_left {
            self.old.confirmed = true;
        }
    }

    /// Returns whether there is a previous world whose members may still have workers.
    pub(crate) fn have_trained(&self) -> bool {
        !self.old.members.is_empty()
    }

    /// Returns whether the previous world is known to train no longer.
    pub(crate) fn old_world_is_over(&self) -> bool {
        self.old.confirmed
    }

    /// Returns the members of the old world that may still have workers and have time left to
    /// report their end.
    pub(crate) fn fencing(&self, now: Time) -> Vec<NodeId> {
        let stuck = |n: &Node| n.fenced_at.is_some_and(|at| now >= at.after(FENCE_PATIENCE));
        self.by_id
            .iter()
            .filter(|(id, n)| !n.clean && self.old.members.contains_key(*id) && !stuck(n))
            .map(|(id, _)| id.clone())
            .collect()
    }

    /// Returns the nodes that did not come back in time.
    pub(crate) fn gone(&self, now: Time, ladder: &Ladder) -> Vec<NodeId> {
        let gone = |n: &Node| n.lost_until(ladder).is_some_and(|until| now >= until);
        self.by_id.iter().filter(|(_, n)| gone(n)).map(|(id, _)| id.clone()).collect()
    }

    /// Returns when nodes count as lost.
    pub(crate) fn lost_until(&self, ladder: &Ladder) -> impl Iterator<Item = Time> {
        self.by_id.values().filter_map(move |n| n.lost_until(ladder))
    }

    /// Returns when the job stops waiting for nodes that were ordered to end their workers.
    pub(crate) fn fenced_until(&self) -> impl Iterator<Item = Time> {
        self.by_id.values().filter(|n| !n.clean).filter_map(|n| Some(n.fenced_at?.after(FENCE_PATIENCE)))
    }
}
