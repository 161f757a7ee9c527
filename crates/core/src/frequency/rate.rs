//! Adapts to the cost of checkpoints, in both directions: a neighbour that uses the disk makes them
//! rarer, and when it is gone they become as frequent as before (CheckFreq §4.3).

use super::{Bound, PROFILED, interval, steps, young_daly};
use crate::median::median_of_floats;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Weight of a new measurement.
const NEW: f64 = 0.3;
/// The interval changes only if the new one differs by more than this fraction.
const DEAD_BAND: f64 = 0.05;
/// After this many intervals without an undisturbed step, one checkpoint is skipped, to measure the
/// duration of a step without one.
const BLIND: u32 = 4;
/// A single interval differs from the usual one by at most this factor.
const STRETCH: u64 = 4;
/// Number of the latest undisturbed steps of an interval that determine the duration of a step.
const RECENT: usize = 200;

/// The measurements of a [`Rate`], in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// Ti: an undisturbed step.
    pub iteration: Option<f64>,
    /// o: time that a checkpoint costs the training loop.
    pub cost: Option<f64>,
    /// Time from a checkpoint's step until it is written.
    pub occupied: Option<f64>,
    /// Mean time between failures.
    pub mtbf: Option<f64>,
}

/// Measures the cost of checkpoints and decides how often to make them.
///
/// ```text
///  checkpoint            checkpoint          checkpoint
///  ▼                     ▼                   ▼
///  ■■■■──────────────────■■■■────────────────■■■■   ■ overlaps a checkpoint   ─ undisturbed
/// ```
///
/// A checkpoint costs what the steps that overlap it take longer than the undisturbed steps of the
/// same interval.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Rate {
    budget: f64,
    /// Fraction of the time for which checkpoints may use storage.
    share: f64,
    mtbf: Option<f64>,
    /// Ti.
    iteration: Option<f64>,
    /// o, including everything that slows the loop down while a checkpoint is written.
    cost: Option<f64>,
    /// Time from a checkpoint's step until it is written.
    occupied: Option<f64>,
    every: u64,
    bound: Bound,
    /// Both come from this life's first checkpoint, which had to allocate memory: the next
    /// measurement replaces them.
    #[serde(skip)]
    provisional: bool,
    /// Number of checkpoints measured in this life.
    #[serde(skip)]
    seen: u32,
    #[serde(skip)]
    now: Interval,
    #[serde(skip)]
    blind: u32,
    /// Seconds of earlier checkpoints that were not paid for by their own intervals, whose length
    /// is limited.
    #[serde(skip)]
    owed: f64,
}

/// The current interval.
#[derive(Clone, Debug, Default)]
struct Interval {
    steps: u64,
    /// Number of steps that overlap a checkpoint, and their total seconds.
    beside: (u64, f64),
    quiet: VecDeque<f64>,
    /// Of the checkpoint that began the interval.
    occupied: Option<f64>,
    /// Something else disturbed the interval, so it is not used for costs.
    disturbed: bool,
}

impl Interval {
    /// Returns the cost of the interval's checkpoint.
    fn extra(&self, iteration: f64) -> f64 {
        let (steps, seconds) = self.beside;
        (seconds - steps as f64 * iteration).max(0.0)
    }
}

impl Rate {
    /// Creates a rate without measurements: no checkpoint is due before the profile exists.
    /// `budget` is the fraction of the loop's time that checkpoints may cost, `share` the fraction
    /// of the time for which they may use storage.
    #[must_use]
    pub fn new(budget: f64, share: f64) -> Self {
        Rate {
            budget,
            share,
            mtbf: None,
            iteration: None,
            cost: None,
            occupied: None,
            every: 1,
            bound: Bound::None,
            provisional: false,
            seen: 0,
            now: Interval::default(),
            blind: 0,
            owed: 0.0,
        }
    }

    /// Applies another budget to the same measurements.
    #[must_use]
    pub fn under(mut self, budget: f64, share: f64) -> Self {
        (self.budget, self.share) = (budget, share);
        self.decide();
        self
    }

    /// Returns the number of iterations in a profile, for an epoch of `epoch` iterations.
    #[must_use]
    pub fn profiled(epoch: Option<u64>) -> u64 {
        epoch.map_or(PROFILED, |n| n / 100).clamp(1, PROFILED)
    }

