//! A job's nodes are checked before a world is formed of them: before the first one where the user asks for it, after failures that nothing
//! explains, and by hand. Who is bad is left out; see [`crate::node_check`] for how that is found.
//!
//! ```text
//!  try_form ──> Check to each node ──> Checked from each (or time is up) ──> next round … ──> findings: left out, said, written down
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

/// A round that has not ended by then is over: torch is imported in it, and communicators of many GPUs are set up.
const ROUND: Duration = Duration::from_secs(150);
/// Failures that nothing explains count together within this.
const UNEXPLAINED: Duration = Duration::from_secs(30 * 60);
/// The exit code of a check by hand that has found something.
const EXIT_FOUND: i32 = 1;
/// The exit code of a check that could not be made.
const EXIT_CANNOT: i32 = 78;

/// A check that is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checking {
    /// Tells it from others: when it began.
    began: Time,
    /// The nodes by their numbers in the check, and their lives.
    nodes: Vec<(NodeId, Incarnation)>,
    check: NodeCheck,
    /// What has not been answered in this round.
    open: Vec<Task>,
    /// When the round ends in any case.
    pub(super) until: Time,
}

impl Checking {
    /// The round at hand.
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

    /// A node that does not answer is not waited for any more.
    fn give_up_on(&mut self, number: usize) {
        self.open.retain(|t| t.node != number);
        self.check.gone(number);
    }
}

impl Job {
    /// Whether nodes are to be checked before the next world is formed.
    fn check_due(&self) -> bool {
        match self.record.spec.check {
            CheckWhen::First | CheckWhen::Only => !self.record.checked || self.check_asked,
            CheckWhen::OnTrouble => self.check_asked,
            CheckWhen::Never => false,
        }
    }

    /// Begins a check of these nodes, or goes on with it; true when no world is to be formed yet.
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
        // It may take minutes on a machine that is busy; a console that is silent meanwhile looks like a job that hangs.
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

    /// A node says how its part of a round went.
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

    /// A node that is gone answers no more.
    pub(super) fn check_without(&mut self, now: Time, node: &NodeId, out: &mut Vec<Command>) {
        let Some(checking) = &mut self.checking else { return };
        let Some(number) = checking.number(node) else { return };
        checking.give_up_on(number);
        if checking.open.is_empty() {
            self.next_round(now, out);
        }
    }

    /// Ends a round whose time is up.
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

    /// The part of a node in the round at hand, said again after it has come back.
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
            // Who has gone meanwhile does not answer.
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
        // What was found is the reason for the end, which everybody is told anyway.
        if clean || !only {
            self.to_all(&Order::Notice { what: what.clone() }, out);
        }
        if only {
            self.phase = Phase::Over { code: if clean { 0 } else { EXIT_FOUND }, why: what };
            self.end(out);
        }
    }

    /// Who is bad is left out for good, who is slow where another one takes its place.
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

    /// Ranks that wait, and nobody who is waited for: the machines themselves are asked. So they are after a second failure within a while that
    /// nothing explains; whether this is one, the next world then waits to hear.
    pub(super) fn doubt(&mut self, now: Time, failure: Option<&Failure>) {
        let can = self.record.spec.check != CheckWhen::Never && self.record.world.slots.len() >= 2;
        let Some(failure) = failure.filter(|_| can) else { return };
        self.check_asked |= matches!(failure.cause, Cause::Hung { evidence: HangEvidence::NoCpu, .. });
        let silent = failure.verdict.follows || failure.verdict.class == "unknown";
        self.doubtful = silent && failure.cause != Cause::Fenced && self.unexplained_before(now);
    }

    /// Nobody has said what the latest failure came from.
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

/// What a check has found, by the nodes' ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Found {
    /// Certainly bad, and why.
    pub faulty: Vec<(NodeId, String)>,
    /// Slow, and in what.
    pub slow: Vec<(NodeId, String)>,
    /// Between two good nodes.
    pub links: Vec<(NodeId, NodeId)>,
    /// All that is bad beside those is among these, or between two of them.
    pub suspects: Vec<NodeId>,
    /// Nothing is known of these.
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
            // A lone node has nobody to be tested with, and nothing is wrong with that.
            untested: if alone { Vec::new() } else { ids(untested) },
        }
    }

    /// Nothing was found.
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
