//! Detection of ranks that hold the others up. In a collective job every step takes as long as the
//! slowest rank's own work, and the others wait. So ranks are compared by the part of a step that
//! they do not spend waiting.
//!
//! A rank is in one of three states: well; slightly slow, from 1.1 times the others' time on, which
//! only a long window separates from noise and which is shown but not announced; or slow, which is
//! announced.
//!
//! Noise must not be announced. A rank is slow only if nearly all its latest steps are longer than
//! the others', and by more than the others have recently been slower than it. What slows all ranks
//! at once, such as a start, is not evidence against any of them. An announcement may still have
//! been noise on this machine, so each one makes the watch wait longer before the next, unless that
//! rank is much slower still. A calm period shortens the wait again.

use crate::median::{median, median_of_sorted};
use crate::time::Time;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Number of a rank's latest steps that are compared, number of the others' steps that they are
/// compared with, and number of steps kept for what shows only in many of them.
const WINDOW: usize = 8;
const REFERENCE: usize = 12;
const LONG: usize = 61;
/// A rank is slow from this percentage of the others' time on.
const SLOW_PERCENT: u64 = 145;
/// An announced rank is well again at this percentage or below.
const WELL_PERCENT: u64 = 125;
/// In at least this percentage of all pairs of a slow rank's steps with the others' steps, the slow
/// rank's is the longer one.
const APART_PERCENT: usize = 88;
/// A rank is slightly slow from this percentage on (1.1, as in Unicron).
const SLIGHTLY_SLOW_PERCENT: u64 = 110;
/// Differences of fewer microseconds are noise.
const NOISE_MICROS: u64 = 5000;
/// After an announcement, the next rank must be slow for this long before it is announced. The time
/// doubles with each further announcement.
const PATIENCE: Duration = Duration::from_mins(1);
const PATIENCE_MAX: Duration = Duration::from_mins(16);
/// A rank whose percentage is this many percent of the highest one announced before is announced at
/// once: it is slower than what may have been noise.
const BEYOND_PERCENT: u64 = 150;
/// An announced rank must keep up for this long before its recovery is announced.
const RECOVERED: Duration = Duration::from_secs(20);
/// If no rank is slow for this long, the patience is halved.
const CALM: Duration = Duration::from_mins(20);

/// A rank became slow, or recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Number of the rank.
    pub rank: u32,
    /// Its own work per step, in percent of the others'.
    pub percent: u64,
    /// Whether it became slow.
    pub slow: bool,
}

/// The steps reported by one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Rank {
    /// Latest step reported by the rank.
    step: u64,
    /// Number of steps reported by the rank.
    reported: u64,
    /// Its own work in the latest steps, in microseconds.
    micros: VecDeque<u64>,
}

/// Compares the ranks of one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlowWatch {
    ranks: BTreeMap<u32, Rank>,
    /// Number of steps that all ranks had reported at the last check.
    looked: u64,
    /// Ranks announced as slow, with their percentage.
    slow: BTreeMap<u32, u64>,
    /// Since when a rank's state has differed from the announced one.
    turning: BTreeMap<u32, Time>,
    /// How long a rank must be slow before it is announced.
    patience: Duration,
    /// The highest percentage of any slow rank while the patience has not been zero.
    highest: u64,
    /// When a rank last became slow or stopped being slow.
    episode: Option<Time>,
}

fn at(sorted: &[u64], i: usize) -> u64 {
    sorted.get(i).copied().unwrap_or(0)
}

fn sorted(values: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut sorted: Vec<u64> = values.collect();
    sorted.sort_unstable();
    sorted
}

/// Returns the median of `sorted` without one occurrence of `own`.
fn median_of_others(sorted: &[u64], own: u64) -> u64 {
    let place = sorted.partition_point(|v| *v < own);
    let middle = sorted.len().saturating_sub(1) / 2;
    at(sorted, if middle < place { middle } else { middle + 1 })
}

/// A rank's steps and the others', latest last.
struct Comparison {
    own: Vec<u64>,
    /// Median of the others in the same step.
    others: Vec<u64>,
}

impl Comparison {
    fn latest(&self) -> (&[u64], &[u64]) {
        let from = |all: &[u64], n| all.len().saturating_sub(n);
        let (own, others) = (from(&self.own, WINDOW), from(&self.others, REFERENCE));
        (self.own.get(own..).unwrap_or_default(), self.others.get(others..).unwrap_or_default())
    }

