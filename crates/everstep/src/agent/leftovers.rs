//! What the job before has left in memory, when it ended with its launcher and no later start can have its name.

use super::storage;
use crate::{lock, places};
use everstep_checkpoint::arena::{Pin, Slot, run_label};
use everstep_core::id::RunId;
use everstep_wire::private::{Directory, Root};
use std::path::PathBuf;
use std::time::Duration;

/// One rank of a job that has just claimed the directory `run` from `predecessor`, which has ended.
pub struct Heir<'a> {
    /// Name of the job that owned the directory before.
    pub predecessor: &'a str,
    /// This job.
    pub job: &'a str,
    /// This node's id; jobs of one node all have the same.
    pub node: &'a str,
    /// Identity of the directory.
    pub run: RunId,
    /// The rank, on this node and in the job.
    pub local_rank: u32,
    pub rank: u64,
    /// Ranks of the job; what another number of them has left is not used.
    pub world_size: u64,
}

impl Heir<'_> {
    /// Takes over the rank's slots. They count as captured before this job's first generation. Returns whether there were any.
    ///
    /// Nothing is taken when the job before still has its node, or when this rank has slots of its own.
    pub fn adopt(&self) -> bool {
        // The name was read from the checkpoint directory, where anybody may have put it.
        if self.predecessor == self.job || places::check_name("job", self.predecessor).is_err() {
            return false;
        }
        let Ok(state) = Directory::existing(&places::job(self.predecessor), Root::Named) else { return false };
        let lock = lock::take(&state, &format!("node-{}.lock", self.node), Duration::ZERO);
        let Ok(Ok(_lock)) = lock else { return false };
        let memory = |job| places::node_memory(job, self.node);
        let spill = |job| places::node_spill(job, self.node);
        let (old, own) = (self.predecessor, self.job);
        if [memory(own), spill(own)].into_iter().any(|d| !self.slots(d).is_empty()) {
            return false;
        }
        let moved = [(memory(old), memory(own)), (spill(old), spill(own))].map(|(from, to)| self.take(from, to));
        if !storage::holds_slots(old, self.node) {
            storage::discard(old, self.node);
        }
        moved.contains(&true)
    }

    /// Paths of the rank's slots in a directory.
    fn slots(&self, directory: PathBuf) -> Vec<PathBuf> {
        let prefix = format!("local-{}-slot-", self.local_rank);
        let names = Directory::existing(&directory, Root::Named).and_then(|d| d.names()).unwrap_or_default();
        let names = names.into_iter().map(|(name, _)| name);
        names.filter(|n| n.to_string_lossy().starts_with(&prefix)).map(|n| directory.join(n)).collect()
    }

    fn take(&self, from: PathBuf, to: PathBuf) -> bool {
        let mut any = false;
        for path in self.slots(from) {
            let Ok(slot) = Slot::open(&path) else { continue };
            let ours = |l: everstep_checkpoint::arena::Label| {
                l.run == run_label(&self.run.to_string()) && (l.rank, l.world_size) == (self.rank, self.world_size)
            };
            if !slot.label().is_some_and(ours) || Directory::root(&to, Root::Named).is_err() {
                continue;
            }
            slot.release(Pin::Persist);
            slot.release(Pin::Replicate);
            slot.relabel(0);
            any |= path.file_name().is_some_and(|name| std::fs::rename(&path, to.join(name)).is_ok());
        }
        any
    }
}
