//! Which rank holds the others up? In a collective job all steps take as long as the slowest rank's own
//! work; the others wait. So ranks are compared by the time of a step that they do not spend waiting.
//!
//! Three states: well; sub-healthy, from 1.1 times the others' time on, which only long looking tells from noise, and which is shown and
//! nothing more; slow, which is told.

use std::collections::{BTreeMap, VecDeque};

/// Steps per rank that are looked at, and that are kept for what only shows in many of them.
const WINDOW: usize = 9;
const LONG: usize = 61;
/// Fewest steps of every rank before anything is said.
const ENOUGH: usize = 5;
/// A rank is slow from here on, in percent of the others' median.
const SLOW_PERCENT: u64 = 150;
/// And well again from here on.
const WELL_PERCENT: u64 = 125;
/// A rank is sub-healthy from here on (1.1, as in Unicron).
const SUB_HEALTHY_PERCENT: u64 = 110;
/// Differences of less than this many microseconds are noise.
const NOISE_MICROS: u64 = 5000;

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
    slow: BTreeMap<u32, u64>,
}

fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut sorted: Vec<u64> = values.collect();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or(0)
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

    /// What has changed since the last look.
    pub fn changes(&mut self) -> Vec<Change> {
        if self.ranks.len() < 2 || self.ranks.values().any(|(_, w)| w.len() < ENOUGH) {
            return Vec::new();
        }
        let lately = |w: &VecDeque<u64>| median(w.iter().rev().take(WINDOW).copied());
        let own: BTreeMap<u32, u64> = self.ranks.iter().map(|(r, (_, w))| (*r, lately(w))).collect();
        let all = median(own.values().copied());
        let mut changes = Vec::new();
        for (rank, micros) in &own {
            // With few ranks the slow one would move the median itself.
            let others =
                if own.len() > 8 { all } else { median(own.iter().filter(|(r, _)| r != &rank).map(|(_, m)| *m)) };
            let percent = micros * 100 / others.max(1);
            let was = self.slow.contains_key(rank);
            let is =
                if was { percent > WELL_PERCENT } else { percent >= SLOW_PERCENT && *micros > others + NOISE_MICROS };
            if is != was {
                changes.push(Change { rank: *rank, percent, slow: is });
            }
            if is {
                self.slow.insert(*rank, percent);
            } else {
                self.slow.remove(rank);
            }
        }
        changes
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

    fn watch(steps: u64, micros: impl Fn(u32, u64) -> u64) -> (SlowWatch, Vec<Change>) {
        let mut watch = SlowWatch::default();
        let mut all = Vec::new();
        for step in 1..=steps {
            for rank in 0..4 {
                watch.saw(rank, step, micros(rank, step));
            }
            all.extend(watch.changes());
        }
        (watch, all)
    }

    #[test]
    fn the_rank_that_others_wait_for_is_named_once() {
        let (watch, changes) = watch(30, |rank, _| if rank == 2 { 120_000 } else { 50_000 });
        assert_eq!(changes, [Change { rank: 2, percent: 240, slow: true }]);
        assert_eq!(watch.slow().keys().copied().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn it_is_well_again_when_it_keeps_up() {
        let (_, changes) = watch(40, |rank, step| if rank == 0 && step < 15 { 120_000 } else { 50_000 });
        assert_eq!(changes.iter().map(|c| (c.rank, c.slow)).collect::<Vec<_>>(), [(0, true), (0, false)]);
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
