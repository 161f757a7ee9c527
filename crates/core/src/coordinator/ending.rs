//! Decides whether training is over when one rank's script ends while another rank crashes.
//! Training that has finished is never repeated, and unfinished training never counts as finished.
//!
//! ```text
//!  a rank crashes ── its script was over ───────────────────────────> it has ended (a warning)
//!        ├────────── where another rank has ended ──────────────────> it has ended (a warning)
//!        ├────────── while others are at their end, elsewhere ──────> the job fails
//!        └────────── otherwise ─────────────────────────────────────> a failure like any other
//! ```
//!
//! "Where another rank has ended" is after the same last step, with no further backward pass, and,
//! if the script reports how many steps there are (`ckpt.steps(N)`), after all of them. A rank that
//! ends in the middle of the training makes the others fail in the next step, which they may not
//! complete. A rank whose interpreter is shutting down may still report a failure with its exit
//! code, so a crash where it ended is held for ten seconds, or until its process has ended.
//!
//! Other ranks may be a moment behind: an abort is reported before the last lines of their scripts
//! have run. So a crash that may have come after the last step is held for a second before
//! anything is restarted. A job with checkpoints waits only if another rank has already ended;
//! otherwise it simply returns to its last step. A killed process never causes a wait, because its
//! end has nothing to do with the script.
//!
//! If a launched program exits with 0 but the process that trained had vanished, the rank counts as
//! finished only as long as no other rank fails. This proves nothing about other ranks. If one of
//! them fails, the process that vanished is treated as a possible cause.

use super::command::Fact;
use super::job::{Blame, BlameWindow, Job, NoRestart, Phase, Vanished};
use super::output::Output;
use super::wording::{describe, unconfirmed};
use crate::exit_code::ExitCode;
use crate::id::{NodeId, Rank, Step};
use crate::message::{Cause, Ended, Failure, HowEnded, Outcome, Slot};
use crate::severity::{Scope, Table};
use crate::time::Time;

impl Job {
    /// Handles a crash that is, or may turn out to be, part of a normal end. Returns true if
    /// nothing else needs to be done about it now.
    pub(super) fn is_at_the_end(
        &mut self,
        now: Time,
        node: &NodeId,
        failure: Option<&Failure>,
        out: &mut Output,
    ) -> bool {
        let Some(failure) = failure.filter(|f| matches!(f.cause, Cause::Exited(_))) else { return false };
        self.exit_code_counts(failure);
        if let Some(with) = self.ending.with(failure) {
            self.late_crash(now, node, failure, Some(with), out);
            return true;
        }
        if self.ending.perhaps_with(failure).is_none() && !self.may_be_the_end(failure) {
            return false;
        }
        self.ending.hold(now, node, failure);
        true
    }

    /// Withdraws the record that a rank's script was over if its process then exited with a code of
    /// its own (`raise SystemExit(1)`). Returns whether there was one.
    pub(super) fn exit_code_counts(&mut self, failure: &Failure) -> bool {
        matches!(failure.cause, Cause::Exited(Outcome::Code(_))) && self.ending.withdraw(failure.rank)
    }

    /// Returns whether to wait and see if the other ranks end by themselves.
    fn may_be_the_end(&self, failure: &Failure) -> bool {
        let own = matches!(failure.cause, Cause::Exited(Outcome::Code(_) | Outcome::Signal(4..=8 | 11)));
        let others = self.record.world.size() as usize > self.ending.known() + 1;
        let without_way_back = !self.record.checkpointed || self.ending.any_beside(Some(failure.rank)).is_some();
        let together = self.ending.is_together(failure.step);
        let follows = failure.verdict.follows || failure.verdict.is_of_machine();
        let may_be_last = failure.step.is_some() && failure.extent().missing(None).is_none();
        let explained = self.ending.vanished().is_some();
        own && others && without_way_back && together && !follows && may_be_last && !explained
    }

    /// Records that the script of a rank of the current generation is over.
    pub(super) fn ended(&mut self, now: Time, node: &NodeId, ended: &Ended, out: &mut Output) {
        if !self.phase.is_training() {
            return self.had_ended(node, ended, out);
        }
        if let HowEnded::Crashed(failure) = &ended.how {
            return self.late_crash(now, node, failure, None, out);
        }
        let process = self.script_over(node, ended, out);
        self.settle_held(now, out);
        self.ending.wait_longer(now, process);
        self.finish();
    }

    /// Records that a rank's script is over. Returns whether its process is, too.
    pub(super) fn script_over(&mut self, node: &NodeId, ended: &Ended, out: &mut Output) -> bool {
        if let HowEnded::Unconfirmed { pid } = ended.how {
            self.unconfirmed(node, ended, pid, out);
        }
        let process = !matches!(ended.how, HowEnded::ShuttingDown);
        self.ending.add_over(ended.rank, ended.extent(), process);
        if let HowEnded::Unconfirmed { pid } = ended.how {
            self.ending.add_vanished(ended.rank, pid);
        }
        process
    }

