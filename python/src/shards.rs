//! Slots and shard files as Python sees them. Tensors come and go as (address, bytes); the Python
//! half keeps them alive.

use crate::board::PyBoard;
use crate::error::checkpoint;
use everstep_checkpoint::arena::{Label, Slot, job_hash, slot_bytes};
use everstep_checkpoint::capture::{self, Capture, Plan, Source};
use everstep_checkpoint::format::shard::{Index, Tensor};
use everstep_checkpoint::persist;
use everstep_checkpoint::restore::Shard;
use everstep_core::id::Rank;
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// (name, dtype, shape, bytes)
type Entry = (String, String, Vec<u64>, u64);

fn tensors(entries: Vec<Entry>) -> Vec<Tensor> {
    entries.into_iter().map(|(name, dtype, shape, bytes)| Tensor { name, dtype, shape, bytes }).collect()
}

/// Slots of one worker.
#[pyclass(name = "Arena", frozen)]
pub struct PyArena {
    slots: Vec<Arc<Slot>>,
    label: Label,
    /// All ranks hold the same state: a slot of another rank will do.
    any_rank: bool,
    running: Mutex<Option<Capture>>,
}

#[pymethods]
impl PyArena {
    #[new]
    #[pyo3(signature = (paths, job, rank, world_size, generation, any_rank=false))]
    fn open(
        paths: Vec<PathBuf>,
        job: &str,
        rank: u64,
        world_size: u64,
        generation: u64,
        any_rank: bool,
    ) -> PyResult<Self> {
        let slots = paths.iter().map(|p| Slot::open(p).map(Arc::new)).collect::<Result<_, _>>().map_err(checkpoint)?;
        let label = Label { job: job_hash(job), rank, world_size, generation, step: 0 };
        Ok(PyArena { slots, label, any_rank, running: Mutex::new(None) })
    }

    /// Maps all pages now, so that the first captures do not pay for it.
    fn populate(&self, py: Python<'_>) {
        py.detach(|| self.slots.iter().for_each(|s| drop(s.map().populate())));
    }

    /// Steps that this rank could restore with the generations that captured them, newest first, all bytes verified.
    fn held(&self, py: Python<'_>) -> Vec<(u64, u64)> {
        py.detach(|| {
            let mut held: Vec<(u64, u64)> =
                self.slots.iter().filter_map(|s| self.mine(s)).map(|(held, _)| held).collect();
            held.sort_unstable_by(|a, b| b.cmp(a));
            held.dedup_by_key(|(step, _)| *step);
            held
        })
    }

    /// Opens the slot that holds `step`.
    fn shard(&self, py: Python<'_>, step: u64) -> PyResult<PyShard> {
        let generation = |s: &&Arc<Slot>| {
            s.inspect().ok().filter(|(l, _)| l.step == step && self.fits(l)).map(|(l, _)| l.generation)
        };
        let slot = self.slots.iter().filter(|s| generation(s).is_some()).max_by_key(generation);
        let slot = slot.ok_or_else(|| checkpoint(format!("step {step} is not in memory any more")))?;
        let (shard, _) = py.detach(|| Shard::from_slot(slot.clone())).map_err(checkpoint)?;
        Ok(PyShard { shard })
    }

    /// Starts to capture a step. Returns False when every slot is in use (the step is then skipped).
    /// `sources` are (address, bytes, eager) in the order of `entries`.
    #[allow(clippy::too_many_arguments)]
    fn capture(
        &self,
        py: Python<'_>,
        step: u64,
        entries: Vec<Entry>,
        sources: Vec<(usize, usize, bool)>,
        pin: bool,
        threads: usize,
        board: Option<&PyBoard>,
    ) -> PyResult<bool> {
        self.wait(py)?;
        let Some(slot) = self.free_slot() else { return Ok(false) };
        let sources = sources.into_iter().map(|(address, bytes, eager)| Source { address, bytes, eager }).collect();
        let label = Label { step, ..self.label };
        let plan = Plan { tensors: tensors(entries), sources, label, pin, threads };
        let board = board.map(|b| b.board.clone());
        // SAFETY: the Python half keeps the tensors alive and holds the next weight update back until `wait`.
        let started = py.detach(|| unsafe { capture::start(slot, plan, board) }).map_err(checkpoint)?;
        if let Ok(mut running) = self.running.lock() {
            *running = Some(started);
        }
        Ok(true)
    }

