//! The workers of this node: started, watched, ended; never two generations at once.

use super::command::Command;
use super::event::{Event, Words};
use super::observation::Observation;
use super::trainer::HiddenEnd;
use super::watch::{Silence, Watch};
use super::{Agent, Crew};
use crate::id::{Generation, Rank, Step};
use crate::ledger::{End, Reading};
use crate::message::{Cause, Ended, Extent, Failure, HangEvidence, HowEnded, Outcome, Place, Report};
use crate::severity::{Table, in_backward};
use crate::time::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Time given to a worker that shuts itself down after an exception (its loggers finish, its
/// buffers are flushed).
const TAKE_DOWN: Duration = Duration::from_secs(3);
/// The same for a worker that only lost its connection to another rank: the cause lies there, and
/// is known.
const TAKE_DOWN_FOLLOWER: Duration = Duration::from_millis(500);
/// SIGUSR1, SIGUSR2 and SIGCONT: left to the workers, unless the user lists them in
/// `--signals-to-handle`.
const PASSED_ON: [i32; 3] = [10, 12, 18];
/// Time that workers get to write down their stacks.
const STACKS: Duration = Duration::from_millis(150);
/// Time within which a message from one rank reaches all others.
const NEWS: Duration = Duration::from_secs(1);

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

    fn describe(
        &self,
        table: &Table,
        (local_rank, pid): (u32, u32),
        cause: Cause,
        words: Words,
        extent: Extent,
    ) -> Failure {
        let rank = Rank(self.slot.first_rank.0 + local_rank);
        let verdict = table.judge(&cause, &words.text);
        let progressed = self.progressed();
        let Extent { step, total, passes } = extent;
        // A rank that ended by itself had completed its passes. A failed pass is one more, whether it was counted or not.
        let passes = passes + u64::from(in_backward(&words.text));
        Failure { rank, local_rank, pid, cause, message: words.message, step, total, passes, progressed, verdict }
    }
}

