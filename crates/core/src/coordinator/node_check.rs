//! Checks a job's nodes before they form a world: before the first one if the user asks for it,
//! after failures that nothing explains, if a detector suspects a node, or on its own
//! ([`CheckWhen::Only`]). Bad nodes are excluded; see [`crate::node_check`] for how they are found.
//!
//! ```text
//!  try_form ──> Check to each node ──> Checked from each (or timeout) ──> next round …
//!                                           └──> findings: excluded, reported, recorded
//! ```

use super::command::{Command, Fact};
use super::state::{Job, Phase};
use crate::id::{Incarnation, NodeId};
use crate::message::{Cause, Checked, Failure, HangEvidence, Order, Partner};
use crate::node_check::{Findings, NodeCheck, Outcome, Task};
use crate::severity::{Table, Verdict};
use crate::spec::CheckWhen;
use crate::time::Time;
use std::collections::BTreeSet;
use std::time::Duration;

/// Maximum duration of a round: it imports torch and sets up communicators, perhaps for many GPUs.
const ROUND: Duration = Duration::from_secs(150);
/// A second unexplained failure within this time leads to a check.
const UNEXPLAINED: Duration = Duration::from_secs(30 * 60);
/// Exit code of a check-only run that found something.
const EXIT_FOUND: i32 = 1;
/// Exit code of a check that could not be made.
const EXIT_CANNOT: i32 = 78;

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
    pub(super) until: Time,
}

impl Checking {
    /// Returns the current round.
    #[must_use]
    pub fn round(&self) -> u32 {
        self.check.round()
    }

    fn number(&self, node: &NodeId) -> Option<usize> {
        self.nodes.iter().position(|(id, _)| id == node)
    }

    fn id(&self, number: usize) -> NodeId {
        self.nodes.get(number).map_or_else(|| NodeId(String::new()), |(id, _)| id.clone())
    }

    /// Stops waiting for a node that does not answer.
    fn give_up_on(&mut self, number: usize) {
        self.open.retain(|t| t.node != number);
        self.check.gone(number);
    }
}

impl Job {
    /// Returns whether nodes must be checked before the next world forms.
    fn check_due(&self) -> bool {
        match self.record.spec.check {
            CheckWhen::First | CheckWhen::Only => !self.record.checked || self.check_asked,
            CheckWhen::OnTrouble => self.check_asked,
            CheckWhen::Never => false,
        }
    }

    /// Starts a check of these nodes or continues it. Returns true if no world may form yet.
    pub(super) fn check_before(
        &mut self,
        now: Time,
        candidates: &[(NodeId, Incarnation)],
        out: &mut Vec<Command>,
    ) -> bool {
        if self.checking.is_some() || (self.doubtful && self.inquiry.is_some()) {
            return true;
        }
        let alone = candidates.len() < 2 && self.record.spec.check != CheckWhen::Only;
        if !self.check_due() || alone {
            return false;
        }
        let nodes = candidates.to_vec();
        // A check may take minutes on a busy machine, and a silent console looks like a hung job.
        let why = match self.record.spec.check {
            CheckWhen::Only => "",
            _ if self.check_asked => {
                " before the next start, because nothing explains the last failure (--no-check skips this)"
            }
            _ => " before the start",
        };
        let what = format!("checking {}{why}", count(nodes.len(), "node"));
        self.to_all(&Order::Notice { what }, out);
        let check = NodeCheck::new(nodes.len());
        self.checking = Some(Checking { began: now, nodes, check, open: Vec::new(), until: now });
        self.next_round(now, out);
        self.checking.is_some()
    }

    /// Records the result of a node's part in a round.
    pub(super) fn checked(&mut self, now: Time, node: &NodeId, answer: Checked, out: &mut Vec<Command>) {
        let Some(checking) = &mut self.checking else { return };
        let Some(number) = checking.number(node) else { return };
        let Some(at) = checking.open.iter().position(|t| t.node == number) else { return };
        if answer.check != checking.began || answer.round != checking.round() {
            return;
        }
        if let Some(why) = answer.cannot {
            return self.cannot_check(node, &why, out);
        }
        let task = checking.open.remove(at);
        if let Some(speed) = answer.speed {
            checking.check.measured(number, speed);
        }
        for peer in task.peers {
            let id = checking.id(peer);
            let micros = answer.pairs.iter().find(|(with, _)| *with == id).and_then(|(_, micros)| *micros);
            let outcome = micros.map_or(Outcome::Failed, |micros| Outcome::Passed { micros });
            checking.check.tested(number, peer, outcome);
        }
        if checking.open.is_empty() {
            self.next_round(now, out);
        }
    }

