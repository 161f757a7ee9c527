//! Judges whether a worker makes progress, from its own earlier steps. Silence is a hang only with
//! evidence.

use super::observation::{Observation, Script, TrainerEnd};
use super::trainer::{HiddenEnd, NOT_FLUSHED, Trainers};
use crate::median::median;
use crate::message::{Extent, HangEvidence, Outcome};
use crate::spec::Ladder;
use crate::time::Time;
use std::collections::VecDeque;
use std::time::Duration;

/// Number of step durations kept for the median.
const WINDOW: usize = 31;
/// A worker that uses at least this share of a CPU while silent is computing, not waiting.
const BUSY_PERCENT: u128 = 50;
/// Also computing is a worker that competes for the CPUs: its main thread was runnable in this
/// share of the samples, and it has used as much CPU time as makes a worker on an idle machine
/// busy.
const RUNNABLE_PERCENT: u64 = 90;
/// Fewer samples are not evidence.
const LOOKS: u32 = 10;
/// An unannounced evaluation may take as long as thirty steps; this many are far beyond one.
const EVALUATION: u32 = 60;
/// A worker that uses less than this share of a CPU while silent is waiting.
const IDLE_PERCENT: u128 = 2;

/// What has been observed of one worker over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    last: Option<Observation>,
    progress_at: Time,
    cpu_at_progress: u64,
    /// Samples since the last progress.
    looks: u32,
    /// Those in which the main thread was runnable.
    runnable: u32,
    tick_at: Time,
    stack_at: Time,
    free_at: Time,
    stopped_since: Option<Time>,
    step_at: Option<Time>,
    durations: VecDeque<u64>,
    /// Longest silence that ended well.
    longest: Duration,
    reported: bool,
    /// The machine has reported a failure since the last progress, or shortly before.
    machine_failed: bool,
    /// New steps at the time when people were notified of the present silence.
    silence_reported: Option<u64>,
    trainers: Trainers,
}

/// News for people about a worker that makes no step and is not known to hang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silence {
    /// The silence has lasted this long and is not over.
    Lasts(Duration),
    /// The silence has lasted this long, while the worker waits for its data loader.
    WithoutData(Duration),
    /// Steps have resumed; the silence lasted this long.
    Over(Duration),
}

