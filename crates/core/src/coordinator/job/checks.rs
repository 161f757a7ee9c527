//! Checks of nodes: whether one is due, and the one in progress.

use super::super::check_findings::Found;
use crate::id::{Incarnation, NodeId};
use crate::message::Checked;
use crate::node_check::{Findings, NodeCheck, Outcome, Task};
use crate::spec::CheckWhen;
use crate::time::Time;
use std::collections::BTreeSet;
use std::time::Duration;

/// Maximum duration of a round: it imports torch and sets up communicators, perhaps for many GPUs.
const ROUND: Duration = Duration::from_secs(150);
/// A second unexplained failure within this time leads to a check.
const UNEXPLAINED: Duration = Duration::from_mins(30);

/// A check in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checking {
    /// When it began, which identifies it.
    began: Time,
    /// The nodes by their indices in the check, and the lives of their agents.
    nodes: Vec<(NodeId, Incarnation)>,
    check: NodeCheck,
    /// Tasks of this round without an answer yet.
    open: Vec<Task>,
    /// When the round ends at the latest.
    until: Time,
}

impl Checking {
    /// Returns a check of these nodes, without a round yet.
    #[must_use]
    pub fn new(now: Time, nodes: Vec<(NodeId, Incarnation)>) -> Self {
        let check = NodeCheck::new(nodes.len());
        Checking { began: now, nodes, check, open: Vec::new(), until: now }
    }

    /// Returns when it began, which identifies it.
    #[must_use]
    pub fn began(&self) -> Time {
        self.began
    }

    /// Returns the current round.
    #[must_use]
    pub fn round(&self) -> u32 {
        self.check.round()
    }

    /// Returns the number of nodes in the check.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the life of a node that is checked.
    #[must_use]
    pub fn life(&self, node: &NodeId) -> Option<Incarnation> {
        self.nodes.iter().find(|(id, _)| id == node).map(|(_, life)| *life)
    }

    /// Returns the tasks of this round without an answer yet.
    #[must_use]
    pub fn open(&self) -> &[Task] {
        &self.open
    }

    /// Returns whether all tasks of the round are answered.
    #[must_use]
    pub fn round_is_over(&self) -> bool {
        self.open.is_empty()
    }

    /// Returns the open task of a node.
    #[must_use]
    pub fn task(&self, node: &NodeId) -> Option<&Task> {
        self.open.iter().find(|t| self.id(t.node) == *node)
    }

    /// Returns the id of the node with this index.
    #[must_use]
    pub fn id(&self, index: usize) -> NodeId {
        self.nodes.get(index).map_or_else(|| NodeId(String::new()), |(id, _)| id.clone())
    }

    /// Returns whether this is the answer to an open task.
    #[must_use]
    pub fn expects(&self, node: &NodeId, answer: &Checked) -> bool {
        answer.check == self.began && answer.round == self.round() && self.task(node).is_some()
    }

    /// Records the result of a node's part in the round.
    pub(crate) fn answered(&mut self, node: &NodeId, answer: &Checked) {
        let Some(number) = self.nodes.iter().position(|(id, _)| id == node) else { return };
        let Some(at) = self.open.iter().position(|t| t.node == number) else { return };
        let task = self.open.remove(at);
        if let Some(speed) = answer.speed.clone() {
            self.check.measured(number, speed);
        }
        for peer in task.peers {
            let id = self.id(peer);
            let micros = answer.pairs.iter().find(|(with, _)| *with == id).and_then(|(_, micros)| *micros);
            let outcome = micros.map_or(Outcome::Failed, |micros| Outcome::Passed { micros });
            self.check.tested(number, peer, outcome);
        }
    }

    /// Stops waiting for a node that is gone.
    pub(crate) fn without(&mut self, node: &NodeId) {
        if let Some(number) = self.nodes.iter().position(|(id, _)| id == node) {
            self.give_up_on(number);
        }
    }

    /// Stops waiting for all nodes that have not answered.
    pub(crate) fn give_up_on_open(&mut self) {
        for task in self.open.clone() {
            self.give_up_on(task.node);
        }
    }

    fn give_up_on(&mut self, number: usize) {
        self.open.retain(|t| t.node != number);
        self.check.gone(number);
    }