    /// Continues a check without a node that is gone.
    pub(super) fn check_without(&mut self, now: Time, node: &NodeId, out: &mut Vec<Command>) {
        let Some(checking) = &mut self.checking else { return };
        let Some(number) = checking.number(node) else { return };
        checking.give_up_on(number);
        if checking.open.is_empty() {
            self.next_round(now, out);
        }
    }

    /// Ends a round whose time is over.
    pub(super) fn check_in_time(&mut self, now: Time, out: &mut Vec<Command>) {
        if !matches!(self.phase, Phase::Forming { .. }) {
            self.checking = None;
        }
        let Some(checking) = self.checking.as_mut().filter(|c| now >= c.until) else { return };
        for task in checking.open.clone() {
            checking.give_up_on(task.node);
        }
        self.next_round(now, out);
    }

    /// Repeats a node's task of the current round after the node came back.
    pub(super) fn check_again(&self, node: &NodeId, out: &mut Vec<Command>) {
        let Some(checking) = &self.checking else { return };
        let task = checking.open.iter().find(|t| checking.id(t.node) == *node);
        out.extend(task.and_then(|t| self.check_order(checking, t)));
    }

    fn check_order(&self, checking: &Checking, task: &Task) -> Option<Command> {
        let node = self.nodes.get(&checking.id(task.node))?;
        let partner = |peer: &usize| {
            // One side's store serves both.
            let host = &self.nodes.get(&checking.id(task.node.min(*peer)))?.hello;
            let (host, port) = (host.host.clone(), host.store_port);
            Some(Partner { node: checking.id(*peer), host, port, first: task.node < *peer })
        };
        let partners = task.peers.iter().filter_map(partner).collect();
        let order = Order::Check { check: checking.began, round: checking.round(), measure: task.measure, partners };
        Some(Command::Send { session: node.session?, order, after: None })
    }

    fn next_round(&mut self, now: Time, out: &mut Vec<Command>) {
        let Some(mut checking) = self.checking.take() else { return };
        loop {
            checking.open = checking.check.next_round();
            if checking.open.is_empty() {
                return self.check_over(&checking, out);
            }
            checking.until = now.after(ROUND);
            // Nodes that have gone in the meantime do not answer.
            let there = |n: usize| {
                let (id, life) = checking.nodes.get(n)?;
                self.nodes.get(id).filter(|n| n.session.is_some() && n.hello.incarnation == *life)
            };
            let gone: Vec<usize> = checking.open.iter().map(|t| t.node).filter(|n| there(*n).is_none()).collect();
            for node in gone {
                checking.give_up_on(node);
            }
            if !checking.open.is_empty() {
                break;
            }
        }
        out.extend(checking.open.iter().filter_map(|t| self.check_order(&checking, t)));
        self.checking = Some(checking);
    }

    fn cannot_check(&mut self, node: &NodeId, why: &str, out: &mut Vec<Command>) {
        self.checking = None;
        self.check_done();
        let what = format!("the nodes cannot be checked: node {node}: {why}");
        if self.record.spec.check == CheckWhen::Only {
            self.phase = Phase::Over { code: EXIT_CANNOT, why: what };
        } else {
            self.to_all(&Order::Notice { what: what.clone() }, out);
        }
    }

    fn check_done(&mut self) {
        self.check_asked = false;
        if !self.record.checked {
            self.record.checked = true;
            self.changed(false);
        }
    }