    /// Waits for the capture on its way, if any: the fence.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let running = self.running.lock().ok().and_then(|mut r| r.take());
        match running {
            Some(mut capture) => py.detach(|| capture.wait()).map_err(checkpoint),
            None => Ok(()),
        }
    }

    /// Writes the slot that holds `step` as this rank's shard (without an agent).
    fn write_shard(&self, py: Python<'_>, directory: PathBuf, step: u64) -> PyResult<String> {
        let generation = |s: &&Arc<Slot>| {
            s.inspect().ok().filter(|(l, _)| l.step == step && self.fits(l)).map(|(l, _)| l.generation)
        };
        let slot = self.slots.iter().filter(|s| generation(s).is_some()).max_by_key(generation);
        let slot = slot.ok_or_else(|| checkpoint(format!("step {step} was not captured")))?;
        let rank = Rank(u32::try_from(self.label.rank).map_err(checkpoint)?);
        let generation = self.label.generation;
        let shard = py.detach(|| persist::write_shard(slot, &directory, generation, step, rank));
        slot.pin(false);
        let shard = shard.map_err(|e| {
            checkpoint(format!(
                "cannot write the checkpoint to {}: {e}; the previous checkpoint stays",
                directory.display()
            ))
        })?;
        serde_json::to_string(&shard).map_err(checkpoint)
    }
}

impl PyArena {
    fn fits(&self, label: &Label) -> bool {
        let same = label.rank == self.label.rank && label.world_size == self.label.world_size;
        label.job == self.label.job && (same || self.any_rank)
    }

    fn mine(&self, slot: &Slot) -> Option<((u64, u64), Index)> {
        slot.inspect().ok().filter(|(l, _)| self.fits(l))?;
        let (label, index) = slot.verify().ok()?;
        Some(((label.step, label.generation), index))
    }

    /// An unpinned slot: an empty one, else the one with the oldest step, never the newest (unless
    /// there is only one: what it held is on disk already).
    fn free_slot(&self) -> Option<Arc<Slot>> {
        let label = |s: &Arc<Slot>| s.inspect().ok().filter(|(l, _)| self.fits(l)).map(|(l, _)| (l.generation, l.step));
        let newest = self.slots.iter().filter_map(label).max();
        let usable = self.slots.iter().filter(|s| !s.pinned());
        let mut usable: Vec<_> = usable
            .map(|s| (label(s), s))
            .filter(|(l, _)| l.is_none() || *l != newest || self.slots.len() == 1)
            .collect();
        usable.sort_by_key(|(l, _)| *l);
        usable.first().map(|(_, s)| Arc::clone(s))
    }
}

/// A verified shard.
#[pyclass(name = "Shard", frozen)]
pub struct PyShard {
    shard: Shard,
}

#[pymethods]
impl PyShard {
    /// Names, dtypes, shapes and lengths, in the order of the bytes.
    fn entries(&self) -> Vec<Entry> {
        let tensors = &self.shard.index().tensors;
        tensors.iter().map(|t| (t.name.clone(), t.dtype.clone(), t.shape.clone(), t.bytes)).collect()
    }

    /// Copies tensors to (name, address, bytes), interpreter released.
    fn copy_to(&self, py: Python<'_>, targets: Vec<(String, usize, usize)>) -> PyResult<()> {
        let places = self.shard.index().offsets();
        py.detach(|| {
            for (name, address, bytes) in &targets {
                let (offset, tensor) =
                    places.get(name.as_str()).ok_or_else(|| format!("{name} is not in the checkpoint"))?;
                if tensor.bytes != *bytes as u64 {
                    return Err(format!("{name} has {} bytes in the checkpoint, {bytes} in the model", tensor.bytes));
                }
                let from = self.shard.bytes(*offset, tensor.bytes).ok_or("tensor lies outside the shard")?;
                // SAFETY: the Python half passes a live, contiguous tensor of exactly this many bytes.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), *address as *mut u8, *bytes) };
            }
            Ok(())
        })
        .map_err(|e: String| checkpoint(e))
    }

