//! Checks a job's nodes before they form a world: before the first one if the user asks for it,
//! after failures that nothing explains, if a detector suspects a node, or on its own
//! ([`CheckWhen::Only`]). Bad nodes are excluded; see [`crate::node_check`] for how they are found.
//!
//! ```text
//!  try_form ──> Check to each node ──> Checked from each (or timeout) ──> next round …
//!                                           └──> findings: excluded, reported, recorded
//! ```

use super::check_findings::Found;
use super::command::Fact;
use super::job::{Checking, Job, Phase};
use super::output::Output;
use crate::exit_code::ExitCode;
use crate::id::{Incarnation, NodeId};
use crate::message::{Cause, Check, Checked, Failure, HangEvidence, Order, Partner};
use crate::node_check::Task;
use crate::severity::{Table, Verdict};
use crate::spec::CheckWhen;
use crate::time::Time;

impl Job {
    /// Starts a check of these nodes or continues it. Returns true if no world may form yet.
    pub(super) fn check_before(&mut self, now: Time, candidates: &[(NodeId, Incarnation)], out: &mut Output) -> bool {
        if self.checks.in_progress().is_some() || (self.checks.is_suspicious() && self.evidence.window().is_some()) {
            return true;
        }
        let alone = candidates.len() < 2 && self.record.spec.check != CheckWhen::Only;
        if !self.checks.is_due(self.record.spec.check, self.record.checked) || alone {
            return false;
        }
        let nodes = candidates.to_vec();
        // A check may take minutes on a busy machine, and a silent console looks like a hung job.
        let why = match self.record.spec.check {
            CheckWhen::Only => "",
            _ if self.checks.is_asked() => {
                " before the next start, because nothing explains the last failure (--no-check skips this)"
            }
            _ => " before the start",
        };
        let what = format!("checking {}{why}", count(nodes.len(), "node"));
        self.to_all(&Order::Notice { what }, out);
        self.checks.put(Checking::new(now, nodes));
        self.next_round(now, out);
        self.checks.in_progress().is_some()
    }

    /// Records the result of a node's part in a round.
    pub(super) fn checked(&mut self, now: Time, node: &NodeId, answer: &Checked, out: &mut Output) {
        let Some(checking) = self.checks.in_progress_mut().filter(|c| c.expects(node, answer)) else { return };
        if let Some(why) = &answer.cannot {
            return self.cannot_check(node, why, out);
        }
        checking.answered(node, answer);
        if checking.round_is_over() {
            self.next_round(now, out);
        }
    }

    /// Continues a check without a node that is gone.
    pub(super) fn check_without(&mut self, now: Time, node: &NodeId, out: &mut Output) {
        let Some(checking) = self.checks.in_progress_mut().filter(|c| c.life(node).is_some()) else { return };
        checking.without(node);
        if checking.round_is_over() {
            self.next_round(now, out);
        }
    }

    /// Ends a round whose time is over.
    pub(super) fn check_in_time(&mut self, now: Time, out: &mut Output) {
        if !matches!(self.phase, Phase::Forming { .. }) {
            self.checks.take();
        }
        if self.checks.until().is_some_and(|until| now >= until)
            && let Some(checking) = self.checks.in_progress_mut()
        {
            checking.give_up_on_open();
            self.next_round(now, out);
        }
    }

    /// Repeats a node's task of the current round after the node came back.
    pub(super) fn check_again(&self, node: &NodeId, out: &mut Output) {
        let Some(checking) = self.checks.in_progress() else { return };
        if let Some(task) = checking.task(node) {
            self.assign(checking, task, out);
        }
    }

    /// Tells a node its task of the round.
    fn assign(&self, checking: &Checking, task: &Task, out: &mut Output) {
        let partner = |peer: &usize| {
            // One side's store serves both.
            let host = &self.nodes.get(&checking.id(task.node.min(*peer)))?.hello;
            let (host, port) = (host.host.clone(), host.store_port);
            Some(Partner { node: checking.id(*peer), host, port, first: task.node < *peer })
        };
        let partners = task.peers.iter().filter_map(partner).collect();
        let (check, round) = (checking.began(), checking.round());
        let order = Order::Check(Check { check, round, measure: task.measure, partners });
        if let Some(session) = self.nodes.session(&checking.id(task.node)) {
            out.send(session, order);
        }
    }

