//! Slots and shard files as Python sees them. Tensors come and go as (address, bytes); the Python
//! half keeps them alive.

use crate::board::PyBoard;
use crate::error::{capture as capture_error, checkpoint, damaged, restore};
use crate::layout::{Entry, PyLayout, tensors};
use crate::mark::PyMark;
use everstep_checkpoint::arena::{Label, Pin, Slot, run_label, slot_bytes};
use everstep_checkpoint::capture::{self, Capture, Described, Filling, Plan};
use everstep_checkpoint::direct::Throttle;
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::objects::is_url;
use everstep_checkpoint::persist;
use everstep_checkpoint::reshard::part::Part;
use everstep_checkpoint::reshard::plan::{Held, Run, Table};
use everstep_checkpoint::restore::{Readers, Shard, Target};
use everstep_checkpoint::retain::Policy;
use everstep_core::id::Rank;
use everstep_core::message::Purpose;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// (name, shape as stored, bytes of an element, offsets, sizes, address, bytes that there is room for)
type Block = (String, Vec<u64>, u64, Vec<u64>, Vec<u64>, usize, u64);

/// Slots of one worker.
#[pyclass(name = "Arena", frozen)]
pub struct PyArena {
    slots: Vec<Arc<Slot>>,
    /// Their files: another one under the same name is another slot.
    inodes: Vec<u64>,
    /// Calls of `lost`.
    looks: AtomicUsize,
    label: Label,
    /// All ranks hold the same state: a slot of another rank will do.
    any_rank: bool,
    running: Mutex<Option<Capture>>,
    filling: Mutex<Option<Filling>>,
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
            looks: AtomicUsize::new(0),
            label,
            any_rank,
            running: Mutex::new(None),
            filling: Mutex::new(None),
        })
    }

    /// Its files were removed: what it captures from now on, nobody finds. Looks at one file per call, in turn: they go
    /// together, and a look at each costs a small state's step as much as a copy of 100 kB.
    fn lost(&self) -> bool {
        let turn = self.looks.fetch_add(1, Ordering::Relaxed) % self.slots.len().max(1);
        let mut one = self.slots.iter().zip(&self.inodes).skip(turn).take(1);
        !one.all(|(slot, inode)| std::fs::metadata(slot.path()).is_ok_and(|m| m.ino() == *inode))
    }

    /// Maps all pages now, so that the first captures do not pay for it.
    fn populate(&self, py: Python<'_>) {
        py.detach(|| self.slots.iter().for_each(|s| drop(s.map().populate())));
    }

    /// Steps that this rank could restore with the generations that captured them, newest first. Labels and indexes are
    /// verified; the bytes are when they are read.
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

    /// Newest step in these slots that belongs to another directory's checkpoints, which is not used.
    fn foreign(&self) -> Option<u64> {
        let labels = self.slots.iter().filter_map(|s| s.label());
        labels.filter(|l| l.run != self.label.run).map(|l| l.step).max()
    }

    /// Opens the slot that holds `step`.
    fn shard(&self, step: u64) -> PyResult<PyShard> {
        let slot = self.holding(step).ok_or_else(|| checkpoint(format!("step {step} is not in memory any more")))?;
        PyShard::of(slot.clone())
    }

    /// Starts to capture a step. Returns False when every slot is in use (the step is then skipped).
    /// `blobs` come behind the tensors of `layout`. `persist`: it goes to durable storage; 0 to come back from failures, 1 for
    /// an epoch's end, 2 for the user. In the background, training goes first; `compare`: what is copied then must be what it
    /// was now.
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
        let started = loop {
            let Some(slot) = self.free_slot() else { return Ok(false) };
            let (tensors, sources, persist) = (tensors.clone(), sources.clone(), persist.is_some());
            let plan = Plan { tensors, sources, label, persist, threads, background, compare };
            // SAFETY: the Python half keeps the tensors alive until `wait`; blobs are copied before `start` returns.
            match py.detach(|| unsafe { capture::start(slot, plan, board.clone()) }) {
                // The agent has just pinned it: it is not free any more, and another one may be.
                Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy => {}
                started => break started.map_err(checkpoint)?,
            }
        };
        if let Ok(mut running) = self.running.lock() {
            *running = Some(started).filter(|c| !c.is_done());
        }
        Ok(true)
    }

    /// Takes a slot that a device fills: where its first tensor belongs, and the bytes of all; `None` when every slot is
    /// in use. The first `alike` bytes are what ranks with the same state have in common. Ends with [`PyArena::seal`].
    fn begin(
        &self,
        step: u64,
        entries: Vec<Entry>,
        persist: Option<u64>,
        alike: usize,
    ) -> PyResult<Option<(usize, usize)>> {
        let tensors = Described::of(&tensors(entries)).map_err(checkpoint)?;
        let label = self.label_of(step, persist);
        let filling = loop {
            let Some(slot) = self.free_slot() else { return Ok(None) };
            match Filling::begin(slot, tensors.clone(), label, persist.is_some(), alike) {
                Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy => {}
                begun => break begun.map_err(checkpoint)?,
            }
        };
        let place = filling.place().map_err(checkpoint)?;
        if let Ok(mut waiting) = self.filling.lock() {
            *waiting = Some(filling);
        }
        Ok(Some(place))
    }

    /// What [`PyArena::begin`] has given out is filled.
    fn seal(&self, py: Python<'_>, threads: usize, board: Option<&PyBoard>) -> PyResult<()> {
        let filling = self.filling.lock().ok().and_then(|mut f| f.take());
        let board = board.map(|b| b.board.clone());
        py.detach(|| filling.map_or(Ok(()), |f| f.seal(threads, board.as_deref()))).map_err(checkpoint)
    }

    /// Waits for the capture on its way, if any: the fence.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let running = self.running.lock().ok().and_then(|mut r| r.take());
        match running {
            Some(mut capture) => py.detach(|| capture.wait()).map_err(capture_error),
            None => Ok(()),
        }
    }

    /// Writes the slot that holds `step` as this rank's shard (without an agent).
    fn write_shard(&self, py: Python<'_>, directory: PathBuf, step: u64, mark: &PyMark) -> PyResult<String> {
        let slot = self.holding(step).ok_or_else(|| checkpoint(format!("step {step} was not captured")))?;
        let rank = Rank(u32::try_from(self.label.rank).map_err(checkpoint)?);
        let mark = &mark.mark;
        let shard = py.detach(|| persist::write_shard(slot, &directory, mark, step, rank, &Throttle::new(0)));
        slot.release(Pin::Persist);
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

    /// The slot with `step`; of several, that of the latest generation.
    fn holding(&self, step: u64) -> Option<&Arc<Slot>> {
        let label = |s: &Arc<Slot>| s.label().filter(|l| l.step == step && self.fits(l));
        let found = self.slots.iter().filter_map(|s| Some((label(s)?.generation, s)));
        found.max_by_key(|(generation, _)| *generation).map(|(_, s)| s)
    }

    /// An unpinned slot: an empty one, else the one with the oldest step, never the newest (unless
    /// there is only one: what it held is on disk already).
    fn free_slot(&self) -> Option<Arc<Slot>> {
        let label = |s: &Arc<Slot>| s.label().filter(|l| self.fits(l)).map(|l| (l.generation, l.step));
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

/// A shard; every chunk is verified when it is read.
#[pyclass(name = "Shard", frozen)]
pub struct PyShard {
    shard: Shard,
}

impl From<Shard> for PyShard {
    fn from(shard: Shard) -> Self {
        PyShard { shard }
    }
}

impl PyShard {
    fn of(slot: Arc<Slot>) -> PyResult<Self> {
        Ok(Shard::from_slot(slot).map_err(checkpoint)?.0.into())
    }
}

#[pymethods]
impl PyShard {
    /// The file that it is in.
    #[getter]
    fn path(&self) -> &str {
        self.shard.path()
    }

    /// Names, dtypes, shapes and lengths, in the order of the bytes.
    fn entries(&self) -> Vec<Entry> {
        let tensors = self.shard.index().tensors();
        tensors.iter().map(|t| (t.name.clone(), t.dtype.clone(), t.shape.clone(), t.bytes)).collect()
    }

    /// Where its tensors belong, as its header says: the numbers of `everstep.placed.Parts`.
    fn places(&self) -> Option<Vec<u64>> {
        self.shard.places().map(|p| p.words().to_vec())
    }

    /// Copies tensors to (name, address, bytes) in one pass over the whole shard, interpreter released. With
    /// `verify=False` the bytes are taken as they are.
    #[pyo3(signature = (targets, threads=2, verify=true))]
    fn copy_to(
        &self,
        py: Python<'_>,
        targets: Vec<(String, usize, usize)>,
        threads: usize,
        verify: bool,
    ) -> PyResult<()> {
        let targets = self.shard.targets(&targets).map_err(damaged)?;
        // SAFETY: the Python half passes live, contiguous tensors of exactly these lengths.
        py.detach(|| unsafe { self.shard.load(&targets, threads, verify) }).map_err(restore)
    }

    /// Copies blocks of tensors to contiguous memory, interpreter released: (name, shape as stored, bytes of an element,
    /// offsets, sizes, address, room) each. Only chunks that hold some of them are read, and verified.
    fn read_blocks(&self, py: Python<'_>, blocks: Vec<Block>, threads: usize) -> PyResult<()> {
        let places = self.shard.index().offsets();
        let (mut targets, mut largest) = (Vec::new(), 0);
        for (name, shape, element, offsets, sizes, address, room) in blocks {
            let (at, tensor) = places
                .get(name.as_str())
                .ok_or_else(|| checkpoint(format!("{name} is not in {}", self.shard.path())))?;
            let part = Part::whole(&shape);
            if part.elements().and_then(|n| n.checked_mul(element)) != Some(tensor.bytes) {
                return Err(checkpoint(format!(
                    "{name} has {} bytes, which are no {shape:?} of {element}",
                    tensor.bytes
                )));
            }
            let held = vec![Held::new(0, *at, part)];
            let asked = Part::Block { offsets: offsets.into(), sizes: sizes.into() };
            let bytes = asked.elements().and_then(|n| n.checked_mul(element)).unwrap_or(u64::MAX);
            if bytes != room {
                return Err(damaged(format!("{name}: {bytes} bytes of the checkpoint are to be read into {room}")));
            }
            largest = largest.max(bytes);
            let runs = Table::new(&shape, element, held).and_then(|t| t.plan(&asked));
            let runs = runs.map_err(|e| checkpoint(format!("{name}: {e}")))?;
            let target = |r: Run| Target { offset: r.at, bytes: r.bytes, address: address + r.into as usize };
            targets.extend(runs.into_iter().map(target));
        }
        // SAFETY: the Python half passes live, contiguous memory of exactly these sizes.
        py.detach(|| unsafe { self.shard.load_parts(&targets, Readers::within(threads, largest)) }).map_err(restore)
    }

    /// Verifies every byte.
    #[pyo3(signature = (threads=2))]
    fn verify(&self, py: Python<'_>, threads: usize) -> PyResult<()> {
        py.detach(|| self.shard.verify(threads)).map_err(restore)
    }

    /// Bytes of one tensor.
    fn bytes(&self, py: Python<'_>, name: &str) -> PyResult<Vec<u8>> {
        bytes_of(py, &self.shard, name)
    }
}

/// Bytes of one tensor of a shard.
pub fn bytes_of(py: Python<'_>, shard: &Shard, name: &str) -> PyResult<Vec<u8>> {
    let places = shard.index().offsets();
    let (offset, tensor) = places.get(name).ok_or_else(|| checkpoint(format!("{name} is not in the checkpoint")))?;
    py.detach(|| shard.fetch(*offset, tensor.bytes)).map_err(restore)
}

/// Opens a slot by its file.
#[pyfunction]
fn open_slot(path: PathBuf) -> PyResult<PyShard> {
    PyShard::of(Arc::new(Slot::open(&path).map_err(checkpoint)?))
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

/// Opens one rank's shard of a published checkpoint, its header verified.
#[pyfunction]
fn open_shard(py: Python<'_>, checkpoint_directory: PathBuf, rank: u32) -> PyResult<PyShard> {
    let manifest = py.detach(|| persist::read_manifest(&checkpoint_directory)).map_err(checkpoint)?;
    let entry = manifest.shards.iter().find(|s| s.rank == Rank(rank));
    let entry =
        entry.ok_or_else(|| checkpoint(format!("{} has no shard of rank {rank}", checkpoint_directory.display())))?;
    let shard = py.detach(|| Shard::from_file(&checkpoint_directory, entry)).map_err(restore)?;
    Ok(shard.into())
}

/// Makes a checkpoint visible (without an agent); shards as JSON from `write_shard`; kept are
/// so many of the newest, the first of every so many seconds (0: none), and those of epochs.
#[pyfunction]
fn publish(
    py: Python<'_>,
    directory: PathBuf,
    mark: &PyMark,
    step: u64,
    shards: Vec<String>,
    keep: (usize, u64, bool),
    exactly: bool,
) -> PyResult<String> {
    let shards = shards.iter().map(|s| serde_json::from_str(s)).collect::<Result<Vec<_>, _>>().map_err(checkpoint)?;
    let mark = &mark.mark;
    let done = py.detach(|| {
        let to = persist::publish(&directory, mark, step, &shards, to(exactly))?;
        pruned(&directory, mark, keep).map(|()| to.display().to_string())
    });
    done.map_err(|e| unpublished(&directory, &e))
}

/// As `publish`, of what all ranks have noted with `note_shard`; also says why older ones could not be deleted.
#[pyfunction]
fn publish_noted(
    py: Python<'_>,
    directory: PathBuf,
    mark: &PyMark,
    step: u64,
    world_size: u32,
    keep: (usize, u64, bool),
) -> PyResult<(String, Option<String>)> {
    let mark = &mark.mark;
    let done = py.detach(|| {
        let to = persist::publish_noted(&directory, mark, step, world_size, persist::Target::Branch)?;
        // What is published is durable, whatever becomes of older ones.
        Ok((to.display().to_string(), pruned(&directory, mark, keep).err().map(|e| e.to_string())))
    });
    done.map_err(|e| unpublished(&directory, &e))
}

fn pruned(directory: &Path, mark: &Mark, (last, every, epochs): (usize, u64, bool)) -> std::io::Result<()> {
    let every = (every > 0).then(|| Duration::from_secs(every));
    persist::prune(directory, Policy { last, every, epochs, abandoned: false }, mark).map(drop)
}

fn to(exactly: bool) -> persist::Target {
    if exactly { persist::Target::Exactly } else { persist::Target::Branch }
}

fn unpublished(directory: &Path, e: &std::io::Error) -> PyErr {
    checkpoint(format!("cannot publish the checkpoint in {}: {e}; the previous checkpoint stays", directory.display()))
}

/// Raises unless checkpoints can be kept there (of directories it says nothing).
#[pyfunction]
fn reach(py: Python<'_>, directory: PathBuf) -> PyResult<()> {
    py.detach(|| persist::reach(&directory))
        .map_err(|e| checkpoint(format!("cannot keep checkpoints in {}: {e}", directory.display())))
}

/// Writes down a shard, as JSON from `write_shard`, for whoever publishes.
#[pyfunction]
fn note_shard(py: Python<'_>, directory: PathBuf, mark: &PyMark, step: u64, shard: &str) -> PyResult<()> {
    let mark = &mark.mark;
    let shard = serde_json::from_str(shard).map_err(checkpoint)?;
    let done = py.detach(|| persist::note(&directory, mark, step, &shard));
    done.map_err(|e| checkpoint(format!("cannot write to {}: {e}; the previous checkpoint stays", directory.display())))
}

/// A small file beside the checkpoints; `None` when there is none.
#[pyfunction]
fn recall(py: Python<'_>, directory: PathBuf, name: &str) -> PyResult<Option<Vec<u8>>> {
    let found = py.detach(|| persist::recall(&directory, name));
    found.map_err(|e| checkpoint(format!("cannot read {name} in {}: {e}", directory.display())))
}

/// Writes it; where that takes a while, only `wait` waits, and hears of errors.
#[pyfunction]
fn remember(py: Python<'_>, directory: PathBuf, name: String, bytes: Vec<u8>, wait: bool) -> PyResult<()> {
    if is_url(&directory) && !wait {
        let write = move || drop(persist::remember(&directory, &name, bytes));
        // Without a thread it is left for the next time.
        let _ = std::thread::Builder::new().name("everstep-remember".into()).spawn(write);
        return Ok(());
    }
    let done = py.detach(|| persist::remember(&directory, &name, bytes));
    done.map_err(|e| checkpoint(format!("cannot write {name} in {}: {e}", directory.display())))
}

/// Adds classes and functions to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyArena>()?;
    m.add_class::<PyShard>()?;
    m.add_function(wrap_pyfunction!(reserve_slot, m)?)?;
    m.add_function(wrap_pyfunction!(bytes_per_slot, m)?)?;
    m.add_function(wrap_pyfunction!(open_shard, m)?)?;
    m.add_function(wrap_pyfunction!(open_slot, m)?)?;
    m.add_function(wrap_pyfunction!(reach, m)?)?;
    m.add_function(wrap_pyfunction!(note_shard, m)?)?;
    m.add_function(wrap_pyfunction!(recall, m)?)?;
    m.add_function(wrap_pyfunction!(remember, m)?)?;
    m.add_function(wrap_pyfunction!(publish_noted, m)?)?;
    m.add_function(wrap_pyfunction!(publish, m)?)
}
