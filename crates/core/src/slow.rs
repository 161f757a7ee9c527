//! Which rank holds the others up? In a collective job all steps take as long as the slowest rank's own
//! work; the others wait. So ranks are compared by the time of a step that they do not spend waiting.
//!
//! Three states: well; sub-healthy, from 1.1 times the others' time on, which only a long window tells from noise and which is shown but
//! not announced; slow, which is announced.
//!
//! Noise must not be announced. A rank is slow only where its times and the others' times lie apart, not just their medians. Whoever was
//! announced may have been noise on this machine, so each announcement makes the watch wait longer before the next one; a calm time makes
//! it quick again.

use crate::time::Time;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Steps per rank that are compared, and that are kept for what only shows in many of them.
const WINDOW: usize = 9;
const LONG: usize = 61;
/// A rank is slow from here on, in percent of the others' median.
const SLOW_PERCENT: u64 = 150;
/// And well again from here on.
const WELL_PERCENT: u64 = 125;
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
    /// Its own work per step, in percent of the others' median.
    pub percent: u64,
    /// Slow, or well again.
    pub slow: bool,
}

/// Compares the ranks of one generation.
#[derive(Clone, Debug, Default)]
pub struct SlowWatch {
    ranks: BTreeMap<u32, (u64, VecDeque<u64>)>,
    /// Announced as slow, with the percentage.
    slow: BTreeMap<u32, u64>,
    /// Since when a rank has looked other than what was announced of it.
    turning: BTreeMap<u32, Time>,
    /// How long a rank must be slow before it is announced.
    patience: Duration,
    /// When a rank last began or ceased to be slow.
    episode: Option<Time>,
}

/// How long a rank's steps take.
struct Lately {
    /// All but one of the latest steps take at least this long.
    low: u64,
    /// Median of the latest steps.
    median: u64,
    /// All but one of the latest steps, and four of five in the long window, take at most this long.
    high: u64,
}

fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut sorted: Vec<u64> = values.collect();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or(0)
}

impl Lately {
    fn of(window: &VecDeque<u64>) -> Self {
        let mut all: Vec<u64> = window.iter().copied().collect();
        let mut latest = all.split_off(all.len().saturating_sub(WINDOW));
        all.extend(&latest);
        all.sort_unstable();
        latest.sort_unstable();
        let of = |sorted: &[u64], i: usize| sorted.get(i).copied().unwrap_or(0);
        Lately {
            low: of(&latest, 1),
            median: of(&latest, latest.len() / 2),
            high: of(&latest, latest.len().saturating_sub(2)).max(of(&all, all.len() * 4 / 5)),
        }
    }
}

impl SlowWatch {
    /// Rank `rank` has completed `step`, with `micros` of its own work in the last one.
    pub fn saw(&mut self, rank: u32, step: u64, micros: u64) {
        let (last, window) = self.ranks.entry(rank).or_default();
        if *last == step {
            return;
        }
        *last = step;
        window.push_back(micros);
        if window.len() > LONG {
            window.pop_front();
        }
    }

    /// What is to be announced since the last look.
    pub fn changes(&mut self, now: Time) -> Vec<Change> {
        if self.ranks.len() < 2 || self.ranks.values().any(|(_, w)| w.len() < WINDOW) {
            return Vec::new();
        }
        self.calm_down(now);
        let lately: BTreeMap<u32, Lately> = self.ranks.iter().map(|(r, (_, w))| (*r, Lately::of(w))).collect();
        let mut changes = Vec::new();
        for (rank, own) in &lately {
            let others = || lately.iter().filter(|(r, _)| *r != rank).map(|(_, other)| other);
            let (usual, high) = (median(others().map(|o| o.median)), median(others().map(|o| o.high)));
            let percent = own.median * 100 / usual.max(1);
            let announced = self.slow.contains_key(rank);
            let apart = own.low > high && own.median > usual + NOISE_MICROS;
            let looks_slow = if announced { percent > WELL_PERCENT } else { percent >= SLOW_PERCENT && apart };
            if looks_slow == announced {
                self.settle(*rank, now);
                if announced {
                    self.slow.insert(*rank, percent);
                }
                continue;
            }
            let since = *self.turning.entry(*rank).or_insert(now);
            let wait = if announced { RECOVERED } else { self.patience };
            if now.since(since) < wait {
                continue;
            }
            self.turning.remove(rank);
            if looks_slow {
                self.slow.insert(*rank, percent);
                self.patience = (self.patience * 2).clamp(PATIENCE, PATIENCE_MAX);
            } else {
                self.slow.remove(rank);
            }
            self.episode = Some(now);
            changes.push(Change { rank: *rank, percent, slow: looks_slow });
        }
        changes
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
        if self.ranks.len() < 2 || self.ranks.values().any(|(_, w)| w.len() < LONG) {
            return BTreeMap::new();
        }
        let usual: BTreeMap<u32, u64> = self.ranks.iter().map(|(r, (_, w))| (*r, median(w.iter().copied()))).collect();
        let mut found = BTreeMap::new();
        for (rank, (_, window)) in self.ranks.iter().filter(|(rank, _)| !self.slow.contains_key(rank)) {
            let others = median(usual.iter().filter(|(r, _)| *r != rank).map(|(_, micros)| *micros));
            let mut sorted: Vec<u64> = window.iter().copied().collect();
            sorted.sort_unstable();
            let quick = sorted.get(sorted.len() / 4).copied().unwrap_or(0);
            if quick * 100 >= others * SUB_HEALTHY_PERCENT && quick > others + NOISE_MICROS {
                found.insert(*rank, usual.get(rank).copied().unwrap_or(0) * 100 / others.max(1));
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
