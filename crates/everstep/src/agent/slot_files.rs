//! The files of this node's slots: reserves them, writes their shards to durable storage, and
//! removes them.

use super::launch::board_path;
use crate::paths;
use everstep_checkpoint::arena::{Pin, Slot, slot_paths};
use everstep_checkpoint::direct_io::Throttle;
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::persist::{self, Target};
use everstep_checkpoint::retain::Policy;
use everstep_checkpoint::slot_reuse::{Candidate, reusable};
use everstep_checkpoint::step_board::Board;
use everstep_core::id::{Generation, Rank, RunId};
use everstep_core::message::ShardFile;
use everstep_wire::private::{self, Directory, Root};
use everstep_wire::raw::to_text;
use everstep_wire::worker::Reply;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Memory that is always left to others.
const HEADROOM_BYTES: u64 = 16 << 20;

/// Interval of the checks whether memory slots can be released.
const LOOK: Duration = Duration::from_millis(100);

/// No worker has more slots.
pub const SLOTS_LOOKED_AT: u32 = 8;

/// Where a worker's sealed slots are persisted.
#[derive(Clone, Debug)]
pub struct Destination {
    /// Global rank.
    pub rank: Rank,
    /// The user's directory.
    pub directory: PathBuf,
    /// Identity of the directory.
    pub run: RunId,
    /// The epoch in which this job owns the directory.
    pub epoch: u64,
    /// Which published checkpoints to keep.
    pub keep: Policy,
    /// Limit in bytes per second; 0 for none.
    pub bandwidth: u64,
    /// How checkpoints are published.
    pub target: Target,
}

impl Destination {
    /// Returns the mark for what a generation writes there.
    pub fn mark(&self, generation: Generation, restarts: u32) -> Mark {
        Mark { run: self.run, epoch: self.epoch, generation: generation.0, attempt: restarts.into() }
    }
}

fn free_bytes(path: &Path) -> u64 {
    rustix::fs::statvfs(path).map_or(0, |s| s.f_bavail * s.f_frsize)
}

fn reserve_in(directory: &Path, local_rank: u32, bytes: u64, slots: u32) -> std::io::Result<Vec<PathBuf>> {
    Directory::root(directory, Root::Named)?;
    let paths = slot_paths(directory, local_rank, slots);
    let held = |p: &PathBuf| std::fs::metadata(p).map_or(0, |m| m.len());
    let more: u64 = paths.iter().map(|p| bytes.saturating_sub(held(p))).sum();
    if more + HEADROOM_BYTES > free_bytes(directory) && more > 0 {
        return Err(std::io::ErrorKind::StorageFull.into());
    }
    let new: Vec<&PathBuf> = paths.iter().filter(|p| held(p) == 0).collect();
    let made = paths.iter().try_for_each(|path| Slot::reserve(path, bytes)?.populate());
    if made.is_err() {
        new.into_iter().for_each(|path| drop(private::remove(path)));
    }
    made.map(|()| paths)
}

/// Reserves a worker's slots: in shared memory if possible, otherwise in a directory on disk, with
/// a warning in the reply. Whatever memory holds stays there until [`release_memory`] removes it.
pub fn reserve(memory: &Path, spill: &Path, local_rank: u32, bytes: u64, slots: u32) -> Reply {
    let texts = |paths: Vec<PathBuf>| paths.into_iter().map(|p| to_text(&p)).collect();
    let need = (bytes * u64::from(slots)) >> 20;
    match reserve_in(memory, local_rank, bytes, slots) {
        Ok(paths) => Reply::Slots { paths: texts(paths), warning: None },
        Err(short) => {
            let shm = paths::memory();
            let free = free_bytes(shm.parent().unwrap_or(&shm)) >> 20;
            match reserve_in(spill, local_rank, bytes, slots) {
                Ok(paths) => {
                    let warning = format!(
                        "{need} MiB of checkpoint slots do not fit into shared memory ({free} MiB free: {short}); using {} on disk, which is slower; if this is a container, start it with a larger --shm-size",
                        spill.display()
                    );
                    Reply::Slots { paths: texts(paths), warning: Some(warning) }
                }
                Err(e) => Reply::Refused {
                    why: format!(
                        "{need} MiB of checkpoint slots fit neither into shared memory ({free} MiB free) nor into {} ({e}); free some space, or set EVERSTEP_SHM_DIR or EVERSTEP_STATE_DIR to a larger file system",
                        spill.display()
                    ),
                },
            }
        }
    }
}

