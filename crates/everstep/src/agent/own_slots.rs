//! The slots of this node's workers, as the agent uses them: which there are, and which are pinned
//! for other nodes.

use super::slot_files::SLOTS_LOOKED_AT;
use everstep_checkpoint::arena::{Pin, Slot, slot_paths};
use everstep_checkpoint::mapped::Mapped;
use everstep_core::id::{Generation, Step};
use std::path::PathBuf;
use std::sync::Arc;

/// A step and its slots by local rank.
pub type Pinned = (Step, Vec<Arc<Slot>>);

/// The slots of this node's workers, for any thread.
#[derive(Clone)]
pub struct Own {
    directories: Vec<PathBuf>,
    mapped: Arc<Mapped>,
}

impl Own {
    /// Those in these directories.
    pub fn of(directories: Vec<PathBuf>) -> Self {
        Own { directories, mapped: Arc::default() }
    }

    /// The directories.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// Those of one worker.
    pub fn slots(&self, local: u32) -> Vec<Arc<Slot>> {
        let paths = self.directories.iter().flat_map(|d| slot_paths(d, local, SLOTS_LOOKED_AT));
        paths.filter_map(|p| self.mapped.open(&p).ok()).collect()
    }

    /// Slots of all local ranks for the first step from `from` on that all of them have sealed,
    /// pinned. What was pinned for another round is let go, but for the step to go back to.
    pub fn pin_all(&self, workers: u32, generation: Generation, from: Step, base: Option<Step>) -> Option<Pinned> {
        let sealed =
            |s: &Arc<Slot>| s.label().filter(|l| l.generation == generation.0 && l.step >= from.0).map(|l| l.step);
        let all: Vec<Vec<Arc<Slot>>> = (0..workers).map(|local| self.slots(local)).collect();
        let mut steps: Vec<u64> = all.first()?.iter().filter_map(sealed).collect();
        steps.sort_unstable();
        let step =
            steps.into_iter().find(|step| all.iter().all(|slots| slots.iter().any(|s| sealed(s) == Some(*step))));
        self.release(workers, generation, |s| Some(s) != base && Some(s.0) != step);
        let step = step?;
        let mut pinned = Vec::new();
        for slots in all {
            let found = slots.into_iter().find(|s| sealed(s) == Some(step))?;
            // It may have been overwritten until it was pinned.
            let held = found.pin(Pin::Replicate) && sealed(&found) == Some(step);
            pinned.push(found);
            if !held {
                pinned.iter().for_each(|s: &Arc<Slot>| s.release(Pin::Replicate));
                return None;
            }
        }
        Some((Step(step), pinned))
    }

    /// Lets go of steps of this generation that were pinned for other nodes.
    pub fn release(&self, workers: u32, generation: Generation, goes: impl Fn(Step) -> bool) {
        for slot in (0..workers).flat_map(|local| self.slots(local)).filter(|s| s.pinned_for(Pin::Replicate)) {
            if slot.label().is_some_and(|l| l.generation == generation.0 && goes(Step(l.step))) {
                slot.release(Pin::Replicate);
            }
        }
    }
}
