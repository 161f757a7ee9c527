//! Decides when copies of checkpoints may use the network: in the idle spans between the workers'
//! collectives (Gemini §5.2). The workers report when a span begins and how long it is expected to
//! last. This gate admits only what arrives before the span ends.

use everstep_checkpoint::board::{Board, Network, Word, monotonic};
use everstep_checkpoint::format::digest::CHUNK_BYTES;
use everstep_checkpoint::replicate::push::{Gate, Pass, Window};
use everstep_core::interleave::{Cost, INTERVAL_MAX, Kept, capacity, interval, schedule};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long to wait for a span before looking again.
const LOOK: Duration = Duration::from_millis(20);
/// Length of an extent. What is under way when a collective begins delays it.
const EXTENT: usize = 128 << 10;
/// Length of the first part sent in a span, the probe.
const PROBE: usize = 16 << 10;
/// A probe that takes longer than this is lost.
const PROBE_LOST: Duration = Duration::from_secs(1);
/// How long to wait before checking again whether the probe has arrived.
const PROBING: Duration = Duration::from_micros(200);
/// Limit on the bytes under way, in seconds on the network.
const UNDER_WAY: f64 = 0.002;
/// Shorter spans do not show the network's speed.
const MEASURED: Duration = Duration::from_millis(5);
/// If collectives are not observed, a copy is spread over this part of an iteration.
const SPREAD: f64 = 0.7;
/// After this many iterations without a collective, the loop is doing something else.
const SILENT: u64 = 2;

/// Speed of the network to the peers in bytes per second, as measured by copies; 0 if unknown.
#[derive(Debug, Default)]
pub struct Speed(AtomicU64);

impl Speed {
    /// Returns the speed in bytes per second, once it is known.
    pub fn get(&self) -> Option<f64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|n| *n > 0).map(|n| n as f64)
    }

    fn saw(&self, bytes: u64, time: Duration) {
        if time >= MEASURED {
            let now = bytes as f64 / time.as_secs_f64();
            // A span is rarely slowed down by the network: take the best value, and let it decay.
            let best = self.get().map_or(now, |was| (was * 0.98).max(now));
            self.0.store(best as u64, Ordering::Relaxed);
        }
    }

    /// Returns what may be under way to one peer over `streams` streams.
    fn window(&self, streams: usize) -> Window {
        let bytes = self.get().map_or(4.0 * EXTENT as f64, |speed| speed * UNDER_WAY);
        let extent = if bytes > 64.0 * EXTENT as f64 { 16 * EXTENT } else { EXTENT };
        let buffers = (bytes / (streams * extent) as f64).round() as usize;
        Window { extent, buffers: buffers.clamp(1, 16), streams }
    }
}

/// An idle span and what was sent in it.
#[derive(Debug)]
struct Span {
    number: u64,
    /// The probe is under way, alone. It follows whatever a collective has left in this machine's
    /// buffers, so when it arrives, the network is idle.
    probing: bool,
    since: Instant,
    bytes: u64,
    latest: Instant,
}

impl Span {
    /// Returns whether to wait for the probe. Its sender may have lost its connection, so the wait
    /// is limited.
    fn awaits_probe(&self) -> bool {
        self.probing && self.since.elapsed() < PROBE_LOST
    }
}

/// Describes for people what the profile in `path` means for copies of `bytes` per step at this
/// speed: how often they go out, and how they fit into the idle time.
pub fn outlook(path: &Path, bytes: u64, speed: f64) -> Option<String> {
    let kept: Kept = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    let (length, idle) = (kept.iteration.length.as_secs_f64(), kept.iteration.idle);
    let cost = Cost { latency: 0.0, bytes_per_second: speed };
    let fits = capacity(&idle, EXTENT as u64, cost);
    let every = match interval(bytes, fits) {
        1 => {
            let last = schedule(&idle, bytes, EXTENT as u64, cost).last().map_or(0, |c| c.span + 1);
            format!("each step's are sent by its {last}. idle span of {}", idle.len())
        }
        n => format!("they go out every {n} steps"),
    };
    let share = idle.iter().sum::<Duration>().as_secs_f64() / length.max(1e-9) * 100.0;
    Some(format!(
        "copies of {:.1} MB per step: the training network is idle for {share:.0} % of {length:.3} s, enough for {:.1} MB: {every}",
        bytes as f64 / 1e6,
        fits as f64 / 1e6
    ))
}

#[derive(Debug)]
struct Progress {
    passed: u64,
    span: Span,
    /// When the next bytes may go, if they are spread.
    next: Instant,
}

/// The gate of one step's copies.
#[derive(Debug)]
pub struct Paced {
    boards: Vec<Board>,
    /// The workers are being ended: nothing passes any more.
    over: Arc<AtomicBool>,
    speed: Arc<Speed>,
    bytes: u64,
    under_way: u64,
    began: Instant,
    progress: Mutex<Progress>,
}

impl Paced {
    /// Returns a gate for one step's copies.
    pub fn new(boards: Vec<Board>, over: Arc<AtomicBool>, speed: Arc<Speed>) -> Self {
        let began = Instant::now();
        let span = Span { number: 0, probing: false, since: began, bytes: 0, latest: began };
        let progress = Mutex::new(Progress { passed: 0, span, next: began });
        Paced { boards, over, speed, bytes: 0, under_way: 0, began, progress }
    }

