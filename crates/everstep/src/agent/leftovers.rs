//! Takes over what the previous job left in memory. This is for jobs that end with their launcher:
//! no later start can have the same name.

use super::slot_files;
use crate::{lock, paths};
use everstep_checkpoint::arena::{Label, Pin, Slot, run_label};
use everstep_core::id::RunId;
use everstep_wire::private::{Directory, Root};
use std::path::Path;
use std::time::Duration;

/// A single-node job that has just claimed the directory `run` from `predecessor`, which has ended.
pub struct Heir<'a> {
    /// Name of the job that owned the directory before.
    pub predecessor: &'a str,
    /// Name of this job.
    pub job: &'a str,
    /// This node's id, which is the same in all single-node jobs.
    pub node: &'a str,
    /// Identity of the directory.
    pub run: RunId,
    /// Number of ranks of this job. Slots of a job with another number are not used.
    pub world_size: u64,
}

impl Heir<'_> {
    /// Takes over the slots of all ranks and labels them as captured before this job's first
    /// generation. Returns whether there were any.
    ///
    /// Takes nothing if the previous job still has its node, or if this job has slots of its own.
    pub fn adopt(&self) -> bool {
        // The name comes from the checkpoint directory, where anybody may have put it.
        if self.predecessor == self.job || paths::check_name("job", self.predecessor).is_err() {
            return false;
        }
        let Ok(state) = Directory::existing(&paths::job(self.predecessor), Root::Named) else { return false };
        let lock = lock::take(&state, &format!("node-{}.lock", self.node), Duration::ZERO);
        let Ok(Ok(_lock)) = lock else { return false };
        // A job of that name with other records holds the lock of its memory only.
        let memory = Directory::existing(&paths::node_memory(self.predecessor, self.node), Root::Named).ok();
        if memory.as_ref().is_some_and(|of| !lock::take_directory(of).unwrap_or(true)) {
            return false;
        }
        let (old, own) = (self.predecessor, self.job);
        if slot_files::holds_slots(own, self.node) {
            return false;
        }
        let moved =
            [paths::node_memory, paths::node_spill].map(|of| self.take(&of(old, self.node), &of(own, self.node)));
        if !slot_files::holds_slots(old, self.node) {
            slot_files::discard(old, self.node);
        }
        moved.contains(&true)
    }

    /// Moves the slots that belong to this directory and to a job with the same number of ranks.
    /// Returns whether there were any.
    fn take(&self, from: &Path, to: &Path) -> bool {
        let names = Directory::existing(from, Root::Named).and_then(|d| d.names()).unwrap_or_default();
        let mut any = false;
        for (name, _) in names.iter().filter(|(name, _)| name.to_string_lossy().contains("-slot-")) {
            let path = from.join(name);
            let Ok(slot) = Slot::open(&path) else { continue };
            let ours = |l: Label| l.run == run_label(&self.run.to_string()) && l.world_size == self.world_size;
            if !slot.label().is_some_and(ours) || Directory::root(to, Root::Named).is_err() {
                continue;
            }
            slot.release(Pin::Persist);
            slot.release(Pin::Replicate);
            // SAFETY: with the lock of the previous job's node, its agent and workers have ended.
            // This job's have not begun.
            unsafe { slot.forget_readers() };
            slot.relabel(0);
            any |= std::fs::rename(&path, to.join(name)).is_ok();
        }
        any
    }
}