    /// Begins the next round with the nodes that are still `there`. Returns false if none is
    /// needed: the check is over.
    pub(crate) fn next_round(&mut self, now: Time, there: impl Fn(&NodeId, Incarnation) -> bool) -> bool {
        loop {
            self.open = self.check.next_round();
            if self.open.is_empty() {
                return false;
            }
            self.until = now.after(ROUND);
            // Nodes that have gone in the meantime do not answer.
            let gone = |n: &usize| self.nodes.get(*n).is_none_or(|(id, life)| !there(id, *life));
            let gone: Vec<usize> = self.open.iter().map(|t| t.node).filter(gone).collect();
            for node in gone {
                self.give_up_on(node);
            }
            if !self.open.is_empty() {
                return true;
            }
        }
    }

    /// Returns what was found.
    #[must_use]
    pub fn found(&self) -> Found {
        let Findings { faulty, slow, links, suspects, untested } = self.check.findings();
        let id = |n: usize| self.id(n);
        let ids = |of: BTreeSet<usize>| of.into_iter().map(id).collect();
        let alone = self.nodes.len() == 1;
        Found {
            faulty: faulty.into_iter().map(|(n, why)| (id(n), why)).collect(),
            slow: slow.into_iter().map(|(n, why)| (id(n), why)).collect(),
            links: links.into_iter().map(|(a, b)| (id(a), id(b))).collect(),
            suspects: ids(suspects),
            // A lone node has no partner to be tested with, which is fine.
            untested: if alone { Vec::new() } else { ids(untested) },
        }
    }
}

/// Whether nodes must be checked, and the check in progress.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checks {
    /// A check of the nodes in progress.
    checking: Option<Checking>,
    /// When a failure last remained unexplained.
    unexplained: Option<Time>,
    /// Whether the current failure may be a second unexplained one.
    suspicious: bool,
    /// Whether the nodes are checked before the next world forms.
    asked: bool,
}

impl Checks {
    /// Returns whether nodes must be checked before the next world forms; `checked`: they were
    /// before in this run.
    #[must_use]
    pub fn is_due(&self, when: CheckWhen, checked: bool) -> bool {
        match when {
            CheckWhen::First | CheckWhen::Only => !checked || self.asked,
            CheckWhen::OnTrouble => self.asked,
            CheckWhen::Never => false,
        }
    }

    /// Returns the check in progress.
    #[must_use]
    pub fn in_progress(&self) -> Option<&Checking> {
        self.checking.as_ref()
    }

    /// Returns the check in progress, to change it.
    pub(crate) fn in_progress_mut(&mut self) -> Option<&mut Checking> {
        self.checking.as_mut()
    }

    /// Takes the check in progress out.
    pub(crate) fn take(&mut self) -> Option<Checking> {
        self.checking.take()
    }

    /// Continues a check.
    pub(crate) fn put(&mut self, checking: Checking) {
        self.checking = Some(checking);
    }

    /// Returns when the round in progress ends at the latest.
    #[must_use]
    pub fn until(&self) -> Option<Time> {
        self.checking.as_ref().map(|c| c.until)
    }

    /// Returns whether the next check was asked for by what happened.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.asked
    }

    /// Asks for a check before the next world forms.
    pub(crate) fn ask(&mut self) {
        self.asked = true;
    }

    /// Records that a check has ended.
    pub(crate) fn finish(&mut self) {
        self.asked = false;
    }

    /// Returns whether the current failure may be a second unexplained one.
    #[must_use]
    pub fn is_suspicious(&self) -> bool {
        self.suspicious
    }

    /// Records whether the current failure is unexplained so far. It may still be explained.
    pub(crate) fn set_suspicion(&mut self, now: Time, unexplained: bool) {
        self.suspicious = unexplained && self.unexplained.is_some_and(|at| now.since(at) < UNEXPLAINED);
    }

    /// Records that the first cause is known; `unexplained`: nothing explains it.
    pub(crate) fn blame_settled(&mut self, now: Time, unexplained: bool) {
        let suspicious = std::mem::take(&mut self.suspicious);
        if unexplained {
            self.asked |= suspicious;
            self.unexplained = Some(now);
        }
    }
}
