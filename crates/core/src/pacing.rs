//! Decides when bytes of a checkpoint's copies may use the training network: in the idle spans
//! between collectives (Gemini §5.2), and only what arrives before the span ends (ADR 0007).
//!
//! The caller passes what the workers have announced as a list of [`Lane`]s, one per worker of the
//! node, and the current time; nothing here waits or reads a clock.

use crate::interleave::INTERVAL_MAX;
use std::time::Duration;

/// Length of an extent. What is under way when a collective begins delays it.
pub const EXTENT: usize = 128 << 10;
/// Length of the first part sent in a span, the probe.
const PROBE: usize = 16 << 10;
/// A probe that takes longer than this is lost.
const PROBE_LOST: Duration = Duration::from_secs(1);
/// How long to wait before checking again whether the probe has arrived.
const PROBING: Duration = Duration::from_micros(200);
/// How long to wait for a span before looking again.
pub const LOOK: Duration = Duration::from_millis(20);
/// Limit on the bytes under way, in seconds on the network.
const UNDER_WAY: f64 = 0.002;
/// Shorter spans do not show the network's speed.
const MEASURED: Duration = Duration::from_millis(5);
/// If collectives are not observed, a copy is spread over this part of an iteration.
const SPREAD: f64 = 0.7;
/// After this many iterations without a collective, the loop is doing something else.
const SILENT: u64 = 2;

/// A point in time, in nanoseconds on the clock that all processes of a machine share.
pub type Nanos = u64;

fn since(now: Nanos, earlier: Nanos) -> Duration {
    Duration::from_nanos(now.saturating_sub(earlier))
}

/// What a worker knows about its collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// The collectives are not observed.
    Unseen,
    /// The pattern is being learned.
    Learning,
    /// The idle spans are announced.
    Spans,
    /// Copies do not share the network with collectives.
    Open,
}

/// The network as one worker has announced it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// What the worker knows about its collectives.
    pub known: Known,
    /// Whether a collective is in progress.
    pub busy: bool,
    /// When the current idle span ends, if the profile is right.
    pub idle_until: Nanos,
    /// Number of idle spans that have begun.
    pub spans: u64,
    /// Length of an iteration in nanoseconds; 0 if unknown.
    pub iteration: u64,
}

/// Whether bytes may be sent now, or when to ask again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// This many may be sent at once. If `alone`, nothing more may be sent until they have arrived.
    Pass {
        /// Number of bytes that may be sent.
        bytes: usize,
        /// Whether they are the probe of a span.
        alone: bool,
    },
    /// Ask again after this time.
    Wait(Duration),
    /// Ask again when the worker with this index has begun another span, or after [`LOOK`].
    AwaitSpan(usize),
}

/// Returns the speed of the network in bytes per second after a span in which `bytes` were sent in
/// `time`. A span is rarely slowed down by the network, so the best value counts, and it decays.
#[must_use]
pub fn speed_after(speed: Option<f64>, bytes: u64, time: Duration) -> Option<f64> {
    if time < MEASURED {
        return speed;
    }
    let now = bytes as f64 / time.as_secs_f64();
    Some(speed.map_or(now, |was| (was * 0.98).max(now)))
}

/// Limit on the bytes in flight to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Length of an extent in bytes.
    pub extent: usize,
    /// Number of extents in flight per stream.
    pub buffers: usize,
}

/// Returns what may be under way over `streams` streams at this speed.
fn share(speed: Option<f64>, streams: usize) -> Share {
    let bytes = speed.map_or(4.0 * EXTENT as f64, |speed| speed * UNDER_WAY);
    let extent = if bytes > 64.0 * EXTENT as f64 { 16 * EXTENT } else { EXTENT };
    let buffers = (bytes / (streams * extent) as f64).round() as usize;
    Share { extent, buffers: buffers.clamp(1, 16) }
}

/// How much of a step's copies may be under way to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// One chunk, over one stream.
    OneBuffer,
    /// As much as a link carries by default.
    Full,
    /// Less, because collectives share the network.
    Part(Share),
}

/// Returns the budget for copies over `streams` streams at this speed, from what the workers know
/// about their collectives. `one_buffer`: some worker was asked to send one buffer at a time.
#[must_use]
pub fn budget(known: &[Known], one_buffer: bool, speed: Option<f64>, streams: usize) -> Budget {
    match () {
        () if one_buffer => Budget::OneBuffer,
        () if known.contains(&Known::Open) => Budget::Full,
        () if known.contains(&Known::Learning) => Budget::Part(Share { extent: EXTENT, buffers: 1 }),
        () => Budget::Part(share(speed, streams)),
    }
}

