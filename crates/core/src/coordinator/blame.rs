//! Finds the first cause of an incident. One failing process makes others fail, with hundreds of
//! "connection closed by peer" errors. So all failures around an incident are collected for a
//! moment, while the restart is under way, and the one that explains the others is blamed.
//!
//! ```text
//!  first failure ──> restart (at once)
//!        └─────────> blame window: other workers, lost nodes, signs of machines
//!                       └──> the first cause: named, and its machine excluded
//! ```

use super::command::Fact;
use super::job::{Blame, BlameWindow, GivingUp, Job, NodeFailure, Phase};
use super::output::Output;
use super::wording::describe_as;
use crate::exit_code::ExitCode;
use crate::id::{Generation, NodeId};
use crate::message::{Cause, Failure, Order, Sign};
use crate::severity::{Scope, Table, Verdict};
use crate::time::Time;
use std::time::Duration;

impl Job {
    /// Starts collecting failures, with the first one.
    pub(super) fn open_blame(
        &mut self,
        now: Time,
        incident: u64,
        node: &NodeId,
        failure: Option<Failure>,
        out: &mut Output,
    ) {
        let first = NodeFailure { node: node.clone(), failure };
        self.evidence.open_blame(now, incident, self.record.generation, &self.record.world, first);
        self.weigh(out);
    }

    /// Records another failure of the generation whose blame window is open.
    pub(super) fn add_failure(
        &mut self,
        node: &NodeId,
        generation: Generation,
        failure: Option<Failure>,
        out: &mut Output,
    ) {
        let way_back = self.no_way_back(failure.as_ref());
        let unclear = failure.as_ref().is_some_and(|f| !f.verdict.says_why());
        let current = generation == self.record.generation;
        if failure.as_ref().is_some_and(|f| current && self.exit_code_counts(f)) {
            self.is_not_done();
        }
        let Some(echoes) = self.evidence.add_failure(generation, NodeFailure { node: node.clone(), failure }) else {
            return;
        };
        // The failures before it only followed from this one.
        if echoes
            && self.record.giving_up.is_none()
            && let Some((code, why)) = way_back
        {
            self.give_up(code, why, unclear);
        }
        self.finish_late();
        self.weigh(out);
    }

    /// Records a problem that a machine reports about itself.
    pub(super) fn signed(&mut self, now: Time, node: &NodeId, sign: Sign, out: &mut Output) {
        let fact = Fact::Signed { node: node.clone(), sign: sign.clone() };
        out.record(fact);
        self.evidence.add_sign(now, node, sign);
        self.weigh(out);
    }

    /// Returns the failure of a node that ended its workers on the orders of an earlier
    /// coordinator: it follows from another failure.
    pub(super) fn fenced_before(&self, node: &NodeId) -> Option<Failure> {
        let verdict = Verdict { follows: true, ..Table::built_in().named("unknown") };
        Some(Failure {
            rank: self.record.world.slot(node)?.first_rank,
            local_rank: 0,
            pid: 0,
            cause: Cause::Fenced,
            message: String::new(),
            step: None,
            total: None,
            passes: 0,
            progressed: false,
            verdict,
        })
    }

    /// Excludes the blamed node from the world being formed, if its machine failed.
    fn weigh(&mut self, out: &mut Output) {
        let Some(blame) = self.evidence.blame().filter(|b| b.verdict.is_of_machine()) else { return };
        // A lost node is not attached, so there is nothing to exclude.
        let lost = blame.failure.is_none() && blame.verdict.class == "node-lost";
        if !lost {
            self.exclude(&blame.node, blame.verdict, false, out);
        }
    }

    fn exclude(&mut self, node: &NodeId, verdict: Verdict, if_replaced: bool, out: &mut Output) {
        let Some(window) = self.evidence.window() else { return };
        let (Some(life), incident) = (window.life(node), window.incident()) else { return };
        self.do_without(node, life, verdict, incident, if_replaced, out);
    }

    /// Settles the blame when the blame window is over.
    pub(super) fn settle_blame_when_due(&mut self, now: Time, out: &mut Output) {
        if self.evidence.until().is_none_or(|until| now < until) {
            return;
        }
        let only_consequences = self.evidence.blame().is_some_and(|b| b.is_consequence());
        // A lost machine is detected only when its timeout expires.
        let ladder = self.record.spec.ladder();
        let wait = ladder.silence + ladder.reconnect + Duration::from_secs(2);
        if !(only_consequences && self.evidence.extend_window(now, wait)) {
            self.settle_blame(now, out);
        }
    }