    fn check_over(&mut self, checking: &Checking, out: &mut Vec<Command>) {
        self.check_done();
        let found = Found::of(checking);
        let incident = self.record.incidents;
        let only = self.record.spec.check == CheckWhen::Only;
        if !only {
            self.use_none_of(checking, &found, incident, out);
        }
        let what =
            format!("{} checked in {}: {found}", count(checking.nodes.len(), "node"), count(checking.round(), "round"));
        let clean = found.is_clean();
        let fact = Fact::Checked { incident, nodes: checking.nodes.len() as u64, rounds: checking.round(), found };
        out.push(Command::Record { job: self.record.spec.job.clone(), fact });
        // With `Only`, the findings are the reason for the end, which everyone is told anyway.
        if clean || !only {
            self.to_all(&Order::Notice { what: what.clone() }, out);
        }
        if only {
            self.phase = Phase::Over { code: if clean { 0 } else { EXIT_FOUND }, why: what };
            self.end(out);
        }
    }

    /// Excludes bad nodes for good, and slow ones if another node can replace them.
    fn use_none_of(&mut self, checking: &Checking, found: &Found, incident: u64, out: &mut Vec<Command>) {
        let faulty = found.faulty.iter().map(|of| (of, "check-failed"));
        for ((node, why), class) in faulty.chain(found.slow.iter().map(|of| (of, "check-slow"))) {
            let Some((_, life)) = checking.nodes.iter().find(|(id, _)| id == node) else { continue };
            let verdict = Verdict { line: why.clone(), ..Table::built_in().named(class) };
            let firm = verdict.is_of_machine();
            self.do_without((node, *life), verdict, incident, !firm, out);
            if let Some(of) = self.record.excluded.iter_mut().find(|e| e.node == *node && e.incarnation == *life) {
                of.barred |= firm;
            }
        }
    }

    /// Requests a check if ranks wait and none is the one everyone is waiting for, or after a
    /// second unexplained failure. In the latter case, the next world waits for the end of the
    /// inquiry.
    pub(super) fn doubt(&mut self, now: Time, failure: Option<&Failure>) {
        let can = self.record.spec.check != CheckWhen::Never && self.record.world.slots.len() >= 2;
        let Some(failure) = failure.filter(|_| can) else { return };
        self.check_asked |= matches!(failure.cause, Cause::Hung { evidence: HangEvidence::NoCpu, .. });
        let silent = failure.verdict.follows || failure.verdict.class == "unknown";
        self.doubtful = silent && failure.cause != Cause::Fenced && self.unexplained_before(now);
    }

    /// Records that the latest failure remained unexplained.
    pub(super) fn remained_unexplained(&mut self, now: Time) {
        self.check_asked |= std::mem::take(&mut self.doubtful);
        self.unexplained = Some(now);
    }

    fn unexplained_before(&self, now: Time) -> bool {
        self.unexplained.is_some_and(|at| now.since(at) < UNEXPLAINED)
    }
}

fn count<N: std::fmt::Display + PartialEq + From<u8>>(n: N, what: &str) -> String {
    let one = n == N::from(1);
    format!("{n} {what}{}", if one { "" } else { "s" })
}

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
    fn of(checking: &Checking) -> Self {
        let Findings { faulty, slow, links, suspects, untested } = checking.check.findings();
        let id = |n: usize| checking.id(n);
        let ids = |of: BTreeSet<usize>| of.into_iter().map(id).collect();
        let alone = checking.nodes.len() == 1;
        Found {
            faulty: faulty.into_iter().map(|(n, why)| (id(n), why)).collect(),
            slow: slow.into_iter().map(|(n, why)| (id(n), why)).collect(),
            links: links.into_iter().map(|(a, b)| (id(a), id(b))).collect(),
            suspects: ids(suspects),
            // A lone node has no partner to be tested with, which is fine.
            untested: if alone { Vec::new() } else { ids(untested) },
        }
    }

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
        parts.extend(self.links.iter().map(|(a, b)| format!("nodes {a} and {b} are good, what connects them is not")));
        if !self.suspects.is_empty() {
            parts.push(format!(
                "one of nodes {} is bad, or what connects them; check them with two good nodes to know",
                names(&self.suspects)
            ));
        }
        if !self.untested.is_empty() {
            parts.push(format!("nothing is known of nodes {}", names(&self.untested)));
        }
        if parts.is_empty() {
            parts.push("nothing is wrong with them".into());
        }
        f.write_str(&parts.join("; "))
    }
}