/// An idle span and what was sent in it.
#[derive(Clone, Debug)]
struct Span {
    /// Sum of the workers' counts of spans; `None`: the next bytes are a probe again.
    number: Option<u64>,
    /// The probe is under way, alone. It follows whatever a collective has left in this machine's
    /// buffers, so when it arrives, the network is idle.
    probing: bool,
    since: Nanos,
    bytes: u64,
    latest: Nanos,
}

/// The copies of one step on their way.
#[derive(Clone, Debug)]
pub struct Pacer {
    /// All bytes that will be sent, and the most that are under way at a time.
    bytes: u64,
    under_way: u64,
    began: Nanos,
    passed: u64,
    span: Span,
    /// When the next bytes may go, if they are spread.
    next: Nanos,
    speed: Option<f64>,
}

impl Pacer {
    /// Returns the state before the first byte.
    #[must_use]
    pub fn new(now: Nanos) -> Self {
        let span = Span { number: Some(0), probing: false, since: now, bytes: 0, latest: now };
        Pacer { bytes: 0, under_way: 0, began: now, passed: 0, span, next: now, speed: None }
    }

    /// Announces that `bytes` will be sent in all, at most `under_way` of them at a time, including
    /// those that are just passing.
    pub fn expect(&mut self, now: Nanos, bytes: u64, under_way: u64) {
        (self.bytes, self.under_way, self.began) = (bytes, under_way, now);
    }

    /// Returns the number of bytes to be sent.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Sets the speed that other copies have measured, in bytes per second.
    pub fn learn(&mut self, speed: Option<f64>) {
        self.speed = speed;
    }

    /// Returns the speed of the network in bytes per second, once it is known.
    #[must_use]
    pub fn speed(&self) -> Option<f64> {
        self.speed
    }

    /// Returns whether some of `bytes` may go now.
    pub fn admit(&mut self, now: Nanos, bytes: usize, lanes: &[Lane]) -> Admission {
        let iteration = lanes.iter().map(|l| l.iteration).max().unwrap_or(0);
        let is = |known| lanes.iter().any(|l| l.known == known);
        let spans = !is(Known::Open) && (is(Known::Spans) || is(Known::Learning));
        if spans {
            let closed = lanes.iter().position(|lane| !self.fits(now, lane, bytes, iteration));
            if let Some(closed) = closed.filter(|_| !self.is_late(now, iteration)) {
                return Admission::AwaitSpan(closed);
            }
            // The probe's sender may have lost its connection, so the wait is limited.
            if self.span.probing && since(now, self.span.since) < PROBE_LOST {
                return Admission::Wait(PROBING);
            }
        } else if !is(Known::Open)
            && let Some(wait) = self.spread(now, bytes, iteration)
        {
            return Admission::Wait(wait);
        }
        let number = spans.then(|| lanes.iter().map(|l| l.spans).sum());
        self.let_go(now, bytes, number)
    }

    /// Records that the probe has arrived. If the network at the other end is not idle, its span
    /// begins later, and the next bytes are a probe again.
    pub fn arrived(&mut self, now: Nanos, idle: bool) {
        (self.span.probing, self.span.since, self.span.latest) = (false, now, now);
        if !idle {
            self.span.number = None;
        }
    }

    /// Returns whether a worker's network is idle and `bytes` arrive before that ends.
    fn fits(&self, now: Nanos, lane: &Lane, bytes: usize, iteration: u64) -> bool {
        if lane.busy {
            return false;
        }
        if lane.known == Known::Learning {
            // The length of the span is unknown, but a step without copies may be lost: send little
            // by little.
            return true;
        }
        let needed = self.speed.map_or(0.0, |speed| self.under_way.max(bytes as u64) as f64 / speed * 1e9);
        let silent = lane.idle_until.saturating_add(SILENT.saturating_mul(iteration));
        now.saturating_add(needed as u64) <= lane.idle_until || (iteration > 0 && now > silent)
    }