impl Watch {
    /// Returns the steps that the worker has completed.
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        self.last.and_then(|o| o.step)
    }

    /// Returns how far the worker's training has come.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.last.map_or_else(Extent::default, |last| self.trainers.extent(&last))
    }

    /// Returns the step that the worker continued from, if known and a step was completed since.
    #[must_use]
    pub fn from(&self) -> Option<u64> {
        self.last.filter(|o| o.numbered && o.new_steps() > 0).map(|o| o.restored)
    }

    /// Returns the median step duration in milliseconds, once a step was timed.
    #[must_use]
    pub fn median_step_ms(&self) -> Option<u64> {
        median(self.durations.iter().copied())
    }

    /// Returns when the worker last made progress.
    #[must_use]
    pub fn progress_at(&self) -> Time {
        self.progress_at
    }

    /// Records whether the machine has reported a failure since the last progress, or shortly
    /// before.
    pub fn machine_has_failed(&mut self, failed: bool) {
        self.machine_failed = failed;
    }

    /// Returns whether TERM only sets a flag in the worker.
    #[must_use]
    pub fn flags_stop(&self) -> bool {
        self.last.is_some_and(|o| o.flags_stop)
    }

    /// Returns whether the script is over and the interpreter is shutting down.
    #[must_use]
    pub fn is_shutting_down(&self) -> bool {
        self.last.is_some_and(|o| o.script.is_over())
    }

    /// Returns whether a worker with this outcome had finished its script before. An exit code is
    /// the script's own (`sys.exit(3)`), unless the interpreter chose it or `os._exit` set it
    /// during shutdown.
    #[must_use]
    pub fn was_over(&self, outcome: Outcome) -> bool {
        let forced = self.last.is_some_and(|o| o.script == Script::LeftAtOnce);
        let crashed = matches!(outcome, Outcome::Signal(_) | Outcome::Code(NOT_FLUSHED));
        (self.is_shutting_down() && (forced || crashed)) || self.trainers.was_over(self.last.as_ref(), outcome)
    }

    /// Returns how a worker's script ended, given how its process ended. A crash may kill the
    /// interpreter of a failed script during shutdown, which is not evidence about the failure.
    #[must_use]
    pub fn of_script(&self, outcome: Outcome) -> Outcome {
        match (outcome, self.last.map(|o| o.script)) {
            (Outcome::Signal(_), Some(Script::Failed(code))) => Outcome::Code(code),
            _ => outcome,
        }
    }

    /// Returns how training ended if the launched process exits with 0 now.
    #[must_use]
    pub fn hidden_end(&self) -> HiddenEnd {
        self.trainers.hidden_end(self.last.as_ref())
    }

    /// Returns whether the worker has completed a step that it did not restore.
    #[must_use]
    pub fn has_new_step(&self) -> bool {
        self.last.is_some_and(|o| o.new_steps() > 0)
    }

    /// Updates only the step counts, for a worker that is being ended.
    pub fn step_seen(&mut self, seen: Observation) {
        self.trainers.note(self.last.as_ref(), &seen);
        if let Some(last) = &mut self.last {
            (last.step, last.restored, last.numbered) = (seen.step, seen.restored, seen.numbered);
            (last.total, last.trainer) = (seen.total, seen.trainer);
        }
    }

    /// Records one sample. Returns the evidence and the silence, once, if the worker hangs.
    pub fn observe(&mut self, now: Time, seen: Observation, ladder: &Ladder) -> Option<(HangEvidence, Duration)> {
        self.trainers.note(self.last.as_ref(), &seen);
        let Some(last) = self.last else {
            self.last = Some(seen);
            (self.progress_at, self.tick_at, self.stack_at) = (now, now, now);
            self.cpu_at_progress = seen.process.cpu_ms;
            self.stopped_since = seen.process.stopped.then_some(now);
            return None;
        };
        if seen.step != last.step && last.step.is_some() {
            // Not the difference of the numbers: a step's number may become known after the first
            // ones.
            let steps = seen.new_steps().saturating_sub(last.new_steps()).max(1);
            if let Some(at) = self.step_at {
                let each = u64::try_from(now.since(at).as_millis()).unwrap_or(u64::MAX) / steps;
                self.durations.push_back(each);
                if self.durations.len() > WINDOW {
                    self.durations.pop_front();
                }
            }
            self.step_at = Some(now);
        }
        let trainer = |o: &Observation| o.trainer.map(|t| t.pid);
        if trainer(&seen) != trainer(&last) {
            // Another process is looked at, and its CPU time is its own.
            (self.progress_at, self.cpu_at_progress) = (now, seen.process.cpu_ms);
            (self.looks, self.runnable) = (0, 0);
        } else if seen.beats != last.beats || seen.step != last.step {
            self.longest = self.longest.max(now.since(self.progress_at));
            self.progress_at = now;
            self.cpu_at_progress = seen.process.cpu_ms;
            (self.looks, self.runnable) = (0, 0);
        } else {
            self.looks = self.looks.saturating_add(1);
            self.runnable = self.runnable.saturating_add(u32::from(seen.process.runnable));
        }
        if seen.interpreter.ticks != last.interpreter.ticks {
            self.tick_at = now;
        }
        if seen.interpreter.stack_changes != last.interpreter.stack_changes {
            self.stack_at = now;
        }
        if seen.interpreter.free_ticks != last.interpreter.free_ticks {
            self.free_at = now;
        }
        self.stopped_since = if seen.process.stopped { self.stopped_since.or(Some(now)) } else { None };
        self.last = Some(seen);
        if self.reported {
            return None;
        }
        let verdict = self.judge(now, &seen, ladder);
        self.reported = verdict.is_some();
        verdict
    }

    /// Returns news of a silence that is not known to be a hang and is longer than any before: once
    /// while it lasts, and once when steps resume.
    pub fn silence(&mut self, now: Time, ladder: &Ladder) -> Option<Silence> {
        let seen = self.last?;
        let lasted = now.since(self.progress_at);
        if let Some(before) = self.silence_reported {
            if lasted < self.longest {
                self.silence_reported = None;
                return (seen.new_steps() > before).then_some(Silence::Over(self.longest));
            }
            return None;
        }
        let median = Duration::from_millis(self.median_step_ms()?);
        let long = (ladder.step_silence * 15).max(median * EVALUATION).max(self.longest * 2);
        if lasted < long || seen.section.inside || seen.script.is_over() || seen.section.awaits_copies || self.reported
        {
            return None;
        }
        self.silence_reported = Some(seen.new_steps());
        Some(if seen.section.waits_for_data { Silence::WithoutData(lasted) } else { Silence::Lasts(lasted) })
    }

    fn judge(&self, now: Time, seen: &Observation, ladder: &Ladder) -> Option<(HangEvidence, Duration)> {
        let silence = now.since(self.progress_at);
        let median = Duration::from_millis(self.median_step_ms().unwrap_or(0));
        let threshold = ladder.step_silence.max(median * 3);
        if self.stopped_since.is_some_and(|at| now.since(at.max(self.progress_at)) >= threshold) {
            return Some((HangEvidence::Stopped, silence));
        }
        let end = seen.trainer.and_then(|t| t.end);
        if matches!(end, Some(TrainerEnd::Over | TrainerEnd::Left)) {
            // The launched process continues with something else, of which nothing is known.
            return None;
        }
        if seen.section.inside {
            let limit = Duration::from_millis(seen.section.timeout_ms);
            return (seen.section.timeout_ms > 0 && silence >= limit)
                .then_some((HangEvidence::SectionTimeout, silence));
        }
        let allowed = if self.durations.is_empty() { ladder.step_silence * 15 } else { threshold };
        if self.machine_failed && silence >= allowed {
            return Some((HangEvidence::MachineSign, silence));
        }
        // Before the first timed step there is nothing to compare with: setup, compilation,
        // warm-up.
        if self.durations.is_empty() || silence < threshold {
            return None;
        }
        let cpu = u128::from(seen.process.cpu_ms.saturating_sub(self.cpu_at_progress)) * 100;
        let share = u64::from(self.runnable) * 100 / u64::from(self.looks.max(1));
        let wants_cpu = self.looks >= LOOKS && share >= RUNNABLE_PERCENT;
        let computes_for = |at_least: Duration| {
            cpu >= BUSY_PERCENT * silence.as_millis() || (wants_cpu && cpu >= BUSY_PERCENT * at_least.as_millis())
        };
        let evaluation = (ladder.step_silence * 15).max(median * EVALUATION);
        // A script that is observed from outside does not announce evaluations and saves, and both
        // can take long in one call: only a silence much longer than any before counts against it.
        let (stuck, idle_for) = if seen.from_outside {
            (evaluation.max(self.longest * 2), (ladder.step_silence * 150).max(self.longest * 3))
        } else {
            (threshold, evaluation)
        };
        if computes_for(stuck) && seen.interpreter.ticks > 0 && now.since(self.tick_at) >= stuck {
            return Some((HangEvidence::InterpreterHeld, silence));
        }
        // One long call of a library looks the same, except that it does not need the interpreter.
        let computes = self.free_at > self.progress_at;
        let stuck = if computes { stuck.max(evaluation) } else { stuck };
        if computes_for(stuck) && seen.interpreter.stack_changes > 0 && now.since(self.stack_at) >= stuck {
            return Some((HangEvidence::Spinning, silence));
        }
        // Storage may be slow; only a much longer wait means that the loader is stuck.
        let idle_for = if seen.section.waits_for_data { idle_for.max(ladder.step_silence * 150) } else { idle_for };
        let idle = cpu <= IDLE_PERCENT * silence.as_millis();
        (idle && silence >= idle_for).then_some((HangEvidence::NoCpu, silence))
    }
}

