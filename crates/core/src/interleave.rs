//! The idle times of the training network (Gemini §5.2: profile). What fits into them is in
//! [`crate::copy_estimate`].
//!
//! A profile has one idle span before the first collective of an iteration and one after each, in
//! order. The sender follows the collectives by counting them, so that a slow phase shifts all
//! later spans with it.

use crate::median::median;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Number of iterations in a profile (Gemini §5.2).
pub const PROFILED: usize = 20;
/// Fraction of an idle span that is used: γ of Algorithm 2. The profile's spans already exclude
/// what varies between iterations; the rest is a margin for clocks and for data in flight.
pub const TRUST: f64 = 0.97;
/// Number of recent iterations that decide whether the pattern has changed.
const WATCHED: usize = 10;
/// A pattern has changed if its total idle time differs by more than this fraction.
const MOVED: f64 = 0.25;
/// Maximum number of iterations over which a copy is spread; beyond that it is sent without regard
/// for idle times.
pub const INTERVAL_MAX: u64 = 100;

/// One observed iteration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Iteration {
    /// Time from the end of one step to the end of the next.
    pub length: Duration,
    /// Idle time before the first collective and after each.
    pub idle: Vec<Duration>,
}

/// A profile saved for the next worker in the same place.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kept {
    /// Number of ranks at the time: with another number, the pattern differs.
    pub world_size: u64,
    /// The learned profile.
    pub iteration: Iteration,
}

impl Iteration {
    /// Returns the total idle time.
    #[must_use]
    pub fn idle_total(&self) -> Duration {
        self.idle.iter().sum()
    }
}

/// What is known about the pattern after an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Too few iterations were seen.
    Learning,
    /// The profile exists and matches.
    Known,
    /// The pattern has changed, so it is profiled again.
    Moved,
}

/// Learns the pattern of a training loop and detects when it changes.
#[derive(Clone, Debug, Default)]
pub struct Profiler {
    seen: Vec<Iteration>,
    profile: Option<Iteration>,
    fits: VecDeque<bool>,
}

impl Profiler {
    /// Creates a profiler, with the profile of an earlier life of the same worker if there is one.
    #[must_use]
    pub fn with(profile: Option<Iteration>) -> Self {
        Profiler { profile, ..Profiler::default() }
    }

    /// Returns the profile, once it exists.
    #[must_use]
    pub fn profile(&self) -> Option<&Iteration> {
        self.profile.as_ref()
    }

    /// Records one iteration.
    pub fn observe(&mut self, iteration: Iteration) -> Verdict {
        let Some(profile) = &self.profile else {
            self.seen.push(iteration);
            if self.seen.len() < PROFILED {
                return Verdict::Learning;
            }
            self.profile = Some(typical(&std::mem::take(&mut self.seen)));
            self.fits.clear();
            return Verdict::Known;
        };
        self.fits.push_back(alike(profile, &iteration));
        if self.fits.len() > WATCHED {
            self.fits.pop_front();
        }
        if self.fits.len() == WATCHED && self.fits.iter().filter(|f| !**f).count() > WATCHED / 2 {
            *self = Profiler::default();
            return Verdict::Moved;
        }
        Verdict::Known
    }
}

fn alike(profile: &Iteration, seen: &Iteration) -> bool {
    // Without a pattern there is nothing to compare.
    if profile.idle.is_empty() {
        return true;
    }
    let (was, is) = (profile.idle_total().as_secs_f64(), seen.idle_total().as_secs_f64());
    seen.idle.len() == profile.idle.len() && (was - is).abs() <= MOVED * was.max(is)
}

/// Returns medians over the iterations that have the most common number of collectives. Each span
/// is reduced by twice its median deviation, so that it is at least that long nine times in ten.
/// There are no spans if the number of collectives has no pattern.
fn typical(seen: &[Iteration]) -> Iteration {
    let mut by_count: BTreeMap<usize, Vec<&Iteration>> = BTreeMap::new();
    for iteration in seen {
        by_count.entry(iteration.idle.len()).or_default().push(iteration);
    }
    let length = median(seen.iter().map(|i| i.length)).unwrap_or_default();
    let common = by_count.into_values().max_by_key(Vec::len).unwrap_or_default();
    if common.len() * 2 < seen.len() {
        return Iteration { length, idle: Vec::new() };
    }
    let spans = common.first().map_or(0, |i| i.idle.len());
    let span = |n: usize| {
        let lengths: Vec<Duration> = common.iter().filter_map(|i| i.idle.get(n).copied()).collect();
        let middle = median(lengths.iter().copied()).unwrap_or_default();
        let deviation = median(lengths.into_iter().map(|l| l.abs_diff(middle))).unwrap_or_default();
        middle.saturating_sub(2 * deviation)
    };
    let length = median(common.iter().map(|i| i.length)).unwrap_or_default();
    Iteration { length, idle: (0..spans).map(span).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn iteration(idle: &[u64]) -> Iteration {
        Iteration { length: ms(idle.iter().sum::<u64>() + 10), idle: idle.iter().map(|n| ms(*n)).collect() }
    }

    #[test]
    fn twenty_iterations_make_a_profile_and_the_odd_one_does_not_count() {
        let mut profiler = Profiler::default();
        assert_eq!(profiler.observe(iteration(&[900])), Verdict::Learning);
        for _ in 1..PROFILED - 1 {
            assert_eq!(profiler.observe(iteration(&[5, 20, 30])), Verdict::Learning);
        }
        assert_eq!(profiler.observe(iteration(&[5, 20, 30])), Verdict::Known);
        assert_eq!(profiler.profile().unwrap().idle, [ms(5), ms(20), ms(30)]);
    }

    #[test]
    fn a_span_is_trusted_less_the_more_it_varies() {
        let mut profiler = Profiler::default();
        (0..PROFILED).for_each(|i| _ = profiler.observe(iteration(&[10 + 4 * (i as u64 % 3), 50])));
        assert_eq!(profiler.profile().unwrap().idle, [ms(6), ms(50)]);
    }

    #[test]
    fn another_pattern_is_profiled_again_but_one_slow_iteration_is_none() {
        let mut profiler = Profiler::with(Some(iteration(&[5, 20, 30])));
        for i in 0..50 {
            let seen = if i % 4 == 0 { iteration(&[5, 200, 30]) } else { iteration(&[5, 21, 29]) };
            assert_eq!(profiler.observe(seen), Verdict::Known);
        }
        let moved = (0..WATCHED).map(|_| profiler.observe(iteration(&[5, 20]))).position(|v| v == Verdict::Moved);
        assert!(moved.is_some_and(|n| n >= 3) && profiler.profile().is_none());
    }

    #[test]
    fn without_a_pattern_there_are_no_spans() {
        let mut profiler = Profiler::default();
        for i in 0..PROFILED {
            let _ = profiler.observe(iteration(&vec![3; 1 + i % 7]));
        }
        assert!(profiler.profile().unwrap().idle.is_empty());
    }
}