    /// Reports an end that only the launched program's exit code shows, once: the job keeps that
    /// exit code, because the process that trained may have been at its end.
    fn unconfirmed(&mut self, node: &NodeId, ended: &Ended, pid: u32, out: &mut Output) {
        if !self.ending.is_news(ended.rank) {
            return;
        }
        let what = unconfirmed(node, ended.rank, pid, ended.step);
        let (generation, node, rank, step) = (self.record.generation, node.clone(), ended.rank, ended.step);
        self.warn(&node, format!("warning: {what}"), out);
        self.ending.add_note(what);
        out.record(Fact::EndUnconfirmed { generation, node, rank, pid, step });
    }

    /// Returns the failure that an end without confirmation is, now that another rank has failed.
    pub(super) fn vanished(&self, of: Vanished) -> Option<(NodeId, Failure)> {
        let Vanished { rank, pid, extent } = of;
        let slot = self.record.world.slot_of(rank)?;
        let cause = Cause::TrainerVanished { pid };
        let verdict = Table::built_in().judge(&cause, "");
        let failure = Failure {
            rank,
            local_rank: rank.0.saturating_sub(slot.first_rank.0),
            pid,
            cause,
            message: String::new(),
            step: extent.step,
            total: extent.total,
            passes: extent.passes,
            progressed: extent.step > Some(Step(0)),
            verdict,
        };
        Some((slot.node.clone(), failure))
    }

    /// Shows a sentence on a node's own console and on the first node's.
    fn warn(&self, node: &NodeId, say: String, out: &mut Output) {
        let own = self.nodes.session(node);
        for session in own.into_iter().chain(self.leader().filter(|s| Some(*s) != own)) {
            out.notice(session, say.clone());
        }
    }

    /// Records that a rank's script was over before the loss of its connections made others fail,
    /// for which a restart was ordered: there is nothing to restart for.
    fn had_ended(&mut self, node: &NodeId, ended: &Ended, out: &mut Output) {
        if let HowEnded::Unconfirmed { pid } = ended.how {
            if let Some((node, failure)) = self.vanished(Vanished { rank: ended.rank, pid, extent: ended.extent() }) {
                self.add_failure(&node, self.record.generation, Some(failure), out);
            }
            return;
        }
        let consequence = self.evidence.blame().filter(Blame::is_consequence).and_then(|b| b.failure);
        let Some(failure) = consequence.filter(|_| !matches!(ended.how, HowEnded::Crashed(_))) else { return };
        self.script_over(node, ended, out);
        self.finish_late();
        let unfinished = self.unfinished(Some(&failure)).filter(|_| self.ending.perhaps_with(&failure).is_none());
        if let Some((code, why)) = unfinished.filter(|_| self.record.giving_up.is_none()) {
            self.give_up(code, why, false);
        }
    }

    /// Ends the job, for which a restart was ordered, if the failures since were only those of
    /// ranks that had done what the others had when they ended by themselves.
    pub(super) fn finish_late(&mut self) {
        let Some(window) = self.evidence.window().filter(|_| !self.phase.is_training()) else { return };
        let consequence = self.evidence.blame().is_some_and(|b| b.is_consequence());
        let Some((with, _)) = self.ending.any_beside(None) else { return };
        if consequence && self.record.giving_up.is_none() && self.all_had_ended(window) {
            let why = format!(
                "this happened after the last step of rank {with}, which had already finished: the training counts as finished and is not repeated"
            );
            self.give_up(ExitCode::Done.number(), why, false);
        }
    }

    /// Returns whether each rank's script is over, or failed where that of another one was over.
    fn all_had_ended(&self, window: &BlameWindow) -> bool {
        let failed = |rank| window.failures().any(|f| f.rank == rank && self.ending.perhaps_with(f).is_some());
        let mut ranks = self.record.world.slots.iter().flat_map(Slot::ranks).map(Rank);
        ranks.all(|rank| self.ending.has(rank) || failed(rank))
    }

    /// Settles held crashes that turn out to have come after the last step.
    fn settle_held(&mut self, now: Time, out: &mut Output) {
        while let Some((node, failure, with)) = self.ending.take_settled(now) {
            self.late_crash(now, &node, &failure, Some(with), out);
        }
    }

    /// Reports a crash after the end of training, and counts the rank as finished. `with` is a rank
    /// that had ended at the same step; `None`: the crashed worker's own script was over.
    fn late_crash(&mut self, now: Time, node: &NodeId, failure: &Failure, with: Option<Rank>, out: &mut Output) {
        if !self.ending.add_crashed(failure.rank, failure.extent()) {
            return;
        }
        let what = describe(node, Some(failure));
        let why = match (with, failure.step) {
            (Some(with), Some(step)) => {
                format!("after step {step}, the last step of rank {with}, which had already finished")
            }
            _ => "while its interpreter was shutting down, after the end of the script".into(),
        };
        let fact =
            Fact::LateCrash { generation: self.record.generation, node: node.clone(), failure: failure.clone(), with };
        out.record(fact);
        self.warn(node, format!("warning: {what}, {why}: the training counts as finished and is not repeated"), out);
        self.ending.add_note(format!("{what}, after the end"));
        self.settle_held(now, out);
        self.finish();
    }