    /// Bytes of one tensor.
    fn bytes(&self, name: &str) -> PyResult<Vec<u8>> {
        let places = self.shard.index().offsets();
        let (offset, tensor) =
            places.get(name).ok_or_else(|| checkpoint(format!("{name} is not in the checkpoint")))?;
        self.shard
            .bytes(*offset, tensor.bytes)
            .map(<[u8]>::to_vec)
            .ok_or_else(|| checkpoint("tensor lies outside the shard"))
    }
}

/// Makes a slot file without an agent.
#[pyfunction]
fn reserve_slot(path: PathBuf, bytes: u64) -> PyResult<()> {
    Slot::reserve(&path, bytes).map(drop).map_err(checkpoint)
}

/// Bytes that a slot needs.
#[pyfunction]
fn bytes_per_slot(region: u64, index: u64) -> u64 {
    slot_bytes(region, index)
}

/// One published checkpoint, see [`list_checkpoints`].
type Row = (u64, String, Option<u32>, Option<String>);

/// Published checkpoints, newest first: (step, directory, world size or None, what is wrong or None).
#[pyfunction]
fn list_checkpoints(directory: PathBuf) -> PyResult<Vec<Row>> {
    let found = persist::list(&directory)
        .map_err(|e| checkpoint(format!("cannot read the checkpoint directory {}: {e}", directory.display())))?;
    let row = |(step, path, manifest): (u64, PathBuf, Result<_, String>)| {
        let (size, wrong) = match manifest {
            Ok(everstep_checkpoint::format::manifest::Manifest { world_size, .. }) => (Some(world_size), None),
            Err(e) => (None, Some(e)),
        };
        (step, path.display().to_string(), size, wrong)
    };
    Ok(found.into_iter().map(row).collect())
}

/// Opens one rank's shard of a published checkpoint, all bytes verified.
#[pyfunction]
fn open_shard(py: Python<'_>, checkpoint_directory: PathBuf, rank: u32) -> PyResult<PyShard> {
    let manifest = persist::read_manifest(&checkpoint_directory).map_err(checkpoint)?;
    let entry = manifest.shards.iter().find(|s| s.rank == Rank(rank));
    let entry =
        entry.ok_or_else(|| checkpoint(format!("{} has no shard of rank {rank}", checkpoint_directory.display())))?;
    let shard = py.detach(|| Shard::from_file(&checkpoint_directory, entry)).map_err(checkpoint)?;
    Ok(PyShard { shard })
}

/// Makes a checkpoint visible (without an agent); shards as JSON from `write_shard`.
#[pyfunction]
fn publish(
    py: Python<'_>,
    directory: PathBuf,
    generation: u64,
    step: u64,
    shards: Vec<String>,
    keep: usize,
) -> PyResult<()> {
    let shards = shards.iter().map(|s| serde_json::from_str(s)).collect::<Result<Vec<_>, _>>().map_err(checkpoint)?;
    let done = py.detach(|| {
        persist::publish(&directory, generation, step, &shards)?;
        persist::prune(&directory, keep, generation)
    });
    done.map_err(|e| {
        checkpoint(format!(
            "cannot publish the checkpoint in {}: {e}; the previous checkpoint stays",
            directory.display()
        ))
    })
}

/// Adds classes and functions to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyArena>()?;
    m.add_class::<PyShard>()?;
    m.add_function(wrap_pyfunction!(reserve_slot, m)?)?;
    m.add_function(wrap_pyfunction!(bytes_per_slot, m)?)?;
    m.add_function(wrap_pyfunction!(list_checkpoints, m)?)?;
    m.add_function(wrap_pyfunction!(open_shard, m)?)?;
    m.add_function(wrap_pyfunction!(publish, m)?)
}
