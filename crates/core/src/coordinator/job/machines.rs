//! What a job knows about machines: those it excludes or has blamed, and its requests about them.

use super::super::request::{Remedy, Request, Stage};
use super::recent::remember;
use crate::id::{Incarnation, NodeId};
use crate::spec::Policy;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A machine blamed for two failures within this time is excluded if another one can replace it.
const AGAIN: Duration = Duration::from_mins(30);

/// The part of a job's record that is about machines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machines {
    /// Nodes that the job excludes.
    #[serde(default)]
    excluded: Vec<Exclusion>,
    /// Nodes blamed for failures (at most [`RECENT`](super::recent::RECENT)), and when.
    #[serde(default)]
    blamed: Vec<(NodeId, Incarnation, Time)>,
    /// Requests about machines (at most [`RECENT`](super::recent::RECENT)).
    #[serde(default)]
    requests: Vec<Request>,
}

/// A node that the job excludes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exclusion {
    /// The node.
    pub node: NodeId,
    /// This life of its agent. A later life means that the machine has been looked after.
    pub incarnation: Incarnation,
    /// The class of its failure.
    pub class: String,
    /// The incident that led to it.
    pub incident: u64,
    /// Whether it is excluded only if another node can replace it.
    pub if_replaced: bool,
    /// It was used anyway, for lack of others, and failed again: the job now waits for another
    /// node.
    #[serde(default)]
    pub barred: bool,
    /// Whether a cordon was requested, as far as the policy allows.
    #[serde(default)]
    pub told_of: bool,
}

impl Machines {
    /// Returns the nodes that the job excludes.
    #[must_use]
    pub fn excluded(&self) -> &[Exclusion] {
        &self.excluded
    }

    /// Returns the excluded nodes, to change them.
    pub(crate) fn excluded_mut(&mut self) -> &mut [Exclusion] {
        &mut self.excluded
    }

    /// Excludes a life of a node. Its earlier lives are over.
    pub(crate) fn exclude(&mut self, of: Exclusion) {
        self.excluded.retain(|e| e.node != of.node);
        self.excluded.push(of);
    }

    /// Returns the requests about machines, oldest first.
    #[must_use]
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Remembers that a machine was blamed. Returns whether it was before, in the same life and
    /// within half an hour.
    pub(crate) fn add_blame(&mut self, now: Time, node: &NodeId, life: Incarnation) -> bool {
        let same = |(id, of, at): &(NodeId, Incarnation, Time)| id == node && *of == life && now.since(*at) < AGAIN;
        let before = self.blamed.iter().any(same);
        remember(&mut self.blamed, (node.clone(), life, now));
        before
    }

    /// Makes a request, with the stage that the policy gives it.
    pub(crate) fn add_request(&mut self, now: Time, remedy: Remedy, policy: Policy) -> Request {
        let id = self.requests.last().map_or(0, |r| r.id) + 1;
        let stage = match policy {
            Policy::Observe => Stage::Noted,
            Policy::Advise => Stage::Asked,
            Policy::Act => Stage::Due { tries: 0, at: now },
        };
        let request = Request { id, remedy, stage, at: now };
        remember(&mut self.requests, request.clone());
        request
    }

    /// Returns the times at which pending requests are made again.
    pub(crate) fn requests_due(&self) -> impl Iterator<Item = Time> {
        self.requests.iter().filter_map(|r| match r.stage {
            Stage::Due { at, .. } => Some(at),
            _ => None,
        })
    }

    /// Returns the request with this number.
    pub(crate) fn request_mut(&mut self, id: u64) -> Option<&mut Request> {
        self.requests.iter_mut().find(|r| r.id == id)
    }

    /// Returns whether this life of a node goes to another job, or has gone.
    #[must_use]
    pub fn is_reassigned(&self, node: &NodeId, life: Incarnation) -> bool {
        self.requests.iter().any(|r| r.takes(node, life))
    }

    /// Returns why the job excludes this life of a node, if it does.
    #[must_use]
    pub fn exclusion(&self, node: &NodeId, life: Incarnation) -> Option<&Exclusion> {
        self.excluded.iter().find(|e| e.node == *node && e.incarnation == life)
    }

    /// Returns the exclusion of a node and a life of its agent, to change it.
    pub(crate) fn exclusion_mut(&mut self, node: &NodeId, life: Incarnation) -> Option<&mut Exclusion> {
        self.excluded.iter_mut().find(|e| e.node == *node && e.incarnation == life)
    }

    /// Returns whether the job excludes this life of a node, even if no other node can replace it.
    #[must_use]
    pub fn is_excluded(&self, node: &NodeId, life: Incarnation) -> bool {
        self.exclusion(node, life).is_some_and(|e| !e.if_replaced)
    }

    /// Returns whether this life of a node is never used.
    #[must_use]
    pub fn is_barred(&self, node: &NodeId, life: Incarnation) -> bool {
        self.exclusion(node, life).is_some_and(|e| e.barred)
    }

    /// Returns the oldest request that still awaits a machine.
    pub(crate) fn awaited_mut(&mut self) -> Option<&mut Request> {
        self.requests.iter_mut().find(|r| r.awaits())
    }
}