/// Removes a worker's slots from memory after new ones were reserved on disk. Those in use stay,
/// and all of them stay until two newer steps are complete on disk: other ranks may not have the
/// newest. Returns whether none is left in memory.
pub fn release_memory(memory: &Path, spill: &Path, local_rank: u32) -> bool {
    let slots = |of: &Path| slot_paths(of, local_rank, SLOTS_LOOKED_AT).into_iter().filter(|p| p.exists());
    let sealed = |of: &Path| -> Vec<(u64, u64)> {
        let label = |p: PathBuf| Slot::open(&p).ok()?.label().map(|l| (l.generation, l.step));
        slots(of).filter_map(label).collect()
    };
    let newest = sealed(memory).into_iter().max();
    if newest.is_none() || sealed(spill).into_iter().filter(|s| Some(*s) > newest).count() >= 2 {
        let needed = |p: &PathBuf| Slot::open(p).is_ok_and(|s| s.in_use());
        slots(memory).filter(|p| !needed(p)).for_each(|p| drop(private::remove(&p)));
    }
    slots(memory).next().is_none()
}

/// Does so when the worker has sealed steps, until nothing is left or its crew is `over`.
pub fn release_memory_when_sealed(memory: &Path, spill: &Path, local_rank: u32, over: &AtomicBool) {
    // Without a board, the slots stay until the job ends.
    let Ok(board) = Board::open(&board_path(memory, local_rank)) else { return };
    let mut seen = 0;
    while !over.load(Ordering::Acquire) && !release_memory(memory, spill, local_rank) {
        seen = board.await_sealed(seen, LOOK);
    }
}

/// Returns a slot of a worker that may be overwritten, of at least `need` bytes: an empty one if
/// possible, otherwise the oldest. A slot with `step`, which is being restored, is not free: it
/// belongs to another rank now, which fetches it from here. The directories in which the worker has
/// slots are tried in their order: those in memory stay for a while after the worker has got others
/// on disk. A worker without slots gets one in the first directory, which is memory.
///
/// # Errors
/// `ResourceBusy` if all slots are needed, and those of making room.
pub fn free_slot(
    directories: &[PathBuf],
    local_rank: u32,
    need: u64,
    slots: u32,
    step: u64,
) -> std::io::Result<(PathBuf, Slot)> {
    let has_any = |d: &&PathBuf| slot_paths(d, local_rank, slots).iter().any(|p| p.exists());
    let mut with_slots: Vec<&PathBuf> = directories.iter().filter(has_any).collect();
    if with_slots.is_empty() {
        with_slots.extend(directories.first());
    }
    let mut found = Err(ErrorKind::NotFound.into());
    for directory in with_slots {
        found = free_slot_in(directory, local_rank, need, slots, step);
        let may_be_elsewhere = |e: &Error| matches!(e.kind(), ErrorKind::StorageFull | ErrorKind::ResourceBusy);
        if !found.as_ref().is_err_and(may_be_elsewhere) {
            break;
        }
    }
    found
}

fn free_slot_in(
    directory: &Path,
    local_rank: u32,
    need: u64,
    slots: u32,
    step: u64,
) -> std::io::Result<(PathBuf, Slot)> {
    let candidates = slot_paths(directory, local_rank, slots).into_iter().map(|path| {
        let slot = Slot::open(&path).ok();
        let in_use = slot.as_ref().is_some_and(Slot::in_use);
        let label = slot.and_then(|s| s.label());
        let needed = in_use || label.is_some_and(|l| l.step == step);
        Candidate { slot: path, holds: label.map(|l| (l.generation, l.step)), needed }
    });
    let path = reusable(candidates).ok_or(ErrorKind::ResourceBusy)?;
    let more = need.saturating_sub(std::fs::metadata(&path).map_or(0, |m| m.len()));
    if more > 0 && more + HEADROOM_BYTES > free_bytes(directory) {
        return Err(ErrorKind::StorageFull.into());
    }
    let slot = Slot::reserve(&path, need)?;
    if more > 0 {
        slot.populate()?;
    }
    Ok((path, slot))
}