#[cfg(test)]
mod tests {
    use super::super::observation::{Interpreter, Process, Section, Trainer};
    use super::*;

    fn ladder() -> Ladder {
        Ladder::from_detect_timeout(Duration::from_secs(2))
    }

    /// Returns an observation with more CPU time used and more ticks, free ticks and changes of the
    /// stack.
    fn later(seen: Observation, cpu_ms: u64, [ticks, free_ticks, stack_changes]: [u64; 3]) -> Observation {
        let Observation { process, interpreter, .. } = seen;
        Observation {
            process: Process { cpu_ms: process.cpu_ms + cpu_ms, ..process },
            interpreter: Interpreter {
                ticks: interpreter.ticks + ticks,
                free_ticks: interpreter.free_ticks + free_ticks,
                stack_changes: interpreter.stack_changes + stack_changes,
            },
            ..seen
        }
    }

    /// Runs a worker for 5 s with 100 ms steps, then `after` every 100 ms for `seconds`.
    fn run(seconds: u64, mut after: impl FnMut(u64, Observation) -> Observation) -> Option<(HangEvidence, Duration)> {
        let mut watch = Watch::default();
        let mut seen = Observation { step: Some(0), ..Observation::default() };
        for i in 0..50 {
            seen.step = Some(i);
            seen.beats = i;
            seen = later(seen, 90, [1, 0, 1]);
            assert_eq!(watch.observe(Time(i * 100), seen, &ladder()), None);
        }
        (0..seconds * 10).find_map(|i| {
            seen = after(i, seen);
            watch.observe(Time(5000 + i * 100), seen, &ladder())
        })
    }