impl Agent {
    pub(super) fn start(&mut self, generation: Generation, place: Place, restarts: u32, max_restarts: u32) {
        let slot = place.slot.clone();
        if slot.node != self.config.node || slot.incarnation != self.config.incarnation {
            return;
        }
        self.holding = false;
        self.seen = self.seen.max(generation);
        self.book.start(self.now.micros(), generation);
        if restarts > 0 {
            self.book.goes_on();
        }
        self.crew = Some(Crew {
            generation,
            slot: slot.clone(),
            alive: (0..slot.workers).map(|l| (l, Watch::default())).collect(),
            exited_at: BTreeMap::new(),
            failures: Vec::new(),
            told: BTreeSet::new(),
            killed: BTreeSet::new(),
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
        self.out.push_back(Command::Spawn { generation, place, restarts, max_restarts });
    }

    pub(super) fn fence(&mut self, generation: Generation, stacks: bool) {
        self.seen = self.seen.max(generation);
        if self.queued.as_ref().is_some_and(|(g, ..)| *g <= generation) {
            self.queued = None;
        }
        match &self.crew {
            Some(crew) if crew.generation <= generation => {
                let running = crew.generation;
                self.end_crew(running, stacks);
            }
            Some(_) => {}
            None => self.report_stopped(),
        }
    }

    /// Ends a crew whose generation is over. Workers that are shutting themselves down may finish.
    fn end_crew(&mut self, generation: Generation, stacks: bool) {
        let now = self.now;
        match self.crew.as_mut().filter(|c| c.generation == generation && !c.killing && c.end_by.is_none()) {
            Some(crew) if stacks => {
                crew.end_by = Some(now.after(STACKS));
                self.out.push_back(Command::Stacks { generation });
            }
            Some(crew) if !crew.raised.is_empty() => {
                let only_follow = crew.raised.values().all(|follows| *follows);
                crew.end_by = Some(now.after(if only_follow { TAKE_DOWN_FOLLOWER } else { TAKE_DOWN }));
            }
            Some(_) | None => self.kill(generation, self.config.spec.ladder().fence_grace),
        }
    }

    pub(super) fn report_stopped(&mut self) {
        self.send(Report::Stopped {
            generation: self.seen,
            store_port: self.config.store_port,
            reached: self.last_reached,
        });
    }

    pub(super) fn kill(&mut self, generation: Generation, grace: Duration) {
        if let Some(crew) = self.crew.as_mut().filter(|c| c.generation == generation && !c.killing) {
            crew.killing = true;
            if crew.stopping.is_none() {
                self.book.fenced(self.now.micros());
            }
            let flags = !crew.alive.is_empty() && crew.alive.values().all(Watch::flags_stop);
            let grace = if flags { Duration::ZERO } else { grace };
            self.out.push_back(Command::Kill { generation, grace });
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

    pub(super) fn worker_event(&mut self, now: Time, event: Event) {
        match event {
            Event::WorkerExited { generation, local_rank, pid, outcome, asked, words } => {
                self.killed(generation, local_rank, outcome, asked);
                self.worker_exited(generation, local_rank, (pid, asked), outcome, words);
            }
            Event::WorkerRaised { generation, local_rank, pid, words } => {
                let alive =
                    |c: &&mut Crew| c.generation == generation && c.alive.contains_key(&local_rank) && !c.killing;
                let Some(crew) = self.crew.as_mut().filter(alive) else { return };
                let extent = crew.alive.get(&local_rank).map(Watch::extent).unwrap_or_default();
                // Python's exit code for an uncaught exception.
                let cause = Cause::Exited(Outcome::Code(1));
                crew.raised.insert(local_rank, self.config.table.judge(&cause, &words.text).follows);
                self.failed(generation, local_rank, pid, cause, words, extent);
            }
            Event::SpawnFailed { generation, local_rank, message } => {
                if let Some(crew) = self.crew.as_mut().filter(|c| c.generation == generation) {
                    crew.alive.remove(&local_rank);
                    let words = Words::from(message);
                    self.failed(generation, local_rank, 0, Cause::NotStarted, words, Extent::default());
                }
            }
            Event::WorkersGone { generation, store_port } => self.workers_gone(generation, store_port),
            Event::Sample { generation, local_rank, pid, seen } => self.sample(now, generation, local_rank, pid, seen),
            Event::Holds { generation, held, parity } if self.runs(generation) => {
                // Only the latest report counts: which run the shards belong to becomes known when
                // the first worker reports it.
                self.acknowledge(generation, |r| matches!(r, Report::Holds { .. }));
                let held = if crate::is_planted!(self, CopiesUnsaid) { Vec::new() } else { held };
                self.send_surely(Report::Holds { generation, held, parity });
            }
            Event::Offers { generation, rank, offers } if self.runs(generation) => {
                self.acknowledge(generation, |r| matches!(r, Report::Offers { rank: old, .. } if *old == rank));
                self.send_surely(Report::Offers { generation, rank, offers });
                if let Some(crew) = &mut self.crew {
                    crew.restoring.insert(rank);
                }
                self.end_a_vain_wait(generation);
            }
            Event::RestoreFailed { generation, rank, step, tier } if self.runs(generation) => {
                self.send_surely(Report::RestoreFailed { generation, rank, step, tier });
            }
            Event::Sealed { generation, local_rank, step, wish } => {
                self.worker_sealed(generation, local_rank, step, wish);
            }
            Event::Replicated { generation, step, digests, round } => {
                self.replica_done(generation, (step, round), &digests);
            }
            Event::ShardWritten { generation, step, directory, shard } if self.runs(generation) => {
                self.send_surely(Report::ShardWritten { generation, step, directory, shard });
            }
            Event::PersistDue { generation } if self.runs(generation) => {
                if let Some(at) = self.step_ahead() {
                    self.send(Report::PersistDue { generation, at });
                }
            }
            Event::SnapshotEvery { generation, every } if self.runs(generation) => {
                if let Some(from) = self.step_ahead() {
                    self.send(Report::SnapshotEvery { generation, from, every });
                }
            }
            Event::Published { generation, step } if self.runs(generation) => {
                self.send_surely(Report::Published { generation, step });
            }
            _ => {}
        }
    }

    /// Notes a worker that died of a signal which nobody here had sent. If that is known only after
    /// the order to end all workers, it is still a failure of its own.
    fn killed(&mut self, generation: Generation, local_rank: u32, outcome: Outcome, asked: bool) {
        if let Some(crew) = self.crew.as_mut().filter(|c| c.generation == generation && !asked)
            && matches!(outcome, Outcome::Signal(_))
        {
            crew.killed.insert(local_rank);
        }
    }

    fn worker_exited(
        &mut self,
        generation: Generation,
        local_rank: u32,
        (pid, asked): (u32, bool),
        outcome: Outcome,
        words: Words,
    ) {
        let Some(crew) = self.crew.as_mut().filter(|c| c.generation == generation) else { return };
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
        crew.progressed |= watch.has_new_step();
        crew.exited_at.insert(local_rank, watch.step());
        let nobody_left = crew.alive.is_empty();
        let was_over = watch.was_over(outcome);
        // A launched program may hide the failure of the process that trained.
        let told = crew.told.contains(&local_rank);
        let how = match crew.stopping {
            Some(_) => End::Stopped,
            None if (well && !told) || was_over => End::Well,
            None => End::Failed,
        };
        self.book.ended(self.now.micros(), local_rank, how);
        crew.raised.remove(&local_rank);
        let may_end = crew.end_by.is_some() && crew.raised.is_empty() && !crew.killing;
        if crew.killing {
            // The worker may have failed on its own when others did: what it reported counts, not
            // how it was ended.
            if !well && of_process == Outcome::Code(0) && !asked {
                // Whatever ended the process that trained was not sent from here.
                crew.killed.insert(local_rank);
            }
            let killed = crew.killed.contains(&local_rank);
            if well && !asked {
                // It was over already; the order to end it came too late.
                if !told {
                    self.ended(generation, local_rank, extent, exited);
                }
            } else if killed || matches!(outcome, Outcome::Code(code) if code != 0) {
                self.failed(generation, local_rank, pid, cause, words, extent);
            }
            return;
        }
        if crew.stopping.is_some() {
            if nobody_left {
                self.kill(generation, Duration::ZERO);
            }
            self.end_a_vain_wait(generation);
        } else if well && told {
            // Its failure was reported, and stands.
        } else if well {
            self.ended(generation, local_rank, extent, exited);
        } else if was_over {
            self.crashed_at_exit(generation, local_rank, pid, cause, words, extent);
        } else {
            self.failed(generation, local_rank, pid, cause, words, extent);
        }
        if may_end {
            self.kill(generation, self.config.spec.ladder().fence_grace);
        }
    }

    /// Ends workers that stop but wait for a step to restore, which a worker that is gone will not offer. They have done
    /// nothing yet that they could save.
    fn end_a_vain_wait(&mut self, generation: Generation) {
        let in_vain = |c: &Crew| c.stopping.is_some() && !c.restoring.is_empty() && !c.exited_at.is_empty();
        if self.crew.as_ref().is_some_and(in_vain) {
            // Some may be shutting themselves down.
            self.kill(generation, TAKE_DOWN);
        }
    }

    /// Records that the script of a worker is over. Nothing that its process still does can undo
    /// that.
    fn ended(&mut self, generation: Generation, local_rank: u32, extent: Extent, how: HowEnded) {
        let Some(crew) = self.crew.as_mut().filter(|c| c.generation == generation) else { return };
        let Extent { step, total, passes } = extent;
        let ended = Ended { rank: Rank(crew.slot.first_rank.0 + local_rank), step, total, passes, how };
        crew.ended.insert(local_rank, ended.clone());
        let gone = |local: &u32| crew.ended.get(local).is_some_and(|e| matches!(e.how, HowEnded::Crashed(_)));
        let finished = crew.failures.is_empty() && crew.alive.keys().all(gone);
        crew.finished = finished;
        self.send(Report::Ended { generation, ended });
        if finished {
            self.send(Report::Finished { generation });
        }
    }

    /// Reports a crash or hang of a worker whose interpreter was shutting down.
    fn crashed_at_exit(
        &mut self,
        generation: Generation,
        local_rank: u32,
        pid: u32,
        cause: Cause,
        words: Words,
        extent: Extent,
    ) {
        let Some(crew) = self.crew.as_mut().filter(|c| c.generation == generation) else { return };
        if !crew.told.insert(local_rank) {
            return;
        }
        let failure = crew.describe(&self.config.table, (local_rank, pid), cause, words, extent);
        self.ended(generation, local_rank, extent, HowEnded::Crashed(Box::new(failure)));
    }

    fn failed(
        &mut self,
        generation: Generation,
        local_rank: u32,
        pid: u32,
        cause: Cause,
        words: Words,
        extent: Extent,
    ) {
        let refused = self.refusal.is_some();
        let Some(crew) = self.crew.as_mut().filter(|c| c.stopping.is_none() && !refused) else { return };
        let failure = crew.describe(&self.config.table, (local_rank, pid), cause, words, extent);
        let consequence = crew.killing && !failure.verdict.says_why() && !crew.killed.contains(&local_rank);
        if consequence || !crew.told.insert(local_rank) {
            return;
        }
        crew.failures.push(failure.clone());
        self.send(Report::WorkerFailed { generation, failure });
    }

    fn sample(&mut self, now: Time, generation: Generation, local_rank: u32, pid: u32, seen: Observation) {
        let ladder = self.config.spec.ladder();
        let Some(crew) = self.crew.as_mut().filter(|c| c.generation == generation) else { return };
        let (stopping, awaits_copies) = (crew.stopping.is_some(), seen.section.awaits_copies);
        let Some(watch) = crew.alive.get_mut(&local_rank) else { return };
        let Observation { step, restored, numbered, reading, .. } = seen;
        self.book.look(now.micros(), local_rank, Reading { step, restored, numbered, ..reading });
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
            self.ended(generation, local_rank, extent, HowEnded::ShuttingDown);
        }
        if let Some((evidence, silence)) = verdict
            && !stopping
        {
            let silence_ms = u64::try_from(silence.as_millis()).unwrap_or(u64::MAX);
            let said = sign.filter(|_| evidence == HangEvidence::MachineSign);
            let words = Words::from(said.unwrap_or_default());
            let cause = Cause::Hung { evidence, silence_ms };
            if shutting_down {
                self.book.ended(now.micros(), local_rank, End::Well);
                return self.crashed_at_exit(generation, local_rank, pid, cause, words, extent);
            }
            self.book.ended(now.micros(), local_rank, End::Failed);
            self.failed(generation, local_rank, pid, cause, words, extent);
            return;
        }
        let Some(crew) = self.crew.as_mut().filter(|c| c.generation == generation) else { return };
        if let Some(news) = news {
            self.out.push_back(Command::Say { what: told(news) });
        }
        let all_stepped = crew.alive.values().all(Watch::has_new_step);
        if all_stepped && !crew.first_step_sent && !crew.alive.is_empty() {
            crew.first_step_sent = true;
            crew.from = crew.from();
            if let Some(step) = crew.reached() {
                let from = crew.from;
                self.send(Report::FirstStep { generation, step, from });
            }
            self.warm();
        } else if crew.first_step_sent
            && let (Some(step), Some(from)) = (crew.reached(), crew.from())
            && crew.from != Some(from)
        {
            crew.from = Some(from);
            self.send(Report::FirstStep { generation, step, from: Some(from) });
        }
        if awaits_copies {
            self.awaits_copies(generation);
        }
    }

    fn workers_gone(&mut self, generation: Generation, store_port: u16) {
        let Some(crew) = self.crew.take_if(|c| c.generation == generation) else { return };
        self.config.store_port = store_port;
        if let Some(step) = crew.reached() {
            self.last_reached = Some(step);
        }
        self.report_stopped();
        if self.over.is_some() {
            self.exit();
        } else if let Some((g, place, restarts, max_restarts)) = self.queued.take() {
            self.start(g, place, restarts, max_restarts);
        }
    }
}

/// Formats the message for people when rank 0 makes no step.
fn told(news: Silence) -> String {
    let waits = |time: Duration, where_: &str| {
        format!(
            "rank 0 has shown no progress for {} s, but nothing shows that it hangs: {where_}; everstep stacks shows where it is",
            time.as_secs()
        )
    };
    match news {
        Silence::Lasts(time) => waits(time, "it may be evaluating, saving, or waiting for another rank or the network"),
        Silence::WithoutData(time) => waits(time, "it waits for its data loader"),
        Silence::Over(time) => format!("rank 0 is stepping again after {} s", time.as_secs()),
    }
}
