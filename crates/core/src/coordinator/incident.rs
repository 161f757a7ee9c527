//! From a failure to an action: restart in place, wait for a node, or give up.

use super::command::{Action, Fact};
use super::job::{Job, Phase};
use super::output::Output;
use super::wording::describe;
use crate::digests::Odd;
use crate::exit_code::ExitCode;
use crate::id::{NodeId, Rank, Step};
use crate::message::{Cause, CrewOrder, Failure, FirstStep, Order, Outcome};
use crate::severity::Scope;
use crate::slow::Change;
use crate::time::Time;

impl Job {
    /// Returns why not to restart after the same error at the same step as last time: the script
    /// fails that way every time. Not checked if the user has set the number of restarts.
    fn same_again(&mut self, failure: Option<&Failure>) -> Option<String> {
        let error = failure.and_then(error_of);
        let again = self.record.has_error_again(error);
        (again && !self.record.restarts_are_counted()).then(|| {
            "the same error followed the same step as last time, so a restart would fail the same way; fix the error, or use --max-restarts N to restart anyway".into()
        })
    }

    /// Handles the failure of a member of the world: of a worker, or of the whole node (`None`).
    pub(super) fn fail(&mut self, now: Time, node: &NodeId, failure: Option<Failure>, out: &mut Output) {
        if self.is_at_the_end(now, node, failure.as_ref(), out) {
            return;
        }
        let generation = self.record.generation;
        if self.release(now, out) {
            self.add_failure(node, generation, failure, out);
        } else {
            self.fail_from(now, node, failure, out);
        }
    }

    /// Handles what is certainly a failure, behind a process that vanished before it, if there is
    /// one.
    pub(super) fn fail_from(&mut self, now: Time, node: &NodeId, failure: Option<Failure>, out: &mut Output) {
        let Some((first, vanished)) = self.ending.vanished().and_then(|v| self.vanished(v)) else {
            return self.fail_now(now, node, failure, out);
        };
        let generation = self.record.generation;
        self.fail_now(now, &first, Some(vanished), out);
        self.add_failure(node, generation, failure, out);
    }

    /// Handles what is certainly a failure.
    fn fail_now(&mut self, now: Time, node: &NodeId, failure: Option<Failure>, out: &mut Output) {
        // The blame window of the previous failure ends here.
        self.settle_blame(now, out);
        self.record.incidents += 1;
        let incident = self.record.incidents;
        if failure.as_ref().is_some_and(|f| f.progressed) {
            self.record.progressed = true;
        }
        let again = self.same_again(failure.as_ref());
        let unfinished = self.unfinished(failure.as_ref());
        let may_be_explained = unfinished.is_none();
        let first = unfinished.or_else(|| self.no_way_back(failure.as_ref()));
        let refusal = first.or_else(|| {
            again.map_or_else(
                || {
                    self.record
                        .budget_allows(now, failure.as_ref().is_some_and(|f| f.cause != Cause::Fenced))
                        .err()
                        .map(|why| (ExitCode::Failed.number(), why.to_string()))
                },
                |why| Some((ExitCode::SameAgain.number(), why)),
            )
        });
        // Later reports may show that the script is not at fault.
        let unclear =
            self.no_way_back(failure.as_ref()).is_some() && failure.as_ref().is_some_and(|f| !f.verdict.says_why());
        let action = match (&refusal, &failure) {
            (Some(_), _) => Action::Fail,
            (None, Some(_)) => Action::Restart,
            (None, None) => Action::Reconfigure,
        };
        let what = describe(node, failure.as_ref());
        // The node's own console shows its workers' failures at once.
        let others = self.nodes.sessions().filter(|(id, _)| failure.is_none() || *id != node);
        out.send_each(others.map(|(_, session)| session), &Order::Notice { what: what.clone() });
        let follows = failure.as_ref().is_some_and(|f| f.verdict.follows);
        let hung = failure.as_ref().is_some_and(|f| matches!(f.cause, Cause::Hung { .. }));
        self.record_progress(out);
        let fact = Fact::IncidentOpened {
            incident,
            generation: self.record.generation,
            node: node.clone(),
            failure: failure.clone(),
            action,
        };
        out.record(fact);
        self.restarts.failed(now, self.recovery.has_lasted(now), self.record.restarts_are_counted());
        self.suspect(now, failure.as_ref());
        if refusal.is_none() {
            self.charged(now, node, failure.as_ref());
        }
        self.open_blame(now, incident, node, failure, out);
        self.recovery.begin_stop();
        match refusal {
            // After a hang, all ranks are still asked for their stacks.
            Some((code, why)) if follows || hung || unclear => {
                self.give_up(code, why, unclear && may_be_explained);
            }
            Some((code, why)) => {
                self.phase = Phase::Over { code, why: format!("{what}; {why}") };
                return;
            }
            None => {}
        }
        if self.record.giving_up.is_none() {
            self.record.count_restart(now);
        }
        self.recovery.open_incident(incident);
        self.growth.refuse_newcomers();
        // It is known which rank hangs; what the others wait for shows why.
        self.fence_all(now, hung, out);
        self.phase = Phase::forming(now);
    }

