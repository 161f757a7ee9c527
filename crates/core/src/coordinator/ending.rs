//! Is the training over? One rank's script ends while another rank crashes: a finished training is never done again, and one that is
//! not finished never counts as finished.
//!
//! ```text
//!  a rank crashes ── its script was over ───────────────────────────> it has ended (a warning)
//!        ├────────── at the step at which another rank has ended ───> it has ended (a warning)
//!        ├────────── while others are at their end, at other steps ─> the job fails
//!        └────────── otherwise ─────────────────────────────────────> a failure like any other
//! ```
//!
//! Others may be a moment behind: an abort is reported before the last lines of the other ranks' scripts have run. So an end that may be
//! one after the last step is held for [`LAST_STEP`] before anybody is restarted. A job with checkpoints does not wait, because it goes
//! back to its last step; nor does a killed process, whose end has nothing to do with the script.

use super::command::{Command, Fact};
use super::incident::{EXIT_FAILED, describe};
use super::state::{Job, Phase};
use crate::id::{Generation, NodeId, Rank, Step};
use crate::message::{Cause, Ended, Failure, HowEnded, Order, Outcome};
use crate::severity::Scope;
use crate::spec::RestartBudget;
use crate::time::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a crash that may have come after the last step waits for others to end.
const LAST_STEP: Duration = Duration::from_secs(1);
/// The same while the interpreter of another rank is shutting down, which says that the end is near.
const SHUT_DOWN: Duration = Duration::from_secs(10);
/// Late crashes that are told one by one.
const TOLD: usize = 4;

/// How far the ranks of one generation are with ending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// Ranks whose script is over: their last step, and whether their process is, too.
    over: BTreeMap<Rank, (Option<Step>, bool)>,
    /// Crashes that may have come after the last step.
    held: Vec<(NodeId, Failure)>,
    /// Until when they are held.
    pub until: Option<Time>,
    /// Crashes after the end, which changed nothing.
    late: Vec<String>,
}

impl Ending {
    /// A rank whose script ended after this very step.
    fn with(&self, step: Option<Step>) -> Option<Rank> {
        let step = step?;
        self.over.iter().find(|(_, (at, _))| *at == Some(step)).map(|(rank, _)| *rank)
    }

    /// A rank whose script is over.
    fn any(&self) -> Option<Rank> {
        self.over.keys().next().copied()
    }
}

impl Job {
    /// Takes a failure that is none, or may turn out to be none. True: nothing else is to be done about it now.
    pub(super) fn is_at_the_end(
        &mut self,
        now: Time,
        node: &NodeId,
        failure: Option<&Failure>,
        out: &mut Vec<Command>,
    ) -> bool {
        let Some(failure) = failure.filter(|f| matches!(f.cause, Cause::Exited(_))) else { return false };
        if let Some(with) = self.ending.with(failure.step) {
            self.late_crash(now, node, failure, Some(with), out);
            return true;
        }
        if !self.may_be_the_end(failure) {
            return false;
        }
        let near = self.ending.any().is_some();
        let until = self.ending.until.unwrap_or(now.after(if near { SHUT_DOWN } else { LAST_STEP }));
        self.ending.until = Some(until);
        self.ending.held.push((node.clone(), failure.clone()));
        true
    }

    /// Whether it is worth a moment to see if the others end by themselves.
    fn may_be_the_end(&self, failure: &Failure) -> bool {
        let own = matches!(failure.cause, Cause::Exited(Outcome::Code(_) | Outcome::Signal(4..=8 | 11)));
        let others = self.record.world.size() as usize > self.ending.over.len() + self.ending.held.len() + 1;
        let without_way_back = !self.record.checkpointed || self.ending.any().is_some();
        let together = self.ending.held.first().is_none_or(|(_, f)| f.step == failure.step);
        let follows = failure.verdict.follows || failure.verdict.is_of_machine();
        own && others && without_way_back && together && !follows && failure.step.is_some()
    }

    /// A rank's script is over.
    pub(super) fn ended(
        &mut self,
        now: Time,
        node: &NodeId,
        generation: Generation,
        ended: &Ended,
        out: &mut Vec<Command>,
    ) {
        if generation != self.record.generation || !matches!(self.phase, Phase::Training { .. }) {
            return;
        }
        if let HowEnded::Crashed(failure) = &ended.how {
            return self.late_crash(now, node, failure, None, out);
        }
        let is_over = matches!(ended.how, HowEnded::Exited);
        let entry = self.ending.over.entry(ended.rank).or_insert((ended.step, is_over));
        *entry = (entry.0.max(ended.step), entry.1 || is_over);
        self.settle_held(now, out);
        if let Some(until) = &mut self.ending.until {
            *until = (*until).max(now.after(if is_over { LAST_STEP } else { SHUT_DOWN }));
        }
        self.finish();
    }

    /// Crashes that were held turn out to have come after the last step.
    fn settle_held(&mut self, now: Time, out: &mut Vec<Command>) {
        for (node, failure) in std::mem::take(&mut self.ending.held) {
            match self.ending.with(failure.step) {
                Some(with) => self.late_crash(now, &node, &failure, Some(with), out),
                None => self.ending.held.push((node, failure)),
            }
        }
        if self.ending.held.is_empty() {
            self.ending.until = None;
        }
    }