    /// Settles which failure was the first cause.
    pub(super) fn settle_blame(&mut self, now: Time, out: &mut Output) {
        self.reconsider(now);
        let blame = self.evidence.blame();
        if let Some(blame) = &blame {
            self.blamed_again(now, blame, out);
            let unexplained = blame.is_consequence() || blame.verdict.class == "unknown";
            self.checks.blame_settled(now, unexplained);
            if blame.is_consequence() {
                self.only_connections(now, out);
            }
        }
        let Some((window, blame)) = self.evidence.close().zip(blame) else { return };
        let same = window.opening().is_some_and(|w| {
            w.node == blame.node
                && w.failure.as_ref().map(|f| &f.verdict) == blame.failure.as_ref().map(|_| &blame.verdict)
        });
        let others = window.beside(&blame);
        let what = describe_as(&blame.node, blame.failure.as_ref(), &blame.verdict);
        if !same {
            // Consoles have shown the first failure reported, which was only a consequence.
            self.to_all(&Order::Notice { what: format!("the cause: {what}") }, out);
        }
        if !same || !others.is_empty() {
            let Blame { node, failure, verdict, .. } = blame;
            let (failure, verdict) = (failure.map(Box::new), Box::new(verdict));
            let fact = Fact::Blamed { incident: window.incident(), node, failure, verdict, others };
            out.record(fact);
        }
        if let Some(GivingUp { code, why, .. }) = self.record.giving_up.take()
            && !self.phase.is_over()
        {
            self.phase = Phase::Over { code, why: format!("{what}; {why}") };
        }
    }

    /// Decides not to restart the job, and to end it when the first cause is known. `unclear`:
    /// unless a killed process or a lost node turns out to explain the failure.
    pub(super) fn give_up(&mut self, code: i32, why: String, unclear: bool) {
        let blame = self.evidence.blame();
        let what = blame.map(|b| describe_as(&b.node, b.failure.as_ref(), &b.verdict)).unwrap_or_default();
        // If what came first only followed from another failure, a restart was ordered for it.
        let opening = self.evidence.window().and_then(BlameWindow::opening).and_then(|w| w.failure.as_ref());
        let counted = self.no_way_back(opening).is_none();
        self.record.giving_up = Some(GivingUp { code, why, what, unclear, counted });
        self.changed(false);
    }

    /// Withdraws that the training counts as finished: a rank at its end has reported a failure.
    fn is_not_done(&mut self) {
        if self.record.giving_up.take_if(|g| g.code == ExitCode::Done.number()).is_some() {
            self.changed(false);
        }
    }

    /// Restarts the job after all if the failure for which it was given up is explained by a killed
    /// process or a lost node.
    fn reconsider(&mut self, now: Time) {
        let killed = self.evidence.window().is_some_and(BlameWindow::has_killed);
        let allowed = self.record.budget_allows(now, false).is_ok();
        let explained = |g: &mut GivingUp| g.unclear && killed && (g.counted || allowed);
        let Some(given_up) = self.record.giving_up.take_if(explained) else { return };
        if !given_up.counted {
            self.record.count_restart(now);
        }
        self.changed(false);
    }

    /// Excludes a machine that is blamed for the second time within half an hour, if another one
    /// can replace it.
    fn blamed_again(&mut self, now: Time, blame: &Blame, out: &mut Output) {
        let by_hand = ["killed", "interrupted", "trainer-vanished"].contains(&blame.verdict.class.as_str());
        // A lost node has already been replaced.
        let machine = matches!(blame.verdict.scope, Scope::Process | Scope::Node)
            && !blame.verdict.follows
            && blame.failure.is_some();
        let life = self.evidence.window().and_then(|i| i.life(&blame.node));
        let Some(life) = life.filter(|_| machine && !by_hand) else { return };
        let member = |node: &NodeId| self.evidence.window().is_some_and(|i| i.life(node).is_some());
        let replaced = self.nodes.sessions().any(|(id, _)| !member(id));
        let before = self.record.machines.add_blame(now, &blame.node, life);
        if replaced && before {
            self.exclude(&blame.node, blame.verdict.clone(), true, out);
        }
    }
}