    /// Records the first new step of a generation, which continues `from` a step if that is known.
    pub(super) fn first_step(&mut self, first: FirstStep, out: &mut Output) {
        let (generation, FirstStep { step, from }) = (self.record.generation, first);
        let incident = self.recovery.first_step(generation, step, from);
        self.restarts.worked();
        let fact = Fact::FirstStep { generation, step, incident, from, had: self.recovery.highest() };
        out.record(fact);
    }

    /// Records the step that the ranks continue from, if [`Job::first_step`] did not have it.
    pub(super) fn began(&mut self, step: Step, from: Step, out: &mut Output) {
        let generation = self.record.generation;
        if self.recovery.began(generation, step, from) {
            let fact = Fact::Began { generation, step, from, had: self.recovery.highest() };
            out.record(fact);
        }
    }

    /// Records that all ranks have completed this step.
    pub(super) fn reached(&mut self, step: Step, out: &mut Output) {
        let Some(incident) = self.recovery.completed(step) else { return };
        let fact = Fact::CaughtUp { generation: self.record.generation, step, incident };
        out.record(fact);
    }

    /// Reports that a rank holds the others up, or no longer does. Nothing else is done about it.
    pub(super) fn slow(&mut self, change: Change, out: &mut Output) {
        let rank = Rank(change.rank);
        let Some(node) = self.record.world.slot_of(rank).map(|s| s.node.clone()) else { return };
        let fact = Fact::SlowRank { rank, node: node.clone(), percent: change.percent, slow: change.slow };
        out.record(fact);
        let what = if change.slow {
            let times = change.percent as f64 / 100.0;
            format!(
                "rank {rank} on node {node} is slow: its own work per step takes {times:.1} times as long as the other ranks', who wait for it"
            )
        } else {
            format!("rank {rank} on node {node} is no longer slow")
        };
        if let Some(session) = self.leader() {
            out.notice(session, what);
        }
    }

    /// Reports that ranks differ that should hold the same state; the job continues.
    pub(super) fn diverged(&mut self, step: Step, found: Odd, out: &mut Output) {
        let Odd { ranks, certain } = found;
        let world = &self.record.world;
        let nodes: Vec<NodeId> = ranks.iter().filter_map(|r| Some(world.slot_of(*r)?.node.clone())).collect();
        let who: Vec<String> = ranks.iter().zip(&nodes).map(|(r, n)| format!("rank {r} on node {n}")).collect();
        let what = if certain {
            format!(
                "{} has a different state than all other ranks at step {step}: memory or a computation was silently \
                 corrupted, or the script passes replicated=True for state that differs between ranks; if it was \
                 corrupted, stop the job, remove the node, and restore an older step",
                who.join(" and ")
            )
        } else {
            format!(
                "{} should have the same state at step {step}, but do not: memory or a computation of one was silently \
                 corrupted, or the script passes replicated=True for state that differs between ranks; with three or \
                 more ranks, everstep could tell which one is wrong",
                who.join(" and ")
            )
        };
        let fact = Fact::Diverged { step, ranks, nodes, certain };
        out.record(fact);
        if let Some(session) = self.leader() {
            out.notice(session, what);
        }
    }

    /// Tells every node to end the workers of the current generation.
    pub(super) fn fence(&mut self, now: Time, out: &mut Output) {
        self.fence_all(now, false, out);
    }

    fn fence_all(&mut self, now: Time, stacks: bool, out: &mut Output) {
        let order = self.crew_order(CrewOrder::Fence { stacks });
        out.send_each(self.nodes.fence(now, None), &order);
    }

    /// Tells one node to end the workers of the current generation.
    pub(super) fn fence_node(&mut self, id: &NodeId, now: Time, out: &mut Output) {
        let order = self.crew_order(CrewOrder::Fence { stacks: false });
        out.send_each(self.nodes.fence(now, Some(id)), &order);
    }
}

/// Returns what identifies a worker's error when it occurs again: its message with numbers masked
/// (addresses, sizes, times), and its step; `None` if the cause may lie outside the worker.
fn error_of(failure: &Failure) -> Option<(String, Step)> {
    let own = matches!(failure.verdict.scope, Scope::User | Scope::Process | Scope::Unknown);
    let ended = matches!(failure.cause, Cause::Exited(Outcome::Code(_)));
    if !own || !ended || failure.verdict.follows || failure.message.is_empty() {
        return None;
    }
    let mut known = String::with_capacity(failure.message.len());
    let (mut within, mut number) = (false, false);
    for c in failure.message.chars() {
        if c.is_alphanumeric() && !within {
            number = c.is_ascii_digit();
            known.push(if number { '#' } else { c });
        } else if !(c.is_alphanumeric() && number) {
            known.push(c);
        }
        within = c.is_alphanumeric();
    }
    Some((known, failure.step?))
}