    /// A crash after the end of the training: said, and nothing else. `with`: a rank that had ended at the same step; `None`: its own
    /// script was over.
    fn late_crash(&mut self, now: Time, node: &NodeId, failure: &Failure, with: Option<Rank>, out: &mut Vec<Command>) {
        let known = self.ending.over.insert(failure.rank, (failure.step, true));
        if known.is_some_and(|(_, over)| over) {
            return;
        }
        let what = describe(node, Some(failure));
        let why = match (with, failure.step) {
            (Some(with), Some(step)) => {
                format!("after step {step}, the last one of rank {with}, which ended by itself")
            }
            _ => "while its interpreter was shutting down, after the end of the script".into(),
        };
        let fact =
            Fact::LateCrash { generation: self.record.generation, node: node.clone(), failure: failure.clone(), with };
        out.push(Command::Record { job: self.record.spec.job.clone(), fact });
        let say = format!("warning: {what}, {why}: the training counts as finished and is not done again");
        let own = self.nodes.get(node).and_then(|n| n.session);
        for session in own.into_iter().chain(self.leader().filter(|s| Some(*s) != own)) {
            out.push(Command::Send { session, order: Order::Notice { what: say.clone() }, after: None });
        }
        if self.ending.late.len() < TOLD {
            self.ending.late.push(what);
        }
        self.settle_held(now, out);
        self.finish();
    }

    /// The job is done when the processes of all ranks are over.
    pub(super) fn finish(&mut self) {
        let over = |rank: u32| self.ending.over.get(&Rank(rank)).is_some_and(|(_, over)| *over);
        let slots = &self.record.world.slots;
        let nodes: Vec<NodeId> = slots.iter().filter(|s| s.ranks().all(over)).map(|s| s.node.clone()).collect();
        let Phase::Training { finished, .. } = &mut self.phase else { return };
        finished.extend(nodes);
        if slots.iter().all(|s| finished.contains(&s.node)) {
            let late: String = self.ending.late.iter().map(|what| format!("; {what}, after the end")).collect();
            self.phase = Phase::Over { code: 0, why: format!("all workers finished{late}") };
        }
    }

    /// Crashes that were held are failures after all.
    pub(super) fn end_wait(&mut self, now: Time, out: &mut Vec<Command>) {
        if !matches!(self.phase, Phase::Training { .. }) {
            (self.ending.until, self.ending.held) = (None, Vec::new());
        } else if self.ending.until.is_some_and(|until| now >= until) {
            self.release(now, out);
        }
    }

    /// The same at once. True when there were any.
    pub(super) fn release(&mut self, now: Time, out: &mut Vec<Command>) -> bool {
        self.ending.until = None;
        let mut held = std::mem::take(&mut self.ending.held).into_iter();
        let Some((node, failure)) = held.next() else { return false };
        let generation = self.record.generation;
        self.fail_now(now, &node, Some(failure), out);
        for (node, failure) in held {
            self.testify(&node, generation, Some(failure), out);
        }
        true
    }

    /// Why a job is not restarted in which other ranks' scripts are over: whatever is started now would do again what they have done.
    pub(super) fn unfinished(&self) -> Option<(i32, String)> {
        let with = self.ending.any()?;
        let counted = matches!(self.record.spec.restarts, RestartBudget::Exactly(_));
        (!counted).then(|| {
            let why = format!(
                "rank {with} had ended by itself and this one was not known to have done the same steps: the training is not finished, and a \
                 restart would do again what rank {with} has done (give --max-restarts N to restart all the same)"
            );
            (EXIT_FAILED, why)
        })
    }

    /// Something was killed or lost beside an exception that does not say what it comes of: it may well come of that.
    pub(super) fn killed_beside(&self) -> bool {
        let killed = |f: &Failure| match f.cause {
            Cause::Exited(Outcome::Signal(signal)) => !matches!(signal, 6 | 15),
            Cause::Hung { .. } => true,
            Cause::Exited(Outcome::Code(_)) | Cause::NotStarted | Cause::Fenced => false,
        };
        let witnesses = self.inquiry.iter().flat_map(|i| &i.witnesses);
        witnesses.into_iter().any(|w| w.failure.as_ref().is_none_or(killed))
    }

    /// Why an exception of the script ends a job without a way back: it would begin again at its first step, and meet the same.
    pub(super) fn no_way_back(&self, failure: Option<&Failure>) -> Option<(i32, String)> {
        let failure = failure?;
        let counted = matches!(self.record.spec.restarts, RestartBudget::Exactly(_));
        let exception = matches!(failure.cause, Cause::Exited(Outcome::Code(_)));
        let own = matches!(failure.verdict.scope, Scope::User | Scope::Unknown | Scope::Storage);
        (exception && own && !failure.verdict.follows && !counted && !self.record.checkpointed).then(|| {
            let why = "the script ended with an error of its own and has no everstep.CheckpointManager, so a restart would begin at its \
                       first step again (give --max-restarts N to restart all the same)";
            (EXIT_FAILED, why.into())
        })
    }
}
