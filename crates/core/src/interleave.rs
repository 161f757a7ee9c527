//! The idle times of the training network, and what fits into them (Gemini §5.2: profile, Algorithm
//! 2; §5.3: frequency).
//!
//! A profile has one idle span before the first collective of an iteration and one after each, in
//! order. The sender follows the collectives by counting them, so that a slow phase shifts all
//! later spans with it.

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
    /// The profile.
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
    let length = median(seen.iter().map(|i| i.length).collect());
    let common = by_count.into_values().max_by_key(Vec::len).unwrap_or_default();
    if common.len() * 2 < seen.len() {
        return Iteration { length, idle: Vec::new() };
    }
    let spans = common.first().map_or(0, |i| i.idle.len());
    let span = |n: usize| {
        let lengths: Vec<Duration> = common.iter().filter_map(|i| i.idle.get(n).copied()).collect();
        let middle = median(lengths.clone());
        middle.saturating_sub(2 * median(lengths.into_iter().map(|l| l.abs_diff(middle)).collect()))
    };
    Iteration { length: median(common.iter().map(|i| i.length).collect()), idle: (0..spans).map(span).collect() }
}

fn median(mut of: Vec<Duration>) -> Duration {
    of.sort_unstable();
    of.get(of.len() / 2).copied().unwrap_or_default()
}

/// The cost of sending a chunk: `latency + bytes / bytes_per_second` (f(x) of Algorithm 2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// α, in seconds.
    pub latency: f64,
    /// B: the bandwidth.
    pub bytes_per_second: f64,
}

impl Cost {
    fn of(&self, bytes: u64) -> f64 {
        self.latency + bytes as f64 / self.bytes_per_second
    }

    fn within(&self, seconds: f64) -> u64 {
        ((seconds - self.latency).max(0.0) * self.bytes_per_second) as u64
    }
}

/// A part of a checkpoint and the idle span that it is sent in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the idle span.
    pub span: usize,
    /// Size in bytes.
    pub bytes: u64,
}

/// Algorithm 2: splits `bytes` into chunks of at most one sub-buffer and assigns them to the idle
/// spans, in order. The remainder goes into the last span: it ends with the iteration, and delays
/// nothing but the next iteration.
#[must_use]
pub fn schedule(idle: &[Duration], bytes: u64, buffer: u64, cost: Cost) -> Vec<Chunk> {
    let (mut left, mut chunks) = (bytes, Vec::new());
    for (span, length) in idle.iter().enumerate() {
        let last = span + 1 == idle.len();
        let mut time = if last { f64::INFINITY } else { TRUST * length.as_secs_f64() };
        while left > 0 {
            let bytes = cost.within(time).min(buffer.max(1)).min(left);
            if bytes == 0 {
                break;
            }
            time -= cost.of(bytes);
            left -= bytes;
            chunks.push(Chunk { span, bytes });
        }
    }
    chunks
}

/// Returns the number of bytes that the idle spans of one iteration can carry, chunk by chunk.
#[must_use]
pub fn capacity(idle: &[Duration], buffer: u64, cost: Cost) -> u64 {
    let fits = |length: &Duration| {
        let time = TRUST * length.as_secs_f64();
        let whole = (time / cost.of(buffer.max(1))).floor();
        (whole as u64) * buffer + cost.within(time - whole * cost.of(buffer.max(1))).min(buffer)
    };
    idle.iter().map(fits).sum()
}

/// Returns the iterations between copies so that no copy needs more than the idle time available
/// (Gemini §5.3).
#[must_use]
pub fn interval(bytes: u64, capacity: u64) -> u64 {
    bytes.div_ceil(capacity.max(1)).clamp(1, INTERVAL_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    #[test]
    fn the_last_span_takes_what_is_left() {
        let cost = Cost { latency: 0.0, bytes_per_second: 1000.0 };
        let chunks = schedule(&[ms(100), ms(1), ms(10)], 200, 64, cost);
        let of = |span| chunks.iter().filter(|c| c.span == span).map(|c| c.bytes).collect::<Vec<_>>();
        assert_eq!((of(0), of(1), of(2)), (vec![64, 33], vec![], vec![64, 39]));
        assert_eq!((interval(200, 100), interval(201, 100), interval(5, 0)), (2, 3, 5));
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_no_span_but_the_last_overflows(
            idle in proptest::collection::vec(0u64..50, 1..20),
            bytes in 0u64..1_000_000,
            buffer in 1u64..100_000,
        ) {
            let idle: Vec<Duration> = idle.into_iter().map(ms).collect();
            let cost = Cost { latency: 1e-4, bytes_per_second: 1e6 };
            let chunks = schedule(&idle, bytes, buffer, cost);
            prop_assert_eq!(chunks.iter().map(|c| c.bytes).sum::<u64>(), bytes);
            prop_assert!(chunks.iter().all(|c| c.bytes <= buffer && c.bytes > 0));
            for (span, length) in idle.iter().enumerate().take(idle.len() - 1) {
                let taken: f64 = chunks.iter().filter(|c| c.span == span).map(|c| cost.of(c.bytes)).sum();
                prop_assert!(taken <= TRUST * length.as_secs_f64() + 1e-9);
            }
            let fit: u64 = capacity(&idle, buffer, cost);
            let before_last: u64 = chunks.iter().filter(|c| c.span + 1 < idle.len()).map(|c| c.bytes).sum();
            prop_assert!(before_last <= fit + idle.len() as u64);
        }
    }
}