    /// Handles the loss of a node in training: a failure, unless the scripts of all its ranks were
    /// over.
    pub(super) fn member_lost(&mut self, now: Time, id: &NodeId, out: &mut Output) {
        let Some(ended) = self.record.world.slot(id).and_then(|slot| self.ending.all_ended(slot)) else {
            return self.fail(now, id, None, out);
        };
        for (rank, extent) in ended {
            self.ending.add_over(rank, extent, true);
        }
        self.keep_ends(id);
        let what = format!("node {id} was lost after the scripts of its ranks had ended");
        self.warn(id, format!("warning: {what}: they are not run again"), out);
        self.ending.add_note(what);
        self.settle_held(now, out);
        self.finish();
    }

    /// Keeps in the record that ranks of a lost node had ended: their node cannot report it to a
    /// coordinator that starts later.
    pub(super) fn keep_ends(&mut self, id: &NodeId) {
        let ended = self.record.world.slot(id).map(|slot| self.ending.ended_on(slot)).unwrap_or_default();
        self.record.ended.retain(|(rank, _)| ended.iter().all(|(other, _)| other != rank));
        self.record.ended.extend(ended);
        self.changed(false);
    }

    /// Ends the job when the processes of all ranks are over.
    pub(super) fn finish(&mut self) {
        let Phase::Training { finished, .. } = &mut self.phase else { return };
        let slots = &self.record.world.slots;
        finished.extend(slots.iter().filter(|s| self.ending.is_over(s)).map(|s| s.node.clone()));
        if slots.iter().all(|s| finished.contains(&s.node)) {
            self.phase = self.finished_well();
        }
    }

    /// Returns the phase of a job that is done.
    pub(super) fn finished_well(&self) -> Phase {
        Phase::Over { code: ExitCode::Done.number(), why: format!("all workers finished{}", self.ending.notes()) }
    }

    /// Returns whether the scripts of all ranks are over with nothing left to do, although some of
    /// their processes may not have ended.
    pub(super) fn scripts_are_over(&self) -> bool {
        let slots = &self.record.world.slots;
        !slots.is_empty() && slots.iter().all(|slot| self.ending.all_ended(slot).is_some())
    }

    /// Treats held crashes as failures when their time is over.
    pub(super) fn end_wait(&mut self, now: Time, out: &mut Output) {
        if !self.phase.is_training() {
            self.ending.release();
        } else if self.ending.until().is_some_and(|until| now >= until) {
            self.settle_held(now, out);
            self.release(now, out);
        }
    }

    /// Treats held crashes as failures now. Returns whether there were any.
    pub(super) fn release(&mut self, now: Time, out: &mut Output) -> bool {
        let mut held = self.ending.release().into_iter();
        let Some((node, failure)) = held.next() else { return false };
        let generation = self.record.generation;
        self.fail_from(now, &node, Some(failure), out);
        for (node, failure) in held {
            self.add_failure(&node, generation, Some(failure), out);
        }
        true
    }

    /// Returns why the job cannot restart if other ranks' scripts are over: a restart would repeat
    /// their work.
    pub(super) fn unfinished(&self, failure: Option<&Failure>) -> Option<(i32, String)> {
        let (with, end) = self.ending.any_beside(failure.map(|f| f.rank))?;
        (!self.record.restarts_are_counted()).then(|| {
            let crashed = failure.map(Failure::extent).unwrap_or_default();
            let how = match (end.step, end.missing(crashed.total)) {
                (Some(step), Some(total)) => format!("rank {with} finished at step {step} of {total}"),
                (Some(step), None) if crashed.step == end.step && crashed.passes > end.passes => {
                    format!("rank {with} finished after step {step}, but this rank had already begun the next step")
                }
                _ => format!("rank {with} had finished, but this rank may not have completed the same steps"),
            };
            let why = format!(
                "{how}: the training is not finished, and a restart would repeat the work of rank {with} (to restart anyway, use --max-restarts N)"
            );
            (ExitCode::Failed.number(), why)
        })
    }

    /// Returns why an exception of the script ends a job without checkpoints: a restart would begin
    /// at the first step and fail the same way.
    pub(super) fn no_way_back(&self, failure: Option<&Failure>) -> Option<(i32, String)> {
        let failure = failure?;
        let counted = self.record.restarts_are_counted();
        let exception = matches!(failure.cause, Cause::Exited(Outcome::Code(_)));
        let own = matches!(failure.verdict.scope, Scope::User | Scope::Unknown | Scope::Storage);
        (exception && own && !failure.verdict.follows && !counted && !self.record.checkpointed).then(|| {
            let why = if self.record.progressed || failure.progressed {
                "the script raised an error and no rank has used an everstep.CheckpointManager, so a restart would \
                 begin at the first step (to restart anyway, use --max-restarts N)"
                    .into()
            } else {
                NoRestart::NoProgress.to_string()
            };
            (ExitCode::Failed.number(), why)
        })
    }
}
