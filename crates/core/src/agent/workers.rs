//! The workers of this node: started, watched, ended; never two generations at once.

use super::command::{Command, CrewCommand};
use super::event::{CrewEvent, Words, WorkerExit};
use super::first_error::{EndedWorker, FirstError};
use super::observation::Observation;
use super::trainer::HiddenEnd;
use super::watch::{Silence, Watch};
use super::{Agent, Crew};
use crate::id::{Generation, Rank, Step};
use crate::ledger::{End, Reading};
use crate::message::{
    Cause, CrewReport, Ended, Extent, Failure, FirstStep, HangEvidence, Holdings, HowEnded, Outcome, Report,
    SnapshotEvery, Start, Stopped,
};
use crate::severity::{Table, in_backward};
use crate::time::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Time given to a worker that shuts itself down after an exception (its loggers finish, its
/// buffers are flushed).
const TAKE_DOWN: Duration = Duration::from_secs(3);
/// Time given to a worker that only lost its connection to another rank: the cause lies there, and
/// is known.
const TAKE_DOWN_FOLLOWER: Duration = Duration::from_millis(500);
/// SIGUSR1, SIGUSR2 and SIGCONT: left to the workers, unless the user lists them in
/// `--signals-to-handle`.
const PASSED_ON: [i32; 3] = [10, 12, 18];
/// Time that workers get to write down their stacks.
const STACKS: Duration = Duration::from_millis(150);
/// Time within which a message from one rank reaches all others.
pub(super) const NEWS: Duration = Duration::from_secs(1);

/// A worker that has failed, and what this node knows about it.
struct FailedWorker {
    local_rank: u32,
    pid: u32,
    cause: Cause,
    words: Words,
    /// How far it had come.
    extent: Extent,
}

impl Crew {
    /// Returns whether some worker has completed a step that it did not restore.
    pub(super) fn progressed(&self) -> bool {
        self.progressed || self.alive.values().any(Watch::has_new_step)
    }

    /// Returns the steps that every worker has completed; `None` if some worker does not report
    /// steps.
    pub(super) fn reached(&self) -> Option<Step> {
        let alive = self.alive.values().map(Watch::step);
        let steps: Option<Vec<u64>> = alive.chain(self.exited_at.values().copied()).collect();
        steps.and_then(|s| s.into_iter().min()).map(Step)
    }

    /// Returns the step that all workers continued from, if it is known and the same for all.
    fn from(&self) -> Option<Step> {
        let mut each = self.alive.values().map(Watch::from);
        let first = each.next()??;
        each.all(|other| other == Some(first)).then_some(Step(first))
    }

    fn describe(&self, table: &Table, failed: FailedWorker) -> Failure {
        let FailedWorker { local_rank, pid, cause, words, extent } = failed;
        let rank = Rank(self.slot.first_rank.0 + local_rank);
        let verdict = table.judge(&cause, &words.text);
        let progressed = self.progressed();
        let Extent { step, total, passes } = extent;
        // A rank that ended by itself had completed its passes. A failed pass is one more, whether
        // it was counted or not.
        let passes = passes + u64::from(in_backward(&words.text));
        Failure { rank, local_rank, pid, cause, message: words.message, step, total, passes, progressed, verdict }
    }
}

impl Agent {
    pub(super) fn start(&mut self, generation: Generation, start: Start) {
        let slot = start.place.slot.clone();
        if slot.node != self.config.node || slot.incarnation != self.config.incarnation {
            return;
        }
        self.holding = false;
        self.seen = self.seen.max(generation);
        self.latest = Some(generation);
        self.ledger.start(self.now.micros(), generation);
        if start.restarts > 0 {
            self.ledger.goes_on();
        }
        self.crew = Some(Crew {
            generation,
            restarts: start.restarts,
            slot: slot.clone(),
            alive: (0..slot.workers).map(|l| (l, Watch::default())).collect(),
            exited_at: BTreeMap::new(),
            failures: Vec::new(),
            reported: BTreeSet::new(),
            killed: BTreeSet::new(),
            uncaught: BTreeSet::new(),
            raised: BTreeMap::new(),
            end_by: None,
            killing: false,
            finished: false,
            progressed: false,
            ended: BTreeMap::new(),
            restoring: BTreeSet::new(),
            stopping: None,
            first_step_sent: false,
            from: None,
            replicas: super::replicas::Replicas::default(),
            unacknowledged: Vec::new(),
        });
        self.command(generation, CrewCommand::Spawn(start));
    }

    pub(super) fn fence(&mut self, generation: Generation, stacks: bool) {
        self.seen = self.seen.max(generation);
        if self.queued.as_ref().is_some_and(|(g, ..)| *g <= generation) {
            self.queued = None;
        }
        match &self.crew {
            Some(crew) if crew.generation <= generation => self.end_crew(stacks),
            Some(_) => {}
            None => self.report_stopped(),
        }
    }

    /// Ends a crew whose generation is over. Workers that are shutting themselves down may finish.
    fn end_crew(&mut self, stacks: bool) {
        let now = self.now;
        match self.crew.as_mut().filter(|c| !c.killing && c.end_by.is_none()) {
            Some(crew) if stacks => {
                crew.end_by = Some(now.after(STACKS));
                let generation = crew.generation;
                self.command(generation, CrewCommand::Stacks);
            }
            Some(crew) if !crew.raised.is_empty() => {
                let only_follow = crew.raised.values().all(|follows| *follows);
                crew.end_by = Some(now.after(if only_follow { TAKE_DOWN_FOLLOWER } else { TAKE_DOWN }));
            }
            Some(_) | None => self.kill(self.config.spec.ladder().fence_grace),
        }
    }

    pub(super) fn report_stopped(&mut self) {
        self.send(Report::Crew(
            self.seen,
            CrewReport::Stopped(Stopped { store_port: self.config.store_port, reached: self.last_reached }),
        ));
    }

    pub(super) fn kill(&mut self, grace: Duration) {
        if let Some(crew) = self.crew.as_mut().filter(|c| !c.killing) {
            crew.killing = true;
            if crew.stopping.is_none() {
                self.ledger.fenced(self.now.micros());
            }
            let flags = !crew.alive.is_empty() && crew.alive.values().all(Watch::flags_stop);
            let grace = if flags { Duration::ZERO } else { grace };
            let generation = crew.generation;
            self.command(generation, CrewCommand::Kill { grace });
        }
    }

    /// Returns whether this signal stops the job; other signals are passed on to the workers.
    #[must_use]
    pub fn stops_on(&self, signal: i32) -> bool {
        !PASSED_ON.contains(&signal) || self.config.stop_signals.contains(&signal)
    }

    /// Returns a step that no rank will have passed by the time all ranks know of it: ranks are at
    /// most one step apart, and a message reaches all within [`NEWS`].
    pub(super) fn step_ahead(&self) -> Option<Step> {
        let crew = self.crew.as_ref()?;
        let step = crew.alive.values().filter_map(Watch::step).max()?;
        let fastest = crew.alive.values().filter_map(Watch::median_step_ms).min()?.max(1);
        Some(Step(step + 2 + u64::try_from(NEWS.as_millis()).unwrap_or(0) / fastest))
    }

    /// Handles an event of the crew that is here.
    pub(super) fn crew_event(&mut self, now: Time, event: CrewEvent) {
        match event {
            CrewEvent::WorkerExited(exit) => {
                self.killed(&exit);
                self.worker_exited(exit);
            }
            CrewEvent::WorkerRaised { local_rank, pid, words } => self.worker_raised(local_rank, pid, words),
            CrewEvent::SpawnFailed { local_rank, message } => {
                if let Some(crew) = &mut self.crew {
                    crew.alive.remove(&local_rank);
                    let (words, extent) = (Words::from(message), Extent::default());
                    self.failed(FailedWorker { local_rank, pid: 0, cause: Cause::NotStarted, words, extent });
                }
            }
            CrewEvent::WorkersGone { store_port } => self.workers_gone(store_port),
            CrewEvent::Sample { local_rank, pid, seen } => self.sample(now, local_rank, pid, seen),
            CrewEvent::Holds(Holdings { held, parity }) => {
                // Only the latest report counts: which run the shards belong to becomes known when
                // the first worker reports it.
                self.acknowledge(|r| matches!(r, CrewReport::Holds(_)));
                let held = if crate::is_planted!(self, CopiesUnsaid) { Vec::new() } else { held };
                self.report_surely(CrewReport::Holds(Holdings { held, parity }));
            }
            CrewEvent::Offers(of) => {
                let rank = of.rank;
                self.acknowledge(|r| matches!(r, CrewReport::Offers(old) if old.rank == rank));
                self.report_surely(CrewReport::Offers(of));
                if let Some(crew) = &mut self.crew {
                    crew.restoring.insert(rank);
                }
                self.end_a_vain_wait();
            }
            CrewEvent::RestoreFailed(rank, unreadable) => {
                self.report_surely(CrewReport::RestoreFailed(rank, unreadable));
            }
            CrewEvent::FetchFailed(rank, missing) => self.report_surely(CrewReport::FetchFailed(rank, missing)),
            CrewEvent::Sealed { local_rank, step, wish } => self.worker_sealed(local_rank, step, wish),
            CrewEvent::Replicated { step, digests, round } => self.replica_done(step, round, &digests),
            CrewEvent::ShardWritten(written) => self.report_surely(CrewReport::ShardWritten(written)),
            CrewEvent::PersistDue => {
                if let Some(at) = self.step_ahead() {
                    self.report(CrewReport::PersistDue(at));
                }
            }
            CrewEvent::SnapshotEvery(every) => {
                if let Some(from) = self.step_ahead() {
                    self.report(CrewReport::SnapshotEvery(SnapshotEvery { from, every }));
                }
            }
            CrewEvent::Published(step) => self.report_surely(CrewReport::Published(step)),
        }
    }

    fn worker_raised(&mut self, local_rank: u32, pid: u32, words: Words) {
        let Some(crew) = &mut self.crew else { return };
        crew.uncaught.insert(local_rank);
        let Some(watch) = crew.alive.get(&local_rank).filter(|_| !crew.killing) else { return };
        if watch.is_shutting_down() {
            // The script is over: a helper that outlives it has raised this.
            return;
        }
        let extent = watch.extent();
        // Python's exit code for an uncaught exception.
        let cause = Cause::Exited(Outcome::Code(1));
        crew.raised.insert(local_rank, self.config.table.judge(&cause, &words.text).follows);
        self.failed(FailedWorker { local_rank, pid, cause, words, extent });
    }

    /// Records a worker that died of a signal that no process on this node had sent. If that is
    /// known only after the order to end all workers, it is still a failure of its own.
    fn killed(&mut self, exit: &WorkerExit) {
        if let Some(crew) = self.crew.as_mut().filter(|_| !exit.asked)
            && matches!(exit.outcome, Outcome::Signal(_))
        {
            crew.killed.insert(exit.local_rank);
        }
    }

    fn worker_exited(&mut self, exit: WorkerExit) {
        let WorkerExit { local_rank, pid, outcome, asked, words } = exit;
        let Some(crew) = &mut self.crew else { return };
        let raised = crew.uncaught.contains(&local_rank);
        let ended = EndedWorker { restarts: crew.restarts, local_rank, outcome, raised };
        if self.first_error.is_none() || !crate::is_planted!(self, OldErrorPassedOn) {
            self.first_error = FirstError::after(self.first_error, ended);
        }
        let Some(watch) = crew.alive.remove(&local_rank) else { return };
        let (extent, of_process) = (watch.extent(), outcome);
        let outcome = watch.of_script(of_process);
        let hidden = if of_process == Outcome::Code(0) { watch.hidden_end() } else { HiddenEnd::Normal };
        let exited_well = outcome == Outcome::Code(0);
        let (well, cause, exited) = match hidden {
            HiddenEnd::CutShort(pid) => (false, Cause::TrainerVanished { pid }, HowEnded::Exited),
            HiddenEnd::Unconfirmed(pid) => (exited_well, Cause::Exited(outcome), HowEnded::Unconfirmed { pid }),
            HiddenEnd::Normal => (exited_well, Cause::Exited(outcome), HowEnded::Exited),
        };
        let words = if outcome == of_process { words } else { words.without_crash() };
        let failed = FailedWorker { local_rank, pid, cause, words, extent };
        crew.progressed |= watch.has_new_step();
        crew.exited_at.insert(local_rank, watch.step());
        let nobody_left = crew.alive.is_empty();
        let was_over = watch.was_over(outcome);
        // A launched program may hide the failure of the process that trained.
        let reported = crew.reported.contains(&local_rank);
        let how = match crew.stopping {
            Some(_) => End::Stopped,
            None if (well && !reported) || was_over => End::Well,
            None => End::Failed,
        };
        self.ledger.ended(self.now.micros(), local_rank, how);
        crew.raised.remove(&local_rank);
        let may_end = crew.end_by.is_some() && crew.raised.is_empty() && !crew.killing;
        if crew.killing {
            // The worker may have failed on its own when others did: its report counts, not how it
            // was ended.
            if was_over && !well && !asked {
                return self.crashed_at_exit(failed);
            }
            if !well && !asked && (of_process == Outcome::Code(0) || watch.is_shutting_down()) {
                // The signal that ended the process that trained was not sent from here; an exit
                // code shows that the script has failed.
                crew.killed.insert(local_rank);
            }
            let killed = crew.killed.contains(&local_rank);
            if well && !asked {
                // It was over already; the order to end it came too late.
                if !reported {
                    self.ended(local_rank, extent, exited);
                }
            } else if killed || matches!(outcome, Outcome::Code(code) if code != 0) {
                self.failed(failed);
            }
            return;
        }
        if crew.stopping.is_some() {
            if nobody_left {
                self.kill(Duration::ZERO);
            }
            self.end_a_vain_wait();
        } else if well && reported {
            // Its failure has been reported already.
        } else if well {
            self.ended(local_rank, extent, exited);
        } else if was_over {
            self.crashed_at_exit(failed);
        } else {
            self.failed(failed);
        }
        if may_end {
            self.kill(self.config.spec.ladder().fence_grace);
        }
    }

    /// Ends workers that stop but wait for a step to restore, which a worker that is gone will not
    /// offer. They have done nothing yet that they could save.
    fn end_a_vain_wait(&mut self) {
        let in_vain = |c: &Crew| c.stopping.is_some() && !c.restoring.is_empty() && !c.exited_at.is_empty();
        if self.crew.as_ref().is_some_and(in_vain) {
            // Some may be shutting themselves down.
            self.kill(TAKE_DOWN);
        }
    }

    /// Records that the script of a worker is over. Nothing that its process still does can undo
    /// that.
    fn ended(&mut self, local_rank: u32, extent: Extent, how: HowEnded) {
        let Some(crew) = &mut self.crew else { return };
        let Extent { step, total, passes } = extent;
        let ended = Ended { rank: Rank(crew.slot.first_rank.0 + local_rank), step, total, passes, how };
        crew.ended.insert(local_rank, ended.clone());
        let gone = |local: &u32| crew.ended.get(local).is_some_and(|e| matches!(e.how, HowEnded::Crashed(_)));
        let finished = crew.failures.is_empty() && crew.alive.keys().all(gone);
        crew.finished = finished;
        self.report(CrewReport::Ended(ended));
        if finished {
            self.report(CrewReport::Finished);
        }
    }

    /// Reports a crash or hang of a worker whose interpreter was shutting down.
    fn crashed_at_exit(&mut self, failed: FailedWorker) {
        let Some(crew) = &mut self.crew else { return };
        let (local_rank, extent) = (failed.local_rank, failed.extent);
        if !crew.reported.insert(local_rank) {
            return;
        }
        let failure = crew.describe(&self.config.table, failed);
        self.ended(local_rank, extent, HowEnded::Crashed(Box::new(failure)));
    }

    fn failed(&mut self, failed: FailedWorker) {
        let refused = self.refusal.is_some();
        let Some(crew) = self.crew.as_mut().filter(|c| c.stopping.is_none() && !refused) else { return };
        let local_rank = failed.local_rank;
        let failure = crew.describe(&self.config.table, failed);
        let consequence = crew.killing && !failure.verdict.says_why() && !crew.killed.contains(&local_rank);
        if consequence || !crew.reported.insert(local_rank) {
            return;
        }
        crew.ended.remove(&local_rank);
        crew.failures.push(failure.clone());
        self.report(CrewReport::WorkerFailed(failure));
    }

    fn sample(&mut self, now: Time, local_rank: u32, pid: u32, seen: Observation) {
        let ladder = self.config.spec.ladder();
        let Some(crew) = &mut self.crew else { return };
        let (stopping, awaits_copies) = (crew.stopping.is_some(), seen.section.awaits_copies);
        let Some(watch) = crew.alive.get_mut(&local_rank) else { return };
        let Observation { step, restored, numbered, reading, .. } = seen;
        self.ledger.look(now.micros(), local_rank, Reading { step, restored, numbered, ..reading });
        if crew.killing {
            return watch.step_seen(seen);
        }
        let sign = self.signs.grave_since(watch.progress_at()).map(|s| s.verdict.line.clone());
        watch.machine_has_failed(sign.is_some());
        let verdict = watch.observe(now, seen, &ladder);
        // Where one rank waits, all do, so only rank 0 reports it.
        let speaks =
            crew.slot.first_rank.0 + local_rank == 0 && crew.failures.is_empty() && verdict.is_none() && !stopping;
        let news = if speaks { watch.silence(now, &ladder) } else { None };
        let extent = watch.extent();
        let shutting_down = watch.is_shutting_down() && !stopping;
        if shutting_down && !crew.ended.contains_key(&local_rank) {
            self.ended(local_rank, extent, HowEnded::ShuttingDown);
        }
        if let Some((evidence, silence)) = verdict
            && !stopping
        {
            let silence_ms = u64::try_from(silence.as_millis()).unwrap_or(u64::MAX);
            let said = sign.filter(|_| evidence == HangEvidence::MachineSign);
            let words = Words::from(said.unwrap_or_default());
            let cause = Cause::Hung { evidence, silence_ms };
            let failed = FailedWorker { local_rank, pid, cause, words, extent };
            if shutting_down {
                self.ledger.ended(now.micros(), local_rank, End::Well);
                return self.crashed_at_exit(failed);
            }
            self.ledger.ended(now.micros(), local_rank, End::Failed);
            return self.failed(failed);
        }
        let Some(crew) = &mut self.crew else { return };
        if let Some(news) = news {
            self.out.push_back(Command::Say { what: silence_message(news) });
        }
        let all_stepped = crew.alive.values().all(Watch::has_new_step);
        if all_stepped && !crew.first_step_sent && !crew.alive.is_empty() {
            crew.first_step_sent = true;
            crew.from = crew.from();
            if let Some(step) = crew.reached() {
                let from = crew.from;
                self.report(CrewReport::FirstStep(FirstStep { step, from }));
            }
            self.warm();
        } else if crew.first_step_sent
            && let (Some(step), Some(from)) = (crew.reached(), crew.from())
            && crew.from != Some(from)
        {
            crew.from = Some(from);
            self.report(CrewReport::FirstStep(FirstStep { step, from: Some(from) }));
        }
        if awaits_copies {
            self.awaits_copies();
        }
    }

    fn workers_gone(&mut self, store_port: u16) {
        let Some(crew) = self.crew.take() else { return };
        self.config.store_port = store_port;
        if let Some(step) = crew.reached() {
            self.last_reached = Some(step);
        }
        self.report_stopped();
        if self.over.is_some() {
            self.exit();
        } else if let Some((generation, start)) = self.queued.take() {
            self.start(generation, start);
        }
    }
}

/// Formats the message for people when rank 0 makes no step.
fn silence_message(news: Silence) -> String {
    let waits = |time: Duration, where_: &str| {
        format!(
            "rank 0 has made no progress for {} s, but there is no sign of a hang: {where_}; everstep stacks shows \
             where it is",
            time.as_secs()
        )
    };
    match news {
        Silence::Lasts(time) => waits(time, "it may be evaluating, saving, or waiting for another rank or the network"),
        Silence::WithoutData(time) => waits(time, "it is waiting for its data loader"),
        Silence::Over(time) => format!("rank 0 is stepping again after {} s", time.as_secs()),
    }
}
