//! Which rank holds the others up? In a collective job all steps take as long as the slowest rank's own
//! work; the others wait. So ranks are compared by the time of a step that they do not spend waiting.
//!
//! Three states: well; sub-healthy, from 1.1 times the others' time on, which only a long window tells from noise and which is shown but
//! not announced; slow, which is announced.
//!
//! Noise must not be announced. A rank is slow only where nearly all its latest steps are longer than the others', and by more than the
//! others have been slower than it lately; what slows all ranks at once, as a start does, says nothing about any of them. Whoever was
//! announced may have been noise on this machine, so each announcement makes the watch wait longer before the next one; a calm time makes
//! it quick again.

use crate::time::Time;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Latest steps of a rank that are compared, those of the others that they are compared with, and the steps that are kept for what only
/// shows in many of them.
const WINDOW: usize = 9;
const REFERENCE: usize = 12;
const LONG: usize = 61;
/// A rank is slow from here on, in percent of the others' time.
const SLOW_PERCENT: u64 = 145;
/// And well again from here on.
const WELL_PERCENT: u64 = 125;
/// A slow rank's step is the longer one in at least this percentage of all pairs with the others' steps.
const APART_PERCENT: usize = 90;
/// A rank is sub-healthy from here on (1.1, as in Unicron).
const SUB_HEALTHY_PERCENT: u64 = 110;
/// Differences of less than this many microseconds are noise.
const NOISE_MICROS: u64 = 5000;
/// After an announcement, how long the next rank must be slow before it is announced; doubled with each further one.
const PATIENCE: Duration = Duration::from_secs(60);
const PATIENCE_MAX: Duration = Duration::from_secs(960);
/// An announced rank has to keep up for this long before that is announced.
const RECOVERED: Duration = Duration::from_secs(20);
/// While no rank is slow for this long, the patience is halved.
const CALM: Duration = Duration::from_secs(1200);

/// A rank became slow, or well again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Which.
    pub rank: u32,
    /// Its own work per step, in percent of the others'.
    pub percent: u64,
    /// Slow, or well again.
    pub slow: bool,
}

/// What a rank has reported of its steps.
#[derive(Clone, Debug, Default)]
struct Rank {
    /// The latest one.
    step: u64,
    /// How many.
    reported: u64,
    /// Microseconds of its own work in the latest ones.
    micros: VecDeque<u64>,
}

/// Compares the ranks of one generation.
#[derive(Clone, Debug, Default)]
pub struct SlowWatch {
    ranks: BTreeMap<u32, Rank>,
    /// Steps that all ranks had reported at the last look.
    looked: u64,
    /// Announced as slow, with the percentage.
    slow: BTreeMap<u32, u64>,
    /// Since when a rank has looked other than what was announced of it.
    turning: BTreeMap<u32, Time>,
    /// How long a rank must be slow before it is announced.
    patience: Duration,
    /// When a rank last began or ceased to be slow.
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

fn median(values: impl Iterator<Item = u64>) -> u64 {
    let sorted = sorted(values);
    at(&sorted, sorted.len() / 2)
}

/// Median of `sorted` without one `own` of its values.
fn median_of_others(sorted: &[u64], own: u64) -> u64 {
    let place = sorted.partition_point(|v| *v < own);
    let middle = sorted.len().saturating_sub(1) / 2;
    at(sorted, if middle < place { middle } else { middle + 1 })
}

/// A rank's steps beside the others', latest last.
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

    /// Its time in percent of the others': the median over all pairs of latest steps.
    fn percent(&self) -> u64 {
        let (own, others) = self.latest();
        median(own.iter().flat_map(|x| others.iter().map(move |y| x * 100 / y.max(&1))))
    }

    /// Its times and the others' lie apart, by more than the others are slower than it in one of five steps of the long window.
    fn apart(&self, percent: u64) -> bool {
        let (own, others) = self.latest();
        let longer: usize = own.iter().map(|x| others.iter().filter(|y| x > y).count()).sum();
        let middle = |of: &[u64]| median(of.iter().copied());
        let reverse = sorted(self.own.iter().zip(&self.others).map(|(x, y)| y * 100 / x.max(&1)));
        longer * 100 >= own.len() * others.len() * APART_PERCENT
            && middle(own) > middle(others) + NOISE_MICROS
            && percent > at(&reverse, reverse.len() * 4 / 5)
    }
}

impl SlowWatch {
    /// Rank `rank` has completed `step`, with `micros` of its own work in the last one.
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

