//! The gate that copies of checkpoints pass on their way to the network. When they may, [`Pacer`]
//! decides; this reads what the workers have announced on their boards, and waits.

use everstep_checkpoint::format::digest::CHUNK_BYTES;
use everstep_checkpoint::replicate::push::{Gate, Pass, Window};
use everstep_checkpoint::step_board::{Board, Network, Word, monotonic};
use everstep_core::copy_estimate::copy_estimate;
use everstep_core::interleave::Kept;
use everstep_core::pacing::{Admission, Budget, Known, LOOK, Lane, Pacer, budget};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Streams per peer.
pub const STREAMS: usize = 2;

/// Speed of the network to the peers in bytes per second, as measured by copies; 0 if unknown.
#[derive(Debug, Default)]
pub struct Speed(AtomicU64);

impl Speed {
    /// Returns the speed in bytes per second, once it is known.
    pub fn get(&self) -> Option<f64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|n| *n > 0).map(|n| n as f64)
    }

    fn set(&self, speed: f64) {
        self.0.store(speed as u64, Ordering::Relaxed);
    }
}

/// Describes for people how copies of `bytes` per step fit into the profile in `path` at this
/// speed.
fn describe(path: &Path, bytes: u64, speed: f64) -> Option<String> {
    let kept: Kept = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    Some(copy_estimate(&kept.iteration, bytes, speed))
}

/// The gate of one step's copies.
#[derive(Debug)]
pub struct Paced {
    boards: Vec<Board>,
    /// The workers are being ended: nothing passes any more.
    over: Arc<AtomicBool>,
    /// Shared with the copies of other steps.
    speed: Arc<Speed>,
    pacer: Mutex<Pacer>,
}

fn known(board: &Board) -> Known {
    match board.network() {
        Network::Unseen => Known::Unseen,
        Network::Learning => Known::Learning,
        Network::Known => Known::Spans,
        Network::Open => Known::Open,
    }
}

fn lane(board: &Board) -> Lane {
    Lane {
        known: known(board),
        busy: board.get(Word::CommBusy) != 0,
        idle_until: board.get(Word::IdleUntil),
        spans: board.get(Word::IdleSpans),
        iteration: board.get(Word::StepNanos),
    }
}

impl Paced {
    /// Returns a gate for one step's copies.
    pub fn new(boards: Vec<Board>, over: Arc<AtomicBool>, speed: Arc<Speed>) -> Self {
        let pacer = Mutex::new(Pacer::new(monotonic()));
        Paced { boards, over, speed, pacer }
    }

    /// Announces that `bytes` will be sent in all, at most `under_way` of them at a time, including
    /// those that are just passing.
    pub fn expect(&mut self, bytes: u64, under_way: u64) {
        if let Ok(pacer) = self.pacer.get_mut() {
            pacer.expect(monotonic(), bytes, under_way);
        }
    }

    /// Describes how copies fit beside the training's own traffic, once both are known.
    pub fn estimate(&self, profile: &Path) -> Option<String> {
        let known = self.boards.iter().any(|b| b.network() == Network::Known);
        let bytes = self.pacer.lock().ok()?.bytes();
        self.speed.get().filter(|_| known).and_then(|speed| describe(profile, bytes, speed))
    }

    /// Returns what may be under way to one peer over `streams` streams.
    pub fn window(&self, streams: usize) -> Window {
        let known: Vec<Known> = self.boards.iter().map(known).collect();
        let one_buffer = self.boards.iter().any(|b| b.get(Word::OneBuffer) == 1);
        match budget(&known, one_buffer, self.speed.get(), streams) {
            Budget::OneBuffer => Window { extent: CHUNK_BYTES, buffers: 1, streams: 1 },
            Budget::Full => Window { streams, ..Window::default() },
            Budget::Part(share) => Window { extent: share.extent, buffers: share.buffers, streams },
        }
    }
}

impl Gate for Paced {
    fn pass(&self, bytes: usize) -> Pass {
        loop {
            let Some(mut pacer) = self.pacer.lock().ok().filter(|_| !self.over.load(Ordering::Acquire)) else {
                return Pass { bytes: 0, alone: false };
            };
            // Read before the decision, so that a span that begins meanwhile ends the wait for it.
            let lanes: Vec<Lane> = self.boards.iter().map(lane).collect();
            let speed = self.speed.get();
            pacer.learn(speed);
            let admission = pacer.admit(monotonic(), bytes, &lanes);
            if let Some(measured) = pacer.speed().filter(|_| pacer.speed() != speed) {
                self.speed.set(measured);
            }
            drop(pacer);
            match admission {
                Admission::Pass { bytes, alone } => return Pass { bytes, alone },
                Admission::Wait(time) => std::thread::sleep(time),
                Admission::AwaitSpan(worker) => {
                    if let (Some(board), Some(lane)) = (self.boards.get(worker), lanes.get(worker)) {
                        board.await_idle(lane.spans, LOOK);
                    }
                }
            }
        }
    }

    fn arrived(&self, idle: bool) {
        if let Ok(mut pacer) = self.pacer.lock() {
            pacer.arrived(monotonic(), idle);
        }
    }
}