    /// Returns the rank's time in percent of the others': the median over all pairs of latest
    /// steps.
    fn percent(&self) -> u64 {
        let (own, others) = self.latest();
        median(own.iter().flat_map(|x| others.iter().map(move |y| x * 100 / y.max(&1)))).unwrap_or(0)
    }

    /// Returns whether the rank's times and the others' are separate, by more than the others are
    /// slower than it in one of five steps of the long window.
    fn apart(&self, percent: u64) -> bool {
        let (own, others) = self.latest();
        let longer: usize = own.iter().map(|x| others.iter().filter(|y| x > y).count()).sum();
        let middle = |of: &[u64]| median(of.iter().copied()).unwrap_or(0);
        let reverse = sorted(self.own.iter().zip(&self.others).map(|(x, y)| y * 100 / x.max(&1)));
        longer * 100 >= own.len() * others.len() * APART_PERCENT
            && middle(own) > middle(others) + NOISE_MICROS
            && percent > at(&reverse, reverse.len() * 4 / 5)
    }
}

impl SlowWatch {
    /// Records that `rank` has completed `step`, with `micros` of its own work in it.
    pub fn saw(&mut self, rank: u32, step: u64, micros: u64) {
        let rank = self.ranks.entry(rank).or_default();
        if rank.step == step {
            return;
        }
        rank.step = step;
        rank.reported += 1;
        rank.micros.push_back(micros);
        if rank.micros.len() > LONG {
            rank.micros.pop_front();
        }
    }

    /// Returns the changes to announce since the last check.
    pub fn changes(&mut self, now: Time) -> Vec<Change> {
        let reported = self.ranks.values().map(|r| r.reported).min().unwrap_or(0);
        let steps = self.ranks.values().map(|r| r.micros.len()).min().unwrap_or(0);
        // Thousands of nodes may send news several times a second, but there is something new to
        // compare only when all ranks have reported a step.
        if self.ranks.len() < 2 || steps < WINDOW || reported == self.looked {
            return Vec::new();
        }
        self.looked = reported;
        self.calm_down(now);
        let mut changes = Vec::new();
        for (rank, comparison) in self.comparisons(steps) {
            let percent = comparison.percent();
            let announced = self.slow.contains_key(&rank);
            let looks_slow =
                if announced { percent > WELL_PERCENT } else { percent >= SLOW_PERCENT && comparison.apart(percent) };
            if looks_slow == announced {
                self.settle(rank, now);
                if announced {
                    self.slow.insert(rank, percent);
                    self.highest = self.highest.max(percent);
                }
                continue;
            }
            let since = *self.turning.entry(rank).or_insert(now);
            let beyond = self.highest > 0 && percent * 100 >= self.highest * BEYOND_PERCENT;
            let wait = match announced {
                true => RECOVERED,
                false if beyond => Duration::ZERO,
                false => self.patience,
            };
            if now.since(since) < wait {
                continue;
            }
            self.turning.remove(&rank);
            if looks_slow {
                self.slow.insert(rank, percent);
                self.highest = self.highest.max(percent);
                self.patience = (self.patience * 2).clamp(PATIENCE, PATIENCE_MAX);
            } else {
                self.slow.remove(&rank);
            }
            self.episode = Some(now);
            changes.push(Change { rank, percent, slow: looks_slow });
        }
        changes
    }

    /// Compares the latest `steps` of each rank with the others'. Ranks report at the same times,
    /// and not every step, so steps are matched by counting from the latest.
    fn comparisons(&self, steps: usize) -> Vec<(u32, Comparison)> {
        let latest = |r: &Rank| r.micros.iter().skip(r.micros.len() - steps).copied().collect();
        let mut all: Vec<(u32, Comparison)> = Vec::with_capacity(self.ranks.len());
        all.extend(self.ranks.iter().map(|(rank, of)| (*rank, Comparison { own: latest(of), others: Vec::new() })));
        for step in 0..steps {
            let sorted = sorted(all.iter().map(|(_, c)| at(&c.own, step)));
            for (_, c) in &mut all {
                c.others.push(median_of_others(&sorted, at(&c.own, step)));
            }
        }
        all
    }