    /// Returns whether the copy lags behind even a schedule of [`INTERVAL_MAX`] iterations.
    fn is_late(&self, now: Nanos, iteration: u64) -> bool {
        let iteration = iteration as f64 / 1e9;
        let due = (since(now, self.began).as_secs_f64() - iteration) / (INTERVAL_MAX as f64 * iteration);
        iteration > 0.0 && (self.passed as f64) < self.bytes as f64 * due.min(1.0)
    }

    /// Spreads bytes evenly over a part of the iteration. Returns the time to wait, if any.
    fn spread(&mut self, now: Nanos, bytes: usize, iteration: u64) -> Option<Duration> {
        if self.next > now {
            return Some(since(self.next, now).min(LOOK));
        }
        let share = bytes as f64 / self.bytes.max(1) as f64;
        self.next = now.saturating_add((share * SPREAD * iteration as f64) as u64);
        None
    }

    /// Lets bytes go. The first of a span, if spans are observed, go alone.
    fn let_go(&mut self, now: Nanos, bytes: usize, number: Option<u64>) -> Admission {
        let span = &mut self.span;
        let alone = number.is_some() && span.number != number;
        let bytes = if alone { bytes.min(PROBE) } else { bytes };
        if alone {
            // What passed before the last bytes has left, except for what was under way.
            if let Some(left) = span.bytes.checked_sub(self.under_way) {
                self.speed = speed_after(self.speed, left, since(span.latest, span.since));
            }
            *span = Span { number, probing: true, since: now, bytes: 0, latest: now };
        } else if number.is_some() {
            (span.bytes, span.latest) = (span.bytes + bytes as u64, now);
        }
        self.passed += bytes as u64;
        Admission::Pass { bytes, alone }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;
    const SPEED: f64 = 1e9;

    fn lane(known: Known) -> Lane {
        Lane { known, busy: false, idle_until: 50 * MS, spans: 1, iteration: 100 * MS }
    }

    fn pacer(bytes: u64, under_way: u64) -> Pacer {
        let mut pacer = Pacer::new(0);
        pacer.learn(Some(SPEED));
        pacer.expect(0, bytes, under_way);
        pacer
    }

    #[test]
    fn one_worker_decides_how_much_may_be_under_way() {
        let part = |known: &[Known]| budget(known, false, Some(1e9), 2);
        let least = Budget::Part(Share { extent: EXTENT, buffers: 1 });
        assert_eq!(part(&[Known::Spans, Known::Spans]), Budget::Part(share(Some(1e9), 2)));
        assert_eq!(part(&[Known::Spans, Known::Learning]), least);
        assert_eq!(part(&[Known::Learning, Known::Open]), Budget::Full);
        assert_eq!(budget(&[Known::Open], true, Some(1e9), 2), Budget::OneBuffer);
    }

    #[test]
    fn the_first_bytes_of_a_span_go_alone_and_the_others_wait_for_them() {
        let (mut pacer, lanes) = (pacer(1 << 30, 0), [lane(Known::Spans)]);
        assert_eq!(pacer.admit(0, EXTENT, &lanes), Admission::Pass { bytes: PROBE, alone: true });
        assert_eq!(pacer.admit(1, EXTENT, &lanes), Admission::Wait(PROBING));
        pacer.arrived(2, true);
        assert_eq!(pacer.admit(3, EXTENT, &lanes), Admission::Pass { bytes: EXTENT, alone: false });
        pacer.arrived(4, false);
        assert_eq!(pacer.admit(5, EXTENT, &lanes), Admission::Pass { bytes: PROBE, alone: true }, "a later span there");
    }

    #[test]
    fn a_lost_probe_is_not_waited_for_for_ever() {
        let (mut pacer, mut lanes) = (pacer(1 << 30, 0), [lane(Known::Spans)]);
        lanes[0].idle_until = 10_000 * MS;
        pacer.admit(0, EXTENT, &lanes);
        assert_eq!(pacer.admit(1001 * MS, EXTENT, &lanes), Admission::Pass { bytes: EXTENT, alone: false });
    }

    #[test]
    fn nothing_passes_during_a_collective_or_what_would_not_arrive_in_time() {
        let mut pacer = pacer(1 << 30, 10_000_000);
        let idle = lane(Known::Spans);
        let busy = Lane { busy: true, ..idle };
        assert_eq!(pacer.admit(0, EXTENT, &[idle, busy]), Admission::AwaitSpan(1));
        // 10 MB under way take 10 ms.
        assert_eq!(pacer.admit(41 * MS, EXTENT, &[idle]), Admission::AwaitSpan(0));
        assert!(matches!(pacer.admit(39 * MS, EXTENT, &[idle]), Admission::Pass { .. }));
    }

    #[test]
    fn a_loop_without_collectives_does_not_hold_copies_up() {
        let mut pacer = pacer(PROBE as u64, 0);
        let lanes = [lane(Known::Spans)];
        pacer.admit(0, PROBE, &lanes);
        pacer.arrived(1, true);
        assert_eq!(pacer.admit(249 * MS, EXTENT, &lanes), Admission::AwaitSpan(0));
        assert!(matches!(pacer.admit(251 * MS, EXTENT, &lanes), Admission::Pass { .. }), "two iterations later");
    }

    #[test]
    fn a_copy_that_lags_behind_the_longest_interval_goes_on_regardless() {
        let mut pacer = pacer(1000, 0);
        let busy = [Lane { busy: true, ..lane(Known::Spans) }];
        assert_eq!(pacer.admit(90 * MS, 10, &busy), Admission::AwaitSpan(0));
        assert!(matches!(pacer.admit(300 * MS, 10, &busy), Admission::Pass { .. }));
    }

    #[test]
    fn unseen_collectives_spread_a_copy_over_most_of_an_iteration() {
        let (mut pacer, lanes) = (pacer(1000, 0), [lane(Known::Unseen)]);
        let (mut now, mut sent) = (0, 0);
        while sent < 1000 {
            match pacer.admit(now, 100, &lanes) {
                Admission::Pass { bytes, .. } => sent += bytes,
                Admission::Wait(time) => now += time.as_nanos() as u64,
                Admission::AwaitSpan(_) => unreachable!("there are no spans"),
            }
        }
        assert!((60 * MS..=70 * MS).contains(&now), "{now}");
    }

    #[test]
    fn an_open_network_is_never_waited_for() {
        let mut pacer = pacer(1000, 0);
        let lanes = [lane(Known::Open), Lane { busy: true, ..lane(Known::Spans) }];
        assert_eq!(pacer.admit(0, 1000, &lanes), Admission::Pass { bytes: 1000, alone: false });
    }

    #[test]
    fn the_best_speed_of_a_span_counts_and_decays() {
        let ms = Duration::from_millis;
        assert_eq!(speed_after(None, 1_000_000, ms(4)), None, "too short to tell");
        let first = speed_after(None, 1_000_000, ms(10));
        assert_eq!(first, Some(1e8));
        assert_eq!(speed_after(first, 1000, ms(10)), Some(0.98e8));
        assert_eq!(speed_after(first, 4_000_000, ms(10)), Some(4e8));
    }

    proptest! {
        /// Checks that no bytes pass during a collective unless the copy is late, whatever the
        /// workers announce, and that a copy is complete in the end.
        #[test]
        fn bytes_pass_only_between_collectives(
            busy in prop::collection::vec(1u64..40, 20..60),
            idle in 1u64..40,
            bytes in 1u64..4_000_000,
        ) {
            let mut pacer = pacer(bytes, 0);
            let (mut now, mut sent, mut spans) = (0, 0, 0);
            for length in busy.iter().cycle().take(6000) {
                if sent >= bytes {
                    break;
                }
                let iteration = (length + idle) * MS;
                let closed = Lane { known: Known::Spans, busy: true, idle_until: 0, spans, iteration };
                let admission = pacer.admit(now, 1000, &[closed]);
                let late = pacer.is_late(now, iteration);
                prop_assert!(matches!(admission, Admission::AwaitSpan(0)) || late || sent > 0, "{admission:?} at {now}");
                if let Admission::Pass { bytes, .. } = admission {
                    sent += bytes as u64;
                }
                now += length * MS;
                spans += 1;
                let until = now + idle * MS;
                let open = Lane { busy: false, idle_until: until, spans, ..closed };
                while now < until && sent < bytes {
                    match pacer.admit(now, 1000, &[open]) {
                        Admission::Pass { bytes, alone } => {
                            sent += bytes as u64;
                            now += 1000;
                            if alone {
                                pacer.arrived(now, true);
                            }
                        }
                        Admission::Wait(time) => now += time.as_nanos() as u64,
                        Admission::AwaitSpan(_) => break,
                    }
                }
                now = until;
            }
            prop_assert!(sent >= bytes, "{sent} of {bytes}");
        }
    }
}
