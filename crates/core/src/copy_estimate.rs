//! Estimates for people how a checkpoint's copies fit into the idle times of the training network
//! (Gemini §5.2: Algorithm 2; §5.3: frequency). [`crate::pacing`] decides during training which
//! bytes are sent, and when.

use crate::interleave::{INTERVAL_MAX, Iteration, TRUST};
use crate::pacing::EXTENT;
use std::time::Duration;

/// Returns a sentence for people: how often copies of `bytes` per step go out at this speed, in
/// bytes per second, and how they fit into the idle time of this profile.
#[must_use]
pub fn copy_estimate(profile: &Iteration, bytes: u64, bytes_per_second: f64) -> String {
    let (length, idle) = (profile.length.as_secs_f64(), &profile.idle);
    let cost = Cost { latency: 0.0, bytes_per_second };
    let fits = capacity(idle, EXTENT as u64, cost);
    let every = match interval(bytes, fits) {
        1 => {
            let last = schedule(idle, bytes, EXTENT as u64, cost).last().map_or(0, |c| c.span + 1);
            format!("each step's copies are sent by the end of idle span {last} of {}", idle.len())
        }
        n => format!("copies are sent every {n} steps"),
    };
    let share = profile.idle_total().as_secs_f64() / length.max(1e-9) * 100.0;
    format!(
        "copies of {:.1} MB per step: the network is idle for {share:.0} % of each {length:.3} s step, enough for \
         {:.1} MB; {every}",
        bytes as f64 / 1e6,
        fits as f64 / 1e6
    )
}

/// The cost of sending a chunk: `latency + bytes / bytes_per_second` (f(x) of Algorithm 2).
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cost {
    /// α, in seconds.
    latency: f64,
    /// B: the bandwidth.
    bytes_per_second: f64,
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
struct Chunk {
    /// Index of the idle span.
    span: usize,
    /// Length of the chunk in bytes.
    bytes: u64,
}

/// Splits `bytes` into chunks of at most one sub-buffer and assigns them to the idle spans, in
/// order (Algorithm 2). The remainder goes into the last span: it ends with the iteration, and
/// delays nothing but the next iteration.
fn schedule(idle: &[Duration], bytes: u64, buffer: u64, cost: Cost) -> Vec<Chunk> {
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
fn capacity(idle: &[Duration], buffer: u64, cost: Cost) -> u64 {
    let fits = |length: &Duration| {
        let time = TRUST * length.as_secs_f64();
        let whole = (time / cost.of(buffer.max(1))).floor();
        (whole as u64) * buffer + cost.within(time - whole * cost.of(buffer.max(1))).min(buffer)
    };
    idle.iter().map(fits).sum()
}

/// Returns the iterations between copies so that no copy needs more than the idle time available
/// (Gemini §5.3).
fn interval(bytes: u64, capacity: u64) -> u64 {
    bytes.div_ceil(capacity.max(1)).clamp(1, INTERVAL_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn the_sentence_names_the_span_or_the_interval() {
        let profile = Iteration { length: ms(100), idle: vec![ms(10), ms(40)] };
        let small = copy_estimate(&profile, 20_000_000, 1e9);
        assert!(small.contains("idle for 50 % of each 0.100 s step") && small.ends_with("idle span 2 of 2"), "{small}");
        assert!(copy_estimate(&profile, 100_000_000, 1e9).ends_with("every 3 steps"));
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