    fn next_round(&mut self, now: Time, out: &mut Output) {
        let Some(mut checking) = self.checks.take() else { return };
        let there =
            |id: &NodeId, life| self.nodes.get(id).is_some_and(|n| n.session.is_some() && n.hello.incarnation == life);
        if !checking.next_round(now, there) {
            return self.check_over(&checking, out);
        }
        for task in checking.open() {
            self.assign(&checking, task, out);
        }
        self.checks.put(checking);
    }

    fn cannot_check(&mut self, node: &NodeId, why: &str, out: &mut Output) {
        self.checks.take();
        self.check_done();
        let what = format!("the nodes cannot be checked: node {node}: {why}");
        if self.record.spec.check == CheckWhen::Only {
            self.phase = Phase::Over { code: ExitCode::Refused.number(), why: what };
        } else {
            self.to_all(&Order::Notice { what: what.clone() }, out);
        }
    }

    fn check_done(&mut self) {
        self.checks.finish();
        if !self.record.checked {
            self.record.checked = true;
            self.changed(false);
        }
    }

    fn check_over(&mut self, checking: &Checking, out: &mut Output) {
        self.check_done();
        let found = checking.found();
        let incident = self.record.incidents;
        let only = self.record.spec.check == CheckWhen::Only;
        if !only {
            self.use_none_of(checking, &found, incident, out);
        }
        let what =
            format!("{} checked in {}: {found}", count(checking.nodes(), "node"), count(checking.round(), "round"));
        let clean = found.is_clean();
        let fact = Fact::Checked { incident, nodes: checking.nodes() as u64, rounds: checking.round(), found };
        out.record(fact);
        // With `Only`, the findings are the reason for the end, which is sent to all nodes anyway.
        if clean || !only {
            self.to_all(&Order::Notice { what: what.clone() }, out);
        }
        if only {
            let code = if clean { ExitCode::Done } else { ExitCode::Failed }.number();
            self.phase = Phase::Over { code, why: what };
            self.end(out);
        }
    }

    /// Excludes bad nodes for good, and slow ones if another node can replace them.
    fn use_none_of(&mut self, checking: &Checking, found: &Found, incident: u64, out: &mut Output) {
        let faulty = found.faulty.iter().map(|of| (of, "check-failed"));
        for ((node, why), class) in faulty.chain(found.slow.iter().map(|of| (of, "check-slow"))) {
            let Some(life) = checking.life(node) else { continue };
            let verdict = Verdict { line: why.clone(), ..Table::built_in().named(class) };
            let firm = verdict.is_of_machine();
            self.do_without(node, life, verdict, incident, !firm, out);
            if let Some(of) = self.record.machines.exclusion_mut(node, life) {
                of.barred |= firm;
            }
        }
    }

    /// Requests a check if ranks wait and none is the one everyone is waiting for, or after a
    /// second unexplained failure. In the latter case, the next world waits until the blame is
    /// settled.
    pub(super) fn suspect(&mut self, now: Time, failure: Option<&Failure>) {
        let can = self.record.spec.check != CheckWhen::Never && self.record.world.slots.len() >= 2;
        let Some(failure) = failure.filter(|_| can) else { return };
        if matches!(failure.cause, Cause::Hung { evidence: HangEvidence::NoCpu, .. }) {
            self.checks.ask();
        }
        let silent = failure.verdict.follows || failure.verdict.class == "unknown";
        self.checks.set_suspicion(now, silent && failure.cause != Cause::Fenced);
    }
}

fn count<N: std::fmt::Display + PartialEq + From<u8>>(n: N, what: &str) -> String {
    let one = n == N::from(1);
    format!("{n} {what}{}", if one { "" } else { "s" })
}