/// Releases a slot that was pinned for durable storage, once it is written or never will be.
pub fn release(path: &Path) {
    if let Ok(slot) = Slot::open(path) {
        slot.release(Pin::Persist);
    }
}

/// Why a shard is not on durable storage.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    #[error("cannot open {}: {source}", path.display())]
    Slot { path: PathBuf, source: Error },
    #[error("step {step} of rank {rank} could not be written to {}: {source}; earlier checkpoints are kept", directory.display())]
    Unwritten { step: u64, rank: Rank, directory: PathBuf, source: Error },
}

/// Writes one slot to durable storage.
///
/// # Errors
/// [`ShardError`].
pub fn write_shard(path: &Path, to: &Destination, mark: &Mark, step: u64) -> Result<ShardFile, ShardError> {
    let slot = Slot::open(path).map_err(|source| ShardError::Slot { path: path.into(), source })?;
    let slot = Arc::new(slot);
    let throttle = Throttle::new(to.bandwidth);
    let written = persist::write_shard(&slot, &to.directory, mark, step, to.rank, &throttle);
    written.map_err(|source| ShardError::Unwritten { step, rank: to.rank, directory: to.directory.clone(), source })
}

/// Like [`write_shard`], for a shard that is not written because of `source`.
pub fn refuse_shard(to: &Destination, step: u64, source: Error) -> Result<ShardFile, ShardError> {
    Err(ShardError::Unwritten { step, rank: to.rank, directory: to.directory.clone(), source })
}

/// Returns whether workers of this node have left slots behind.
pub fn holds_slots(job: &str, node: &str) -> bool {
    let directories = [paths::node_memory(job, node), paths::node_spill(job, node)];
    let directories = directories.iter().filter_map(|d| Directory::existing(d, Root::Named).ok());
    let mut names = directories.flat_map(|d| d.names().unwrap_or_default());
    names.any(|(name, _)| name.to_string_lossy().contains("-slot-"))
}

/// Removes a node's boards and arenas.
pub fn discard(job: &str, node: &str) {
    if let Ok(memory) = Directory::existing(&paths::memory(), Root::Named) {
        let _ = memory.below(job).and_then(|d| d.remove_tree(node));
        // Removed only if this was the job's last node on this machine.
        memory.remove_if_empty(job);
    }
    if let Ok(job) = Directory::existing(&paths::job(job), Root::Named) {
        let _ = job.below("arena").and_then(|d| d.remove_tree(node));
    }
}

#[cfg(test)]
mod tests {
    use super::super::own_slots::Own;
    use super::super::replicas::Replicas;
    use super::*;
    use crate::listening::Place;
    use everstep_checkpoint::arena::{Label, slot_bytes};
    use everstep_core::message::Purpose;

    /// Makes a slot that holds nothing but a step.
    fn sealed(path: &Path, step: u64) -> Arc<Slot> {
        let slot = Arc::new(Slot::reserve(path, slot_bytes(4096, 4096)).expect("room"));
        // SAFETY: nobody else uses the slot.
        let writing = unsafe { slot.begin() }.expect("it is not in use");
        let purpose = Purpose::Recovery;
        let label = Label { run: 1, rank: 0, world_size: 1, generation: 1, step, purpose, shared: false };
        writing.describe(label, b"{}", 0).expect("it fits");
        writing.seal(None);
        slot
    }

    #[test]
    fn an_agent_that_starts_forgets_who_read_slots_before() {
        let node = tempfile::tempdir().expect("a directory");
        let slot = sealed(&node.path().join("local-0-slot-1"), 7);
        // SAFETY: nobody else uses the slot.
        let begins = |slot: &Arc<Slot>| unsafe { slot.begin() };
        assert!(slot.pin(Pin::Persist));
        std::mem::forget(slot.read().expect("it is sealed"));
        slot.release(Pin::Persist);
        assert!(begins(&slot).is_none(), "a dead agent seems to read it");
        assert!(slot.pin(Pin::Persist));
        let place = Place::at("127.0.0.1", false).expect("loopback");
        // SAFETY: nobody else uses the directory.
        let _started = unsafe { Replicas::start(&place, "job", vec![node.path().into()]) }.expect("a port");
        assert!(slot.pinned_for(Pin::Persist), "it is still to be written");
        slot.release(Pin::Persist);
        assert!(begins(&slot).is_some(), "nobody reads it");
    }