    /// Sets the profile from undisturbed steps.
    pub fn profile(&mut self, steps: &[f64]) {
        self.iteration = median_of_floats(steps.to_vec());
    }

    /// Records a change in the failure rate of this job's machines.
    pub fn failures(&mut self, mtbf: Option<f64>) {
        self.mtbf = mtbf.filter(|t| *t > 0.0);
    }

    /// Returns the interval in steps, and what bounds it; `None` before there is a profile.
    #[must_use]
    pub fn every(&self) -> Option<(u64, Bound)> {
        self.iteration.map(|_| (self.every, self.bound))
    }

    /// Returns the current measurements.
    #[must_use]
    pub fn measured(&self) -> Measured {
        Measured { iteration: self.iteration, cost: self.cost, occupied: self.occupied, mtbf: self.mtbf }
    }

    /// Records a step of this duration. `quiet`: no part of a checkpoint was made during it.
    pub fn step(&mut self, seconds: f64, quiet: bool) {
        self.now.steps += 1;
        if quiet {
            if self.now.quiet.len() == RECENT {
                self.now.quiet.pop_front();
            }
            self.now.quiet.push_back(seconds);
        } else {
            self.now.beside = (self.now.beside.0 + 1, self.now.beside.1 + seconds);
        }
    }

    /// Records a step whose duration is meaningless, because something else was done during it.
    pub fn passed(&mut self) {
        self.now.steps += 1;
    }

    /// Records that the checkpoint that began this interval is written, `occupied` seconds after
    /// its step.
    pub fn written(&mut self, occupied: f64) {
        self.now.occupied = Some(occupied);
        if let (None, Some(iteration)) = (self.cost, self.iteration) {
            // The first checkpoint: the interval after it has to be chosen now.
            self.cost = Some(self.now.extra(iteration));
            self.occupied = Some(occupied);
            self.provisional = true;
            self.decide();
        }
    }

    /// Records that something other than such a checkpoint held up the loop.
    pub fn disturbed(&mut self) {
        self.now.disturbed = true;
    }

    /// Returns the steps until the next checkpoint is due; 0: now. If all recent steps overlapped a
    /// checkpoint, one checkpoint is skipped. `None` before there is a profile.
    #[must_use]
    pub fn left(&self) -> Option<u64> {
        let iteration = self.iteration?;
        let every = if self.blind >= BLIND { self.every.saturating_mul(2) + 1 } else { self.steps_now(iteration) };
        Some(every.saturating_sub(self.now.steps))
    }

    /// Returns the length of the current interval. Once the interval's checkpoint is written, its
    /// cost is known and the interval pays for it, so that the budget holds whatever the next one
    /// costs.
    fn steps_now(&self, iteration: f64) -> u64 {
        let Some(occupied) = self.now.occupied.filter(|_| !self.now.disturbed) else { return self.every };
        let (own, _) = self.choose(iteration, self.now.extra(iteration) + self.owed, occupied);
        own.clamp(self.every.div_ceil(STRETCH), self.longest())
    }

    /// Returns the longest interval allowed at present.
    fn longest(&self) -> u64 {
        self.every.saturating_mul(STRETCH)
    }

    /// Records the start of a checkpoint.
    pub fn begins(&mut self) {
        let now = std::mem::take(&mut self.now);
        self.blind = if now.quiet.is_empty() { self.blind + 1 } else { 0 };
        let (extra, occupied) = (|iteration| now.extra(iteration), now.occupied);
        if let Some(seen) = median_of_floats(now.quiet.iter().copied()).filter(|_| !now.disturbed) {
            // Undisturbed steps need no averaging: a loop that became slower or faster is trusted
            // at once.
            self.iteration = Some(seen);
        }
        let (Some(iteration), Some(occupied), false) = (self.iteration, occupied, now.disturbed) else { return };
        self.seen += 1;
        if self.seen == 1 {
            // Already taken into account by `written`, or better known from an earlier life.
            return;
        }
        let paid = self.budget * iteration * self.longest() as f64;
        self.owed = (self.owed + extra(iteration) - paid).max(0.0);
        let before = if std::mem::take(&mut self.provisional) { (None, None) } else { (self.cost, self.occupied) };
        self.cost = Some(blend(before.0, extra(iteration)));
        self.occupied = Some(blend(before.1, occupied));
        self.decide();
    }

