//! How long copies are on their way: the product's own [`Pacer`] sends them beside a training loop
//! whose network is busy for a part of each iteration, in virtual time.

use everstep_core::pacing::{Admission, EXTENT, Known, LOOK, Lane, Nanos, Pacer};
use std::time::Duration;

const MS: Nanos = 1_000_000;
/// Length of an iteration: workers complete five steps per second.
const ITERATION: Nanos = 200 * MS;
/// The part of each iteration in which a collective is under way.
const BUSY: Nanos = 120 * MS;
/// Time that a byte takes: 50 MB/s.
const BYTE: Nanos = 20;

/// Returns how long it takes to send this number of bytes from `now` on, both in milliseconds, with
/// what the workers `know` about their collectives.
pub(crate) fn copying_ms(now: u64, bytes: u64, know: Known) -> u64 {
    let began = now * MS;
    let (mut now, mut left) = (began, bytes);
    let mut pacer = Pacer::new(now);
    pacer.learn(Some(1e9 / BYTE as f64));
    pacer.expect(now, bytes, EXTENT as u64);
    while left > 0 {
        let part = usize::try_from(left).unwrap_or(EXTENT).min(EXTENT);
        match pacer.admit(now, part, &[lane(now, know)]) {
            Admission::Pass { bytes, alone } => {
                left -= bytes as u64;
                now += bytes as u64 * BYTE;
                if alone {
                    pacer.arrived(now, true);
                }
            }
            Admission::Wait(time) => now += nanos(time),
            Admission::AwaitSpan(_) => now = next_span(now).min(now + nanos(LOOK)),
        }
    }
    (now - began).div_ceil(MS)
}

fn nanos(time: Duration) -> Nanos {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns when the next idle span begins.
fn next_span(now: Nanos) -> Nanos {
    let this = now / ITERATION * ITERATION + BUSY;
    if this > now { this } else { this + ITERATION }
}

/// Returns what a worker has announced: a collective from the beginning of each iteration on, then
/// an idle span.
fn lane(now: Nanos, known: Known) -> Lane {
    let (iterations, into) = (now / ITERATION, now % ITERATION);
    let busy = into < BUSY;
    let spans = iterations + u64::from(!busy);
    let idle_until = if busy { iterations * ITERATION } else { (iterations + 1) * ITERATION };
    Lane { known, busy, idle_until, spans, iteration: ITERATION }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_waits_for_idle_spans_unless_the_network_is_its_own() {
        let bytes = 6_000_000;
        assert_eq!(copying_ms(0, bytes, Known::Open), 120, "its own network");
        let beside = copying_ms(0, bytes, Known::Spans);
        assert!(beside > 280, "{beside} ms: two idle spans of 80 ms are needed");
        assert!(copying_ms(0, bytes, Known::Learning) > 280);
    }

    #[test]
    fn a_copy_of_unseen_collectives_is_spread() {
        let spread = copying_ms(0, 1_000_000, Known::Unseen);
        assert!((100..=200).contains(&spread), "{spread} ms");
    }
}