    #[test]
    fn a_crash_while_a_failed_script_shuts_down_is_the_failure() {
        let mut watch = Watch::default();
        let crash = Outcome::Signal(6);
        assert_eq!(watch.of_script(crash), crash);
        watch.observe(Time(1), Observation { script: Script::Failed(3), ..Observation::default() }, &ladder());
        assert_eq!(watch.of_script(crash), Outcome::Code(3));
        assert_eq!(watch.of_script(Outcome::Code(0)), Outcome::Code(0));
        assert!(!watch.was_over(crash));
    }

    #[test]
    fn a_stopped_worker_is_hung_after_the_detect_timeout() {
        let (evidence, silence) =
            run(10, |_, s| Observation { process: Process { stopped: true, ..s.process }, ..s }).unwrap();
        assert_eq!(evidence, HangEvidence::Stopped);
        assert!(silence >= Duration::from_secs(2) && silence < Duration::from_millis(2400), "{silence:?}");
    }

    #[test]
    fn a_held_interpreter_and_a_spinning_line_are_hung() {
        let held = run(10, |_, s| later(s, 100, [0; 3])).unwrap();
        assert_eq!(held.0, HangEvidence::InterpreterHeld);
        let spin = run(10, |_, s| later(s, 100, [1, 0, 0])).unwrap();
        assert_eq!(spin.0, HangEvidence::Spinning);
    }

    #[test]
    fn a_line_that_spins_among_others_that_compute_is_hung() {
        let spin = |runnable: bool| {
            move |_, s: Observation| {
                let s = later(s, 25, [1, 0, 0]);
                Observation { process: Process { runnable, ..s.process }, ..s }
            }
        };
        let (evidence, silence) = run(10, spin(true)).unwrap();
        assert_eq!(evidence, HangEvidence::Spinning);
        // A quarter of a CPU: the same amount of computing takes longer.
        assert!(silence >= Duration::from_secs(4) && silence < Duration::from_secs(5), "{silence:?}");
        assert_eq!(run(10, spin(false)), None, "it waits for something else than a processor");
    }

    #[test]
    fn an_evaluation_that_nobody_announced_is_left_alone() {
        let busy = |_, s: Observation| later(s, 95, [1, 0, 1]);
        assert_eq!(run(600, busy), None);
    }

    #[test]
    fn one_long_call_of_a_library_is_left_alone() {
        let call = |_, s: Observation| later(s, 100, [1, 1, 0]);
        assert_eq!(run(25, call), None);
        assert_eq!(run(60, call).map(|(e, _)| e), Some(HangEvidence::Spinning));
    }

    #[test]
    fn thirty_steps_time_is_no_hang_however_long_a_step_takes() {
        for (seconds, waits) in [(1, true), (3, true), (10, true), (3, false)] {
            let mut watch = Watch::default();
            let mut seen = later(Observation::default(), 0, [1, 0, 1]);
            let mut found = None;
            // Twenty steps, then 36 steps' time without one: asleep, or in one call of a library.
            for i in 0..(20 + 36) * seconds * 10 {
                let steps = i / (seconds * 10);
                seen.step = Some(steps.min(20));
                if steps < 20 || !waits {
                    seen = later(seen, 100, [1, 1, 0]);
                }
                found = found.or(watch.observe(Time(i * 100), seen, &ladder()));
            }
            assert_eq!(found, None, "{seconds} s, {waits}");
        }
    }