    /// What is to be announced since the last look.
    pub fn changes(&mut self, now: Time) -> Vec<Change> {
        let reported = self.ranks.values().map(|r| r.reported).min().unwrap_or(0);
        let steps = self.ranks.values().map(|r| r.micros.len()).min().unwrap_or(0);
        // Each of thousands of nodes may bring news several times a second; there is something new to compare once all ranks have reported a step.
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
                }
                continue;
            }
            let since = *self.turning.entry(rank).or_insert(now);
            let wait = if announced { RECOVERED } else { self.patience };
            if now.since(since) < wait {
                continue;
            }
            self.turning.remove(&rank);
            if looks_slow {
                self.slow.insert(rank, percent);
                self.patience = (self.patience * 2).clamp(PATIENCE, PATIENCE_MAX);
            } else {
                self.slow.remove(&rank);
            }
            self.episode = Some(now);
            changes.push(Change { rank, percent, slow: looks_slow });
        }
        changes
    }

    /// The latest `steps` of each rank beside the others'. Ranks report at the same times, and not every step, so
    /// steps are matched by counting from the latest.
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

    /// A rank is again as it was announced: what began has passed.
    fn settle(&mut self, rank: u32, now: Time) {
        if self.turning.remove(&rank).is_some() && !self.slow.contains_key(&rank) {
            self.episode = Some(now);
        }
    }

    fn calm_down(&mut self, now: Time) {
        if self.episode.is_some_and(|at| now.since(at) >= CALM) {
            self.patience = if self.patience <= PATIENCE { Duration::ZERO } else { self.patience / 2 };
            self.episode = (!self.patience.is_zero()).then_some(now);
        }
    }

    /// Ranks that are a little slower than the others all the time, with their percentage: three of four of their steps take longer than the
    /// others' usual one, by that much.
    #[must_use]
    pub fn sub_healthy(&self) -> BTreeMap<u32, u64> {
        if self.ranks.len() < 2 || self.ranks.values().any(|r| r.micros.len() < LONG) {
            return BTreeMap::new();
        }
        let ranks: Vec<(u32, Vec<u64>)> =
            self.ranks.iter().map(|(rank, of)| (*rank, sorted(of.micros.iter().copied()))).collect();
        let usual = sorted(ranks.iter().map(|(_, window)| at(window, window.len() / 2)));
        let mut found = BTreeMap::new();
        for (rank, window) in ranks.iter().filter(|(rank, _)| !self.slow.contains_key(rank)) {
            let own = at(window, window.len() / 2);
            let others = median_of_others(&usual, own);
            let quick = at(window, window.len() / 4);
            if quick * 100 >= others * SUB_HEALTHY_PERCENT && quick > others + NOISE_MICROS {
                found.insert(*rank, own * 100 / others.max(1));
            }
        }
        found
    }

    /// Ranks that are slow now, with their percentage.
    #[must_use]
    pub fn slow(&self) -> &BTreeMap<u32, u64> {
        &self.slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of a second each; changes with the step at which they were announced.
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

    /// A number below `below` that looks random.
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
        // What a rank's own steps took beside a process that was starting, in milliseconds, and then 1.8 times as slow (quiet-slow-ranks).
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
                assert_eq!(median_of_others(values, *own), median(others), "{values:?} without {own}");
            }
        }
    }

    #[test]
    fn turns_of_being_slow_are_announced_once_in_ten_minutes_at_most() {
        // A busy neighbour takes half of one rank's processor for some seconds at a time, of each rank in turn.
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
    fn times_that_overlap_are_noise() {
        let (_, changes) = run(2, 3000, |rank, step| 20_000 + noise(rank, step, 40_000));
        assert!(changes.is_empty(), "{changes:?}");
    }

    #[test]
    fn a_little_slower_all_the_time_is_sub_healthy_and_not_told() {
        let (watch, changes) =
            watch(80, |rank, step| 100_000 + (step * 7919 % 5) * 1000 + if rank == 3 { 22_000 } else { 0 });
        assert!(changes.is_empty());
        assert_eq!(watch.sub_healthy(), [(3, 121)].into());
        let (jitter, _) = self::watch(200, |rank, step| 60_000 + (step * 7919 + u64::from(rank) * 104_729) % 41 * 1000);
        assert!(jitter.sub_healthy().is_empty(), "noise of 40 % is not");
    }

    #[test]
    fn noise_and_single_long_steps_say_nothing() {
        let (_, changes) =
            watch(100, |rank, step| if step % 10 == 0 && rank == 1 { 900_000 } else { 1000 + u64::from(rank) * 900 });
        assert!(changes.is_empty(), "{changes:?}");
    }
}