    fn decide(&mut self) {
        let (Some(iteration), Some(cost)) = (self.iteration, self.cost) else { return };
        let (every, bound) = self.choose(iteration, cost, self.occupied.unwrap_or(0.0));
        let moved = every.abs_diff(self.every) as f64 / self.every as f64;
        if moved > DEAD_BAND {
            (self.every, self.bound) = (every, bound);
        }
    }

    fn choose(&self, iteration: f64, cost: f64, occupied: f64) -> (u64, Bound) {
        let (every, bound) = interval(iteration, self.budget, cost, occupied / self.share.clamp(0.01, 1.0));
        let rare = self.mtbf.map_or(0, |mtbf| steps(young_daly(cost, mtbf) / iteration.max(1e-12)));
        if rare > every { (rare, Bound::Failures) } else { (every, bound) }
    }
}

fn blend(was: Option<f64>, now: f64) -> f64 {
    was.map_or(now, |was| was + NEW * (now - was))
}

#[cfg(test)]
mod tests {
    use super::super::EVERY_MAX;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rare_failures_make_checkpoints_rare() {
        let mut rate = Rate::new(0.05, 1.0);
        rate.profile(&[1.0; 9]);
        rate.failures(Some(10_000.0));
        run(&mut rate, 40, |_| (1.0, 2.0, 0.1));
        assert_eq!(rate.every().unwrap().1, Bound::Failures);
        assert!((190..=210).contains(&rate.every().unwrap().0), "{:?}", rate.every());
    }

    /// Trains through this many checkpoints. `world(checkpoint)` is (undisturbed step, cost of a
    /// checkpoint, its time on storage). Returns the overhead of the last interval.
    fn run(rate: &mut Rate, checkpoints: u64, world: impl Fn(u64) -> (f64, f64, f64)) -> f64 {
        let mut overhead = 0.0;
        for n in 0..checkpoints {
            rate.begins();
            let (step, cost, occupied) = world(n);
            let (mut spent, mut ideal, mut first, mut writing) = (0.0, 0.0, true, true);
            while first || writing || rate.left() != Some(0) {
                let extra = if first { cost } else { 0.0 };
                rate.step(step + extra, !writing);
                (spent, ideal, first) = (spent + step + extra, ideal + step, false);
                if writing && spent >= occupied {
                    rate.written(occupied);
                    writing = false;
                }
            }
            overhead = (spent - ideal) / ideal;
        }
        overhead
    }

    #[test]
    fn a_neighbour_on_the_disk_is_answered_and_forgotten() {
        // CheckFreq's Table 5: k = 14 at 5 %; a neighbour makes a checkpoint seven times as
        // expensive.
        let mut rate = Rate::new(0.05, 1.0);
        rate.profile(&[1.0; 20]);
        assert!((run(&mut rate, 10, |_| (1.0, 0.7, 0.5)) - 0.05).abs() < 0.005);
        assert_eq!(rate.every().unwrap().0, 14);
        let after = run(&mut rate, 20, |_| (1.0, 4.9, 3.0));
        assert!((after - 0.05).abs() < 0.005, "{after}");
        assert!((93..=100).contains(&rate.every().unwrap().0));
        let again = run(&mut rate, 20, |_| (1.0, 0.7, 0.5));
        assert!((again - 0.05).abs() < 0.005 && rate.every().unwrap().0 <= 15, "{again} {:?}", rate.every());
    }

    #[test]
    fn a_loop_that_changes_its_speed_keeps_its_budget() {
        let mut rate = Rate::new(0.05, 1.0);
        rate.profile(&[1.0; 20]);
        run(&mut rate, 10, |_| (1.0, 0.7, 0.5));
        let faster = run(&mut rate, 20, |_| (0.25, 0.7, 0.5));
        assert!((faster - 0.05).abs() < 0.005, "{faster}");
        let slower = run(&mut rate, 20, |_| (1.0, 0.7, 0.5));
        assert!((slower - 0.05).abs() < 0.005, "{slower}");
    }