    /// Drops a pending change of a rank that is back in its announced state.
    fn settle(&mut self, rank: u32, now: Time) {
        if self.turning.remove(&rank).is_some() && !self.slow.contains_key(&rank) {
            self.episode = Some(now);
        }
    }

    fn calm_down(&mut self, now: Time) {
        if self.episode.is_some_and(|at| now.since(at) >= CALM) {
            self.patience = if self.patience <= PATIENCE { Duration::ZERO } else { self.patience / 2 };
            self.episode = (!self.patience.is_zero()).then_some(now);
            if self.patience.is_zero() {
                self.highest = 0;
            }
        }
    }

    /// Returns the ranks that are always a little slower than the others, with their percentage:
    /// three of four of their steps take at least 1.1 times as long as the others' usual step.
    #[must_use]
    pub fn slightly_slow(&self) -> BTreeMap<u32, u64> {
        if self.ranks.len() < 2 || self.ranks.values().any(|r| r.micros.len() < LONG) {
            return BTreeMap::new();
        }
        let ranks: Vec<(u32, Vec<u64>)> =
            self.ranks.iter().map(|(rank, of)| (*rank, sorted(of.micros.iter().copied()))).collect();
        let usual = sorted(ranks.iter().filter_map(|(_, window)| median_of_sorted(window)));
        let mut found = BTreeMap::new();
        for (rank, window) in ranks.iter().filter(|(rank, _)| !self.slow.contains_key(rank)) {
            let own = median_of_sorted(window).unwrap_or(0);
            let others = median_of_others(&usual, own);
            let quick = at(window, window.len() / 4);
            if quick * 100 >= others * SLIGHTLY_SLOW_PERCENT && quick > others + NOISE_MICROS {
                found.insert(*rank, own * 100 / others.max(1));
            }
        }
        found
    }

