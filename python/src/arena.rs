//! Slots of one worker as Python sees them. Tensors are passed as (address, bytes); the Python half
//! keeps them alive.

use crate::error::{capture as capture_error, checkpoint};
use crate::layout::{PyEntry, PyLayout, tensors, value};
use crate::mark::PyMark;
use crate::shards::PyShard;
use crate::step_board::PyBoard;
use everstep_checkpoint::arena::{Label, Pin, REGION_AT, Slot, run_label};
use everstep_checkpoint::capture::{self, Capture, Described, Early, Filling, Plan};
use everstep_checkpoint::direct_io::Throttle;
use everstep_checkpoint::persist;
use everstep_checkpoint::slot_reuse::{Candidate, reusable};
use everstep_core::id::Rank;
use everstep_core::message::Purpose;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Interval between two checks for a slot's file. The files take turns: each is checked within half
/// a second, or at the first step after that.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// State of the checks for the files.
#[derive(Default)]
struct Looked {
    turn: usize,
    at: Option<Instant>,
    lost: bool,
}

/// Slots of one worker.
#[pyclass(name = "Arena", frozen)]
pub struct PyArena {
    slots: Vec<Arc<Slot>>,
    /// Inodes of the slots' files: another file under the same name is another slot.
    inodes: Vec<u64>,
    looked: Mutex<Looked>,
    label: Label,
    /// Whether all ranks have the same state, so that a slot of another rank can be used.
    any_rank: bool,
    running: Mutex<Option<Capture>>,
    filling: Mutex<Option<Filling>>,
    early: Mutex<Option<Early>>,
}

#[pymethods]
impl PyArena {
    #[new]
    #[pyo3(signature = (paths, run, rank, world_size, generation, any_rank=false))]
    fn open(
        paths: Vec<PathBuf>,
        run: &str,
        rank: u64,
        world_size: u64,
        generation: u64,
        any_rank: bool,
    ) -> PyResult<Self> {
        let slots = paths.iter().map(|p| Slot::open(p).map(Arc::new)).collect::<Result<_, _>>().map_err(checkpoint)?;
        let inode = |p: &PathBuf| std::fs::metadata(p).map(|m| m.ino());
        let inodes = paths.iter().map(inode).collect::<Result<_, _>>().map_err(checkpoint)?;
        let purpose = Purpose::Recovery;
        let label = Label { run: run_label(run), rank, world_size, generation, step: 0, purpose, shared: any_rank };
        Ok(PyArena {
            slots,
            inodes,
            looked: Mutex::default(),
            label,
            any_rank,
            running: Mutex::new(None),
            filling: Mutex::new(None),
            early: Mutex::new(None),
        })
    }

    /// Reports whether a slot's file was removed, so that steps captured from now on could not be
    /// found. Checks one file, in turn, for each [`LOOK_EVERY`] that has passed, or all files if
    /// `all`: in a step of a small state, one check costs as much as copying 100 kB.
    fn lost(&self, all: bool) -> bool {
        let Ok(mut looked) = self.looked.lock() else { return false };
        let passed = looked.at.map_or(u128::MAX, |at| at.elapsed().as_millis() / LOOK_EVERY.as_millis());
        let files =
            if all { self.slots.len() } else { self.slots.len().min(usize::try_from(passed).unwrap_or(usize::MAX)) };
        if looked.lost || files == 0 {
            return looked.lost;
        }
        let there = |i: usize| {
            let (Some(slot), Some(inode)) = (self.slots.get(i), self.inodes.get(i)) else { return true };
            std::fs::metadata(slot.path()).is_ok_and(|m| m.ino() == *inode)
        };
        looked.lost = !(looked.turn..looked.turn + files).all(|turn| there(turn % self.slots.len()));
        looked.turn = (looked.turn + files) % self.slots.len();
        looked.at = Some(Instant::now());
        looked.lost
    }

    /// Maps all pages now, so that the first captures do not cause page faults. Returns the address
    /// and the length in bytes of each slot's memory for tensors and index.
    fn populate(&self, py: Python<'_>) -> PyResult<Vec<(usize, usize)>> {
        py.detach(|| self.slots.iter().for_each(|s| drop(s.populate())));
        let place = |slot: &Arc<Slot>| {
            let bytes = slot.bytes().saturating_sub(REGION_AT);
            slot.region_address(bytes).map(|at| (at, bytes))
        };
        self.slots.iter().map(place).collect::<Result<_, _>>().map_err(checkpoint)
    }