    /// Announces that `bytes` will be sent in all, at most `under_way` of them at a time, including
    /// those that are just passing.
    pub fn expect(&mut self, bytes: u64, under_way: u64) {
        (self.bytes, self.under_way, self.began) = (bytes, under_way, Instant::now());
    }

    /// Describes how copies fit beside the training's own traffic, once both are known.
    pub fn outlook(&self, profile: &Path) -> Option<String> {
        let known = self.boards.iter().any(|b| b.network() == Network::Known);
        self.speed.get().filter(|_| known).and_then(|speed| outlook(profile, self.bytes, speed))
    }

    /// Returns what may be under way to one peer over `streams` streams.
    pub fn window(&self, streams: usize) -> Window {
        let is = |network| self.boards.iter().any(|b| b.network() == network);
        match () {
            () if self.boards.iter().any(|b| b.get(Word::OneBuffer) == 1) => {
                Window { extent: CHUNK_BYTES, buffers: 1, streams: 1 }
            }
            () if is(Network::Open) => Window { streams, ..Window::default() },
            () if is(Network::Learning) => Window { extent: EXTENT, buffers: 1, streams },
            () => self.speed.window(streams),
        }
    }

    fn iteration(&self) -> u64 {
        self.boards.iter().map(|b| b.get(Word::StepNanos)).max().unwrap_or(0)
    }

    /// Returns whether there is an idle span and `bytes` arrive before it ends.
    fn idle(&self, board: &Board, bytes: usize, iteration: u64) -> bool {
        if board.get(Word::CommBusy) != 0 {
            return false;
        }
        if board.network() == Network::Learning {
            // The length of the span is unknown, but a step without copies may be lost: send little
            // by little (ADR 0007).
            return true;
        }
        let (until, now) = (board.get(Word::IdleUntil), monotonic());
        let needed = self.speed.get().map_or(0.0, |speed| self.under_way.max(bytes as u64) as f64 / speed * 1e9);
        let silent = until.saturating_add(SILENT.saturating_mul(iteration));
        now.saturating_add(needed as u64) <= until || (iteration > 0 && now > silent)
    }

    /// Returns whether the copy lags behind even a schedule of [`INTERVAL_MAX`] iterations.
    fn late(&self, passed: u64, iteration: u64) -> bool {
        let iteration = iteration as f64 / 1e9;
        let due = (self.began.elapsed().as_secs_f64() - iteration) / (INTERVAL_MAX as f64 * iteration);
        iteration > 0.0 && (passed as f64) < self.bytes as f64 * due.min(1.0)
    }

    /// Lets bytes go. The first of a span go alone.
    fn let_go(&self, progress: &mut Progress, bytes: usize, spans: bool) -> Pass {
        let now = Instant::now();
        let number = self.boards.iter().map(|b| b.get(Word::IdleSpans)).sum();
        let span = &mut progress.span;
        let alone = spans && span.number != number;
        let bytes = if alone { bytes.min(PROBE) } else { bytes };
        if alone {
            // What passed before the last bytes has left, except for what was under way.
            if let Some(left) = span.bytes.checked_sub(self.under_way) {
                self.speed.saw(left, span.latest - span.since);
            }
            *span = Span { number, probing: true, since: now, bytes: 0, latest: now };
        } else if spans {
            (span.bytes, span.latest) = (span.bytes + bytes as u64, now);
        }
        progress.passed += bytes as u64;
        Pass { bytes, alone }
    }

    /// Spreads bytes evenly over a part of the iteration. Returns the time to wait, if any.
    fn spread(&self, progress: &mut Progress, bytes: usize, iteration: u64) -> Option<Duration> {
        let now = Instant::now();
        if progress.next > now {
            return Some((progress.next - now).min(LOOK));
        }
        let share = bytes as f64 / self.bytes.max(1) as f64;
        progress.next = now + Duration::from_secs_f64(share * SPREAD * iteration as f64 / 1e9);
        None
    }
}

impl Gate for Paced {
    fn pass(&self, bytes: usize) -> Pass {
        loop {
            let Some(mut progress) = self.progress.lock().ok().filter(|_| !self.over.load(Ordering::Acquire)) else {
                return Pass { bytes: 0, alone: false };
            };
            let iteration = self.iteration();
            let is = |network| self.boards.iter().any(|b| b.network() == network);
            let spans = !is(Network::Open) && (is(Network::Known) || is(Network::Learning));
            let wait = if spans {
                let seen: Vec<u64> = self.boards.iter().map(|b| b.get(Word::IdleSpans)).collect();
                let closed = self.boards.iter().zip(seen).find(|(b, _)| !self.idle(b, bytes, iteration));
                match closed {
                    Some((board, seen)) if !self.late(progress.passed, iteration) => {
                        drop(progress);
                        board.await_idle(seen, LOOK);
                        continue;
                    }
                    _ => progress.span.awaits_probe().then_some(PROBING),
                }
            } else if is(Network::Open) {
                None
            } else {
                self.spread(&mut progress, bytes, iteration)
            };
            if let Some(time) = wait {
                drop(progress);
                std::thread::sleep(time);
            } else {
                return self.let_go(&mut progress, bytes, spans);
            }
        }
    }

    fn arrived(&self, idle: bool) {
        if let Ok(mut progress) = self.progress.lock() {
            let (now, span) = (Instant::now(), &mut progress.span);
            (span.probing, span.since, span.latest) = (false, now, now);
            if !idle {
                // At the other end, the span begins later: probe again.
                span.number = u64::MAX;
            }
        }
    }
}