    /// Returns the ranks that are slow now, with their percentage.
    #[must_use]
    pub fn slow(&self) -> &BTreeMap<u32, u64> {
        &self.slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps of one second each. Returns the changes with the step at which they were
    /// announced.
    fn run(ranks: u32, steps: u64, micros: impl Fn(u32, u64) -> u64) -> (SlowWatch, Vec<(u64, Change)>) {
        let mut watch = SlowWatch::default();
        let mut all = Vec::new();
        for step in 1..=steps {
            for rank in 0..ranks {
                watch.saw(rank, step, micros(rank, step));
            }
            all.extend(watch.changes(Time(step * 1000)).into_iter().map(|c| (step, c)));
        }
        (watch, all)
    }

    fn watch(steps: u64, micros: impl Fn(u32, u64) -> u64) -> (SlowWatch, Vec<Change>) {
        let (watch, all) = run(4, steps, micros);
        (watch, all.into_iter().map(|(_, c)| c).collect())
    }

    /// Returns a pseudorandom number below `below`.
    fn noise(rank: u32, step: u64, below: u64) -> u64 {
        let mut x = (step << 8 | u64::from(rank)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (x ^ x >> 32) % below
    }

    #[test]
    fn the_rank_that_others_wait_for_is_named_once() {
        let (watch, changes) = watch(30, |rank, _| if rank == 2 { 120_000 } else { 50_000 });
        assert_eq!(changes, [Change { rank: 2, percent: 240, slow: true }]);
        assert_eq!(watch.slow().keys().copied().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn it_is_well_again_when_it_keeps_up() {
        let (_, changes) = watch(60, |rank, step| if rank == 0 && step < 15 { 120_000 } else { 50_000 });
        assert_eq!(changes.iter().map(|c| (c.rank, c.slow)).collect::<Vec<_>>(), [(0, true), (0, false)]);
    }

    #[test]
    fn a_rank_that_becomes_slow_is_named_within_ten_steps() {
        for ranks in [2, 4, 12] {
            for begins in [1, 30, 100] {
                let slow = |rank, step| rank == 1 && step >= begins;
                let (_, changes) = run(ranks, begins + 9, |rank, step| {
                    (40_000 + noise(rank, step, 20_000)) * if slow(rank, step) { 2 } else { 1 }
                });
                assert!(
                    changes.iter().any(|(_, c)| c.rank == 1 && c.slow),
                    "{ranks} ranks, from step {begins}: {changes:?}"
                );
            }
        }
    }

    #[test]
    fn a_start_that_is_slow_for_all_hides_nobody() {
        // Own step times of two ranks in milliseconds: while another process was starting, and then
        // with one rank 1.8 times as slow (quiet-slow-ranks).
        const OWN: [u64; 21] =
            [473, 627, 616, 586, 535, 441, 378, 279, 357, 270, 425, 416, 457, 418, 644, 508, 548, 496, 602, 523, 467];
        const OTHER: [u64; 21] =
            [473, 450, 597, 546, 532, 548, 411, 230, 308, 231, 387, 389, 276, 275, 359, 255, 250, 253, 283, 336, 415];
        let (_, changes) = run(2, 21, |rank, step| if rank == 1 { OWN } else { OTHER }[step as usize - 1] * 1000);
        assert!(matches!(changes[..], [(17..=21, Change { rank: 1, slow: true, .. })]), "{changes:?}");
    }

    #[test]
    fn the_median_of_others_leaves_out_one() {
        for values in [[1u64, 2, 3, 4, 5].as_slice(), &[2, 2, 7, 9], &[1, 8], &[4, 4, 4]] {
            for (i, own) in values.iter().enumerate() {
                let others = values.iter().enumerate().filter(|(k, _)| *k != i).map(|(_, v)| *v);
                assert_eq!(median_of_others(values, *own), median(others).unwrap_or(0), "{values:?} without {own}");
            }
        }
    }

    #[test]
    fn turns_of_being_slow_are_announced_once_in_ten_minutes_at_most() {
        // A busy neighbour takes half of one rank's CPU for some seconds at a time, of each rank in
        // turn.
        for (turn, ranks) in [(5, 2), (12, 2), (30, 4), (50, 2)] {
            let (_, changes) = run(ranks, 3600, |rank, step| {
                let busy = (step / turn) % u64::from(ranks * 2) == u64::from(rank);
                (40_000 + noise(rank, step, 30_000)) * if busy { 2 } else { 1 }
            });
            let slow: Vec<u64> = changes.iter().filter(|(_, c)| c.slow).map(|(step, _)| *step).collect();
            assert!(slow.windows(2).all(|w| w[1] - w[0] >= 600), "turns of {turn} s: {slow:?}");
        }
    }

    #[test]
    fn after_noise_a_rank_that_stays_slow_is_still_named() {
        let (watch, changes) = run(2, 600, |rank, step| {
            let slow = if step < 200 { step / 20 % 2 == u64::from(rank) } else { rank == 1 };
            if slow { 120_000 } else { 50_000 }
        });
        assert!(watch.slow().contains_key(&1), "{changes:?}");
    }

    #[test]
    fn after_noise_a_rank_that_is_much_slower_is_named_within_ten_steps() {
        let (_, changes) = run(2, 109, |rank, step| {
            let times = match step {
                20..40 if rank == 0 => 16,
                100.. if rank == 1 => 25,
                _ => 10,
            };
            (4000 + noise(rank, step, 400)) * times
        });
        let slow: Vec<(u64, u32)> = changes.iter().filter(|(_, c)| c.slow).map(|(step, c)| (*step, c.rank)).collect();
        assert!(matches!(slow[..], [(20..40, 0), (100..110, 1)]), "{changes:?}");
    }

    #[test]
    fn times_that_overlap_are_noise() {
        let (_, changes) = run(2, 3000, |rank, step| 20_000 + noise(rank, step, 40_000));
        assert!(changes.is_empty(), "{changes:?}");
    }

    #[test]
    fn a_little_slower_all_the_time_is_shown_and_not_announced() {
        let (watch, changes) =
            watch(80, |rank, step| 100_000 + (step * 7919 % 5) * 1000 + if rank == 3 { 22_000 } else { 0 });
        assert!(changes.is_empty());
        assert_eq!(watch.slightly_slow(), [(3, 121)].into());
        let (jitter, _) = self::watch(200, |rank, step| 60_000 + (step * 7919 + u64::from(rank) * 104_729) % 41 * 1000);
        assert!(jitter.slightly_slow().is_empty(), "noise of 40 % is not");
    }

    #[test]
    fn noise_and_single_long_steps_say_nothing() {
        let (_, changes) =
            watch(100, |rank, step| if step % 10 == 0 && rank == 1 { 900_000 } else { 1000 + u64::from(rank) * 900 });
        assert!(changes.is_empty(), "{changes:?}");
    }
}