    /// Returns the steps that this rank could restore, with the generations that captured them,
    /// newest first. Labels and indexes are verified now, the bytes when they are read.
    fn held(&self, py: Python<'_>) -> Vec<(u64, u64)> {
        py.detach(|| {
            let label = |s: &Arc<Slot>| s.inspect().ok().map(|(l, _)| l).filter(|l| self.fits(l));
            let mut held: Vec<(u64, u64)> =
                self.slots.iter().filter_map(label).map(|l| (l.step, l.generation)).collect();
            held.sort_unstable_by(|a, b| b.cmp(a));
            held.dedup_by_key(|(step, _)| *step);
            held
        })
    }

    /// Returns the newest step in these slots that belongs to another directory's checkpoints, and
    /// is not used.
    fn foreign(&self) -> Option<u64> {
        let labels = self.slots.iter().filter_map(|s| s.label());
        labels.filter(|l| l.run != self.label.run).map(|l| l.step).max()
    }

    /// Opens the slot with `step`.
    fn shard(&self, step: u64) -> PyResult<PyShard> {
        let slot = self.holding(step).ok_or_else(|| checkpoint(format!("step {step} is not in memory any more")))?;
        PyShard::of_own(slot.clone())
    }

    /// Starts to capture a step. Returns False when every slot is in use (the step is then
    /// skipped). `blobs` follow the tensors of `layout`. With `persist`, the step goes to durable
    /// storage: 0 for recovery from failures, 1 for an epoch's end, 2 for the user. With
    /// `background`, the copy may continue while training does; with `compare`, it must then equal
    /// the state at the time of this call.
    #[allow(clippy::too_many_arguments)]
    fn capture(
        &self,
        py: Python<'_>,
        step: u64,
        layout: &PyLayout,
        blobs: Vec<(String, PyBackedBytes)>,
        persist: Option<u64>,
        threads: usize,
        board: Option<&PyBoard>,
        background: bool,
        compare: bool,
    ) -> PyResult<bool> {
        self.wait(py)?;
        let (tensors, sources) = layout.with(&blobs).map_err(checkpoint)?;
        let label = self.label_of(step, persist);
        let board = board.map(|b| b.board.clone());
        let started = self.in_free_slot(|slot| {
            let (tensors, sources, persist) = (tensors.clone(), sources.clone(), persist.is_some());
            let plan = Plan { tensors, sources, label, persist, threads, background, compare };
            // SAFETY: the Python half keeps the tensors alive until `wait`; blobs are copied before
            // `start` returns. Only this worker writes its slots now, one capture at a time.
            py.detach(|| unsafe { capture::start(slot, plan, board.clone()) })
        })?;
        let Some(started) = started else { return Ok(false) };
        if let Ok(mut running) = self.running.lock() {
            *running = Some(started).filter(|c| !c.is_done());
        }
        Ok(true)
    }

    /// Lets another thread begin to copy the tensors of `layout` while the values behind them are
    /// collected. Returns False when every slot is in use. Ends with [`PyArena::finish`] or
    /// [`PyArena::cancel`]; the tensors must not change until then.
    fn start(&self, py: Python<'_>, step: u64, layout: &PyLayout, persist: Option<u64>) -> PyResult<bool> {
        self.wait(py)?;
        let label = self.label_of(step, persist);
        // SAFETY: the Python half keeps the tensors alive until `finish` or `cancel`. Only this
        // worker writes its slots now, one capture at a time.
        let begin = |slot| unsafe {
            let (tensors, sources) = layout.tensors();
            Early::begin(slot, tensors, sources, label, persist.is_some())
        };
        let Some(early) = self.in_free_slot(begin)? else { return Ok(false) };
        if let Ok(mut waiting) = self.early.lock() {
            *waiting = Some(early);
        }
        Ok(true)
    }

    /// Completes a capture that [`PyArena::start`] has begun, with `blobs` behind the tensors.
    /// Returns False if they do not fit into the slot.
    fn finish(&self, py: Python<'_>, blobs: Vec<(String, PyBackedBytes)>, board: Option<&PyBoard>) -> PyResult<bool> {
        let early = self.early.lock().ok().and_then(|mut e| e.take());
        let board = board.map(|b| b.board.clone());
        let values: Vec<_> = blobs.iter().map(|(name, bytes)| (value(name, bytes), &bytes[..])).collect();
        match py.detach(|| early.map_or(Ok(()), |e| e.finish(values, board.as_deref()))) {
            Err(e) if e.kind() == std::io::ErrorKind::StorageFull => Ok(false),
            done => done.map(|()| true).map_err(checkpoint),
        }
    }

    /// Abandons a capture that [`PyArena::start`] has begun.
    fn cancel(&self, py: Python<'_>) {
        let early = self.early.lock().ok().and_then(|mut e| e.take());
        py.detach(|| drop(early));
    }