    #[test]
    fn slots_in_memory_stay_until_two_steps_are_on_disk_and_nobody_needs_them() {
        let (memory, spill) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let paths = slot_paths(memory.path(), 0, 3);
        let kept = sealed(&paths[0], 1);
        sealed(&paths[1], 2);
        assert!(kept.pin(Pin::Persist));
        let there = || paths.iter().map(|p| p.is_file()).collect::<Vec<_>>();

        // Nothing has room for slots of this size.
        let reply = reserve(memory.path(), spill.path(), 0, 1 << 50, 3);
        assert!(matches!(reply, Reply::Refused { .. }), "{reply:?}");
        assert_eq!(there(), [true, true, false]);

        // Memory takes no third slot.
        std::fs::create_dir(&paths[2]).expect("it is free");
        let reply = reserve(memory.path(), spill.path(), 0, slot_bytes(8192, 4096), 3);
        std::fs::remove_dir(&paths[2]).expect("it is empty");
        assert!(matches!(reply, Reply::Slots { warning: Some(_), .. }), "{reply:?}");
        assert_eq!(there(), [true, true, false]);
        let slots = Own::of(vec![memory.path().into(), spill.path().into()]).slots(0);
        let steps: Vec<u64> = slots.iter().filter_map(|s| s.label()).map(|l| l.step).collect();
        assert_eq!(steps, [1, 2]);

        let on_disk = slot_paths(spill.path(), 0, 3);
        let release = || release_memory(memory.path(), spill.path(), 0);
        sealed(&on_disk[0], 3);
        assert!(!release());
        assert_eq!(there(), [true, true, false], "other ranks may not have step 3");
        sealed(&on_disk[1], 4);
        assert!(!release());
        assert_eq!(there(), [true, false, false], "step 1 is still to be written");
        kept.release(Pin::Persist);
        assert!(release());
        assert_eq!(there(), [false; 3]);
    }

    #[test]
    fn a_slot_that_is_read_in_place_is_not_free_whatever_its_pins() {
        let node = tempfile::tempdir().expect("a directory");
        let directories = [node.path().to_owned()];
        let slots: Vec<Arc<Slot>> =
            (1..).zip(slot_paths(node.path(), 0, 3)).map(|(step, path)| sealed(&path, step)).collect();
        let free = || free_slot(&directories, 0, 4096, 3, 9).map(|(path, _)| path);
        let mut readers = Vec::new();
        for slot in &slots {
            assert_eq!(free().expect("it is the oldest that is not read"), slot.path());
            assert!(slot.pin(Pin::Replicate));
            readers.extend(slot.read());
            slot.release(Pin::Replicate);
        }
        assert_eq!(free().expect_err("all are read").kind(), std::io::ErrorKind::ResourceBusy);
        readers.pop();
        assert_eq!(free().expect("nobody reads the last one any more"), slots[2].path());
    }

    #[test]
    fn a_free_slot_on_disk_is_found_while_those_in_memory_are_needed() {
        let (memory, spill) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let paths = |of: &tempfile::TempDir| slot_paths(of.path(), 0, 2);
        let in_memory: Vec<_> = (7..).zip(paths(&memory)).map(|(step, path)| sealed(&path, step)).collect();
        let on_disk: Vec<_> = (5..).zip(paths(&spill)).map(|(step, path)| sealed(&path, step)).collect();
        let directories = [memory.path().to_owned(), spill.path().to_owned()];
        let free = || free_slot(&directories, 0, slot_bytes(4096, 4096), 2, 9).map(|(path, _)| path);
        assert_eq!(free().expect("one in memory is free"), in_memory[0].path());
        assert!(in_memory.iter().all(|slot| slot.pin(Pin::Replicate)));
        assert_eq!(free().expect("one on disk is free"), on_disk[0].path());
        assert!(on_disk.iter().all(|slot| slot.pin(Pin::Replicate)));
        assert_eq!(free().expect_err("all are needed").kind(), ErrorKind::ResourceBusy);
    }
}