    #[test]
    fn the_first_checkpoint_already_bounds_the_second() {
        let mut rate = Rate::new(0.05, 1.0);
        rate.profile(&[1.0; 20]);
        rate.begins();
        rate.step(3.0, false);
        rate.written(2.0);
        assert_eq!((rate.every(), rate.left()), (Some((40, Bound::Budget)), Some(39)));
        // The first checkpoint had to allocate memory: the second one's cost replaces it.
        rate.begins();
        rate.step(2.0, false);
        rate.step(1.0, true);
        rate.written(1.0);
        assert_eq!(rate.every(), Some((40, Bound::Budget)));
        rate.begins();
        assert_eq!(rate.every(), Some((20, Bound::Budget)));
    }

    #[test]
    fn each_interval_pays_for_its_own_checkpoint() {
        let mut rate = Rate::new(0.05, 1.0);
        rate.profile(&[1.0; 20]);
        // The cost triples and falls again from one checkpoint to the next: no average predicts it.
        let cost = |n: u64| [0.5, 1.5, 1.0][n as usize % 3];
        run(&mut rate, 20, |n| (1.0, cost(n), 0.5));
        for n in 20..40 {
            let overhead = run(&mut rate, 1, |_| (1.0, cost(n), 0.5));
            assert!((overhead - 0.05).abs() < 0.003, "{overhead} at {n}");
        }
    }

    #[test]
    fn the_intervals_after_a_stall_pay_for_what_its_own_cannot() {
        let mut rate = Rate::new(0.05, 1.0);
        rate.profile(&[1.0; 20]);
        run(&mut rate, 20, |_| (1.0, 1.0, 0.5));
        // Twelve times the usual cost: the checkpoint's own interval is stretched by four and no
        // more.
        let (mut spent, mut ideal) = (0.0, 0.0);
        for n in 0..10 {
            let cost = if n == 0 { 12.0 } else { 1.0 };
            let overhead = run(&mut rate, 1, |_| (1.0, cost, 0.5));
            (spent, ideal) = (spent + cost, ideal + cost / overhead);
        }
        assert!((spent / ideal - 0.05).abs() < 0.002, "{}", spent / ideal);
        let after = run(&mut rate, 10, |_| (1.0, 1.0, 0.5));
        assert!((after - 0.05).abs() < 0.003 && rate.every().unwrap().0 <= 22, "{after} {:?}", rate.every());
    }

    #[test]
    fn storage_is_left_to_others_and_a_disturbed_interval_says_nothing() {
        let mut rate = Rate::new(0.05, 0.1);
        rate.profile(&[1.0; 20]);
        run(&mut rate, 10, |_| (1.0, 0.0, 3.0));
        assert_eq!(rate.every(), Some((30, Bound::Write)));
        let before = rate.measured();
        rate.begins();
        rate.step(500.0, false);
        rate.step(9.0, true);
        rate.written(3.0);
        rate.disturbed();
        rate.begins();
        assert_eq!((rate.measured(), rate.every()), (before, Some((30, Bound::Write))));
    }

    #[test]
    fn without_one_undisturbed_step_a_checkpoint_is_left_out() {
        let mut rate = Rate::new(0.5, 1.0);
        rate.profile(&[1.0; 20]);
        // Every step overlaps a checkpoint, and steps have become four times as long for another
        // reason.
        for _ in 0..BLIND {
            rate.begins();
            rate.step(4.0, false);
            rate.written(1.0);
        }
        rate.begins();
        let every = rate.every().unwrap().0;
        for n in 0..=2 * every {
            assert_eq!(rate.left(), Some(2 * every + 1 - n));
            rate.step(4.0, true);
        }
        assert_eq!(rate.left(), Some(0));
        rate.begins();
        assert_eq!(rate.measured().iteration, Some(4.0));
    }

    proptest! {
        #[test]
        fn whatever_is_measured_the_rate_stays_sane(
            seen in proptest::collection::vec((0.0..100.0f64, any::<bool>(), any::<bool>(), 0.0..1e4f64), 0..200),
        ) {
            let mut rate = Rate::new(0.01, 1.0);
            rate.profile(&[0.0]);
            for (seconds, quiet, begins, occupied) in seen {
                rate.step(seconds, quiet);
                if begins {
                    rate.written(occupied);
                    rate.begins();
                }
                let every = rate.every().unwrap().0;
                prop_assert!((1..=EVERY_MAX).contains(&every));
            }
        }
    }
}