    /// Takes a slot for a device to fill. Returns the address of the first tensor and the bytes of
    /// all tensors, or `None` when every slot is in use. Ranks with the same state have the first
    /// `alike` bytes in common. Ends with [`PyArena::seal`].
    fn begin(
        &self,
        step: u64,
        entries: Vec<PyEntry>,
        persist: Option<u64>,
        alike: usize,
    ) -> PyResult<Option<(usize, usize)>> {
        let tensors = Described::of(&tensors(entries)).map_err(checkpoint)?;
        let label = self.label_of(step, persist);
        // SAFETY: only this worker writes its slots now, one capture at a time.
        let begin = |slot| unsafe { Filling::begin(slot, tensors.clone(), label, persist.is_some(), alike) };
        let Some(filling) = self.in_free_slot(begin)? else { return Ok(None) };
        let place = filling.place().map_err(checkpoint)?;
        if let Ok(mut waiting) = self.filling.lock() {
            *waiting = Some(filling);
        }
        Ok(Some(place))
    }

    /// Seals the slot that [`PyArena::begin`] has returned, once it is filled.
    fn seal(&self, py: Python<'_>, threads: usize, board: Option<&PyBoard>) -> PyResult<()> {
        let filling = self.filling.lock().ok().and_then(|mut f| f.take());
        let board = board.map(|b| b.board.clone());
        py.detach(|| filling.map_or(Ok(()), |f| f.seal(threads, board.as_deref()))).map_err(checkpoint)
    }

    /// Waits for the capture in progress, if any: the fence.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let running = self.running.lock().ok().and_then(|mut r| r.take());
        match running {
            Some(mut capture) => py.detach(|| capture.wait()).map_err(capture_error),
            None => Ok(()),
        }
    }

    /// Writes the slot with `step` as this rank's shard (without an agent).
    fn write_shard(&self, py: Python<'_>, directory: PathBuf, step: u64, mark: &PyMark) -> PyResult<String> {
        let slot = self.holding(step).ok_or_else(|| checkpoint(format!("there is no snapshot of step {step}")))?;
        let rank = Rank(u32::try_from(self.label.rank).map_err(checkpoint)?);
        let mark = &mark.mark;
        let shard = py.detach(|| persist::write_shard(slot, &directory, mark, step, rank, &Throttle::new(0)));
        slot.release(Pin::Persist);
        let shard = shard.map_err(|e| {
            checkpoint(format!(
                "cannot write the checkpoint to {}: {e}; earlier checkpoints are kept",
                directory.display()
            ))
        })?;
        serde_json::to_string(&shard).map_err(checkpoint)
    }
}

impl PyArena {
    fn label_of(&self, step: u64, persist: Option<u64>) -> Label {
        let purpose = match persist {
            Some(1) => Purpose::Epoch,
            Some(2) => Purpose::User,
            _ => Purpose::Recovery,
        };
        Label { step, purpose, ..self.label }
    }

    fn fits(&self, label: &Label) -> bool {
        let same = label.rank == self.label.rank && label.world_size == self.label.world_size;
        label.run == self.label.run && (same || self.any_rank)
    }

    /// Returns the slot with `step`; of several, that of the latest generation.
    fn holding(&self, step: u64) -> Option<&Arc<Slot>> {
        let label = |s: &Arc<Slot>| s.label().filter(|l| l.step == step && self.fits(l));
        let found = self.slots.iter().filter_map(|s| Some((label(s)?.generation, s)));
        found.max_by_key(|(generation, _)| *generation).map(|(_, s)| s)
    }

    /// Calls `begin` with a free slot; returns `None` when every slot is in use.
    fn in_free_slot<T>(&self, begin: impl Fn(Arc<Slot>) -> std::io::Result<T>) -> PyResult<Option<T>> {
        loop {
            let Some(slot) = self.free_slot() else { return Ok(None) };
            match begin(slot) {
                // The agent has pinned this slot, or begun to read it, in the meantime; another one
                // may still be free.
                Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy => {}
                begun => return begun.map(Some).map_err(checkpoint),
            }
        }
    }

    /// Returns a slot that is not in use: an empty one, otherwise the one with the oldest step, but
    /// never the newest (unless there is only one slot, whose step is on disk already).
    fn free_slot(&self) -> Option<Arc<Slot>> {
        let label = |s: &Arc<Slot>| s.label().filter(|l| self.fits(l)).map(|l| (l.generation, l.step));
        let all: Vec<_> = self.slots.iter().map(|s| (label(s), s)).collect();
        let newest = all.iter().filter_map(|(l, _)| *l).max();
        let only = self.slots.len() == 1;
        reusable(all.into_iter().map(|(holds, slot)| {
            let needed = slot.in_use() || (holds.is_some() && holds == newest && !only);
            Candidate { slot: Arc::clone(slot), holds, needed }
        }))
    }
}

/// Adds the class to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyArena>()
}
