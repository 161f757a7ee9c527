//! The workers of one generation on this node, and what their agent writes to their step boards.

use super::slot_files::Destination;
use everstep_checkpoint::step_board::{Board, EVERY_BITS, Word};
use everstep_core::id::{Generation, Incarnation, Rank, Step};
use everstep_core::message::{Slot, SnapshotEvery, SnapshotInterval, Stop};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Workers of one generation.
pub struct Crew {
    /// Local ranks whose sealed steps are watched.
    pub watched: BTreeSet<u32>,
    /// The step from which all ranks resumed, once it is known.
    pub restored: Option<Step>,
    /// Ranks that have asked which step to restore.
    pub asked: BTreeSet<Rank>,
    pub generation: Generation,
    pub slot: Slot,
    pub restarts: u32,
    pub workers: BTreeMap<u32, Worker>,
    pub world_size: u32,
    pub nodes: u32,
    /// See [`Start::began`](everstep_core::message::Start::began).
    pub began: Incarnation,
    /// Set when the crew is gone, so that watchers end.
    pub over: Arc<AtomicBool>,
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
    }
}

/// One of them.
pub struct Worker {
    pub pid: u32,
    pub board: Board,
    pub destination: Option<Destination>,
    pub error: Option<String>,
}

impl Crew {
    /// Returns whether a worker hands its steps over to this agent.
    pub fn has_checkpoints(&self) -> bool {
        !self.watched.is_empty()
    }

    /// Returns whether a worker has used a checkpoint manager.
    pub fn has_manager(&self) -> bool {
        self.has_checkpoints() || self.workers.values().any(|worker| worker.destination.is_some())
    }

    /// Passes a stop signal to the workers' boards, where `should_stop` finds it.
    pub fn request_stop(&self, stop: Stop) {
        for worker in self.workers.values() {
            worker.board.set(Word::StopAt, stop.at.map_or(0, |s| s.0 + 1));
            worker.board.set(Word::StopRequested, u64::from(stop.signal.unsigned_abs()));
        }
    }

    /// Asks workers to mark their snapshot of this step for durable storage.
    pub fn persist_at(&self, step: Step) {
        for worker in self.workers.values() {
            worker.board.set(Word::PersistAt, step.0 + 1);
        }
    }

    /// Asks workers to capture multiples of `every` from this step on.
    pub fn snapshot_every(&self, change: SnapshotEvery) {
        let SnapshotEvery { from, every: SnapshotInterval(every) } = change;
        for worker in self.workers.values() {
            worker.board.set(Word::SnapshotEvery, from.0 << EVERY_BITS | every.min((1 << EVERY_BITS) - 1));
        }
    }

    /// Asks workers to persist the snapshot of this step and to wait there for the next world, or
    /// to continue if there is no step.
    pub fn hold_at(&self, step: Option<Step>) {
        for worker in self.workers.values() {
            if let Some(step) = step {
                worker.board.set(Word::PersistAt, step.0 + 1);
            }
            worker.board.set(Word::HoldAt, step.map_or(0, |s| s.0 + 1));
        }
    }

    /// Notifies workers of a step on durable storage.
    pub fn durable(&self, step: Step) {
        for worker in self.workers.values() {
            // An older step may be published later.
            let newest = worker.board.get(Word::Durable).max(step.0 + 1);
            worker.board.set(Word::Durable, newest);
        }
    }

    /// Notifies the worker whose checkpoint could not be made durable, or else all workers.
    pub fn not_durable(&self, local_rank: Option<u32>, step: Step, why: &str) {
        for (local, worker) in &self.workers {
            if local_rank.is_none_or(|l| l == *local) {
                worker.board.note_failure(step.0, why);
            }
        }
    }

    /// Notifies workers of the newest step that all nodes have, with its copies.
    pub fn replicated(&self, step: Step) {
        for worker in self.workers.values() {
            worker.board.set(Word::Replicated, step.0 + 1);
        }
    }
}