    #[test]
    fn a_section_and_a_short_wait_are_left_alone() {
        assert_eq!(run(600, |_, s| Observation { section: Section { inside: true, ..s.section }, ..s }), None);
        assert_eq!(run(25, |_, s| later(s, 0, [1, 0, 0])), None);
    }

    #[test]
    fn a_slow_store_of_data_is_no_hang_but_a_stuck_loader_is() {
        let waits = |_, s: Observation| Observation { section: Section { waits_for_data: true, ..s.section }, ..s };
        assert_eq!(run(120, waits), None);
        assert_eq!(run(400, waits).map(|(e, _)| e), Some(HangEvidence::NoCpu));
        assert_eq!(run(120, |_, s| s).map(|(e, _)| e), Some(HangEvidence::NoCpu));
    }

    #[test]
    fn a_long_silence_is_told_once_and_so_is_its_end() {
        let mut watch = Watch::default();
        let mut seen = later(Observation::default(), 0, [1, 0, 1]);
        let mut told = Vec::new();
        for i in 0..2000 {
            // Steps of 100 ms, none for a minute, then steps again, with a little CPU use.
            let step = if i < 50 { i } else { 50 + u64::saturating_sub(i, 650) };
            seen = Observation { step: Some(step), ..later(seen, 10, [1, 0, 1]) };
            assert_eq!(watch.observe(Time(i * 100), seen, &ladder()), None);
            told.extend(watch.silence(Time(i * 100), &ladder()));
        }
        assert!(
            matches!(told[..], [Silence::Lasts(a), Silence::Over(b)] if a.as_secs() == 30 && b.as_secs() == 60),
            "{told:?}"
        );
    }

    #[test]
    fn a_silence_in_a_section_or_no_longer_than_before_is_not_told() {
        let mut watch = Watch::default();
        let (mut step, mut told) = (0, Vec::new());
        for i in 0..2000 {
            // 20 s without a step, then 35 s, then a minute that is announced.
            let silent = (50..250).contains(&i) || (300..650).contains(&i) || i > 700;
            step += u64::from(!silent);
            let section = Section { inside: i > 700, ..Section::default() };
            let seen = Observation { step: Some(step), section, ..later(Observation::default(), i * 10, [0; 3]) };
            watch.observe(Time(i * 100), seen, &ladder());
            told.extend(watch.silence(Time(i * 100), &ladder()));
        }
        assert_eq!(told, []);
    }

    #[test]
    fn steps_that_nobody_saw_begin_are_new_all_the_same() {
        let mut watch = Watch::default();
        let seen = Observation { step: Some(7), restored: 4, ..Observation::default() };
        watch.observe(Time(0), seen, &ladder());
        assert!(watch.has_new_step());
        watch.observe(Time(100), Observation { step: Some(4), ..seen }, &ladder());
        assert!(!watch.has_new_step());
    }

    #[test]
    fn the_first_step_may_take_as_long_as_it_likes() {
        let mut watch = Watch::default();
        let seen = Observation { step: Some(0), ..later(Observation::default(), 0, [1, 0, 1]) };
        assert!((0..6000).all(|i| watch.observe(Time(i * 100), later(seen, i * 100, [0; 3]), &ladder()).is_none()));
    }

    #[test]
    fn another_process_that_trains_has_used_little_cpu_time() {
        let trainer = |end| Some(Trainer { pid: 8, end });
        let busy = |i, s: Observation| {
            // The first observation of another process: its CPU time begins anew.
            let s = if i == 0 { Observation { process: Process::default(), ..s } } else { s };
            Observation { trainer: trainer(None), ..later(s, if i == 0 { 40 } else { 10 }, [0; 3]) }
        };
        assert_eq!(run(40, busy), None);
        // The launcher continues with something that everstep does not see.
        let idle = |end| move |_, s| Observation { trainer: trainer(end), process: Process::default(), ..s };
        assert_eq!(run(100, idle(Some(TrainerEnd::Over))), None);
        assert_eq!(run(100, idle(Some(TrainerEnd::Left))), None);
        assert!(run(100, idle(Some(TrainerEnd::Vanished))).is_some());
    }
}
