//! Shards in slots and in files, for Python. Tensors are passed as addresses and lengths; the
//! Python half keeps them alive.

use crate::error::{checkpoint, damaged, restore};
use crate::layout::PyEntry;
use crate::mark::PyMark;
use everstep_checkpoint::arena::{Slot, slot_bytes};
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::objects::is_url;
use everstep_checkpoint::persist;
use everstep_checkpoint::reshard::part::Part;
use everstep_checkpoint::reshard::plan::{Held, Run, Table};
use everstep_checkpoint::restore::{Readers, Shard, Target};
use everstep_checkpoint::retain::Policy;
use everstep_core::id::Rank;
use pyo3::prelude::*;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Memory that a tensor of a shard is copied to.
#[pyclass(name = "Target", frozen, get_all, from_py_object)]
#[derive(Clone)]
pub struct PyTarget {
    pub(crate) name: String,
    pub(crate) address: usize,
    pub(crate) bytes: usize,
}

#[pymethods]
impl PyTarget {
    #[new]
    fn new(name: String, address: usize, bytes: usize) -> Self {
        PyTarget { name, address, bytes }
    }
}

/// A block of a tensor of a shard, and the contiguous memory that it is copied to.
#[pyclass(name = "Block", frozen, get_all, from_py_object)]
#[derive(Clone)]
pub struct PyBlock {
    name: String,
    /// Shape of the tensor in the shard.
    shape: Vec<u64>,
    /// Length of an element in bytes.
    element: u64,
    offsets: Vec<u64>,
    sizes: Vec<u64>,
    address: usize,
    /// Length of that memory in bytes.
    room: u64,
}

#[pymethods]
impl PyBlock {
    #[new]
    fn new(
        name: String,
        shape: Vec<u64>,
        element: u64,
        offsets: Vec<u64>,
        sizes: Vec<u64>,
        address: usize,
        room: u64,
    ) -> Self {
        PyBlock { name, shape, element, offsets, sizes, address, room }
    }
}

/// Which durable checkpoints are kept.
#[pyclass(name = "Retention", frozen, get_all)]
pub struct PyRetention {
    /// Number of the newest checkpoints to keep.
    pub last: usize,
    /// Span in seconds: the first checkpoint of each such span is kept; 0 for none.
    pub every: u64,
    /// Whether checkpoints at the ends of epochs are kept.
    pub epochs: bool,
}

#[pymethods]
impl PyRetention {
    #[new]
    fn new(last: usize, every: u64, epochs: bool) -> Self {
        PyRetention { last, every, epochs }
    }
}

impl PyRetention {
    fn policy(&self) -> Policy {
        let every = (self.every > 0).then(|| Duration::from_secs(self.every));
        Policy { last: self.last, every, epochs: self.epochs, abandoned: false }
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
    /// Opens a sealed slot of this process itself, which is not written while the process reads it.
    pub fn of_own(slot: Arc<Slot>) -> PyResult<Self> {
        // SAFETY: this worker writes to its slots only when it captures, and the Python half has
        // finished with a shard before that. The agent writes to them only to bring a shard that a
        // worker waits for, into a slot that has no pin, and to repair damage while this worker
        // waits for the repair. Before the agent named the step, it pinned the slot; the pin is
        // released when all nodes have a later step, which this worker has captured by then.
        Ok(unsafe { Shard::from_still_slot(slot) }.map_err(checkpoint)?.0.into())
    }
}

#[pymethods]
impl PyShard {
    /// Returns the path of the shard's file.
    #[getter]
    fn path(&self) -> &str {
        self.shard.path()
    }

    /// Returns names, dtypes, shapes and lengths, in the order of the bytes.
    fn entries(&self) -> Vec<PyEntry> {
        self.shard.index().tensors().iter().map(PyEntry::from).collect()
    }

    /// Returns where its tensors belong according to its header: the numbers of
    /// `everstep.tensor_places.Parts`.
    fn places(&self) -> Option<Vec<u64>> {
        self.shard.places().map(|p| p.words().to_vec())
    }

    /// Copies tensors in one pass over the whole shard, interpreter released. With `verify=False`
    /// the bytes are not verified.
    #[pyo3(signature = (targets, threads=2, verify=true))]
    fn copy_to(&self, py: Python<'_>, targets: Vec<PyTarget>, threads: usize, verify: bool) -> PyResult<()> {
        let targets: Vec<_> = targets.into_iter().map(|t| (t.name, t.address, t.bytes)).collect();
        let targets = self.shard.targets(&targets).map_err(|e| damaged(e.to_string()))?;
        // SAFETY: the Python half passes contiguous tensors of exactly these lengths, which it
        // keeps alive and does not use during the call.
        py.detach(|| unsafe { self.shard.load(&targets, threads, verify) }).map_err(restore)
    }

    /// Copies blocks of tensors, interpreter released. Only chunks that contain some of them are
    /// read, and verified.
    fn read_blocks(&self, py: Python<'_>, blocks: Vec<PyBlock>, threads: usize) -> PyResult<()> {
        let places = self.shard.index().offsets();
        let (mut targets, mut largest) = (Vec::new(), 0);
        for PyBlock { name, shape, element, offsets, sizes, address, room } in blocks {
            let (at, tensor) = places
                .get(name.as_str())
                .ok_or_else(|| checkpoint(format!("{name} is not in {}", self.shard.path())))?;
            let part = Part::whole(&shape);
            if part.elements().and_then(|n| n.checked_mul(element)) != Some(tensor.bytes) {
                return Err(checkpoint(format!(
                    "{name} has {} bytes, which is not the size of {shape:?} with {element}-byte elements",
                    tensor.bytes
                )));
            }
            let held = vec![Held::new(0, *at, part)];
            let asked = Part::Block { offsets: offsets.into(), sizes: sizes.into() };
            let bytes = asked.elements().and_then(|n| n.checked_mul(element)).unwrap_or(u64::MAX);
            if bytes != room {
                return Err(damaged(format!("{name} has {bytes} bytes in the checkpoint, but room for {room} here")));
            }
            largest = largest.max(bytes);
            let runs = Table::new(&shape, element, held).and_then(|t| t.plan(&asked));
            let runs = runs.map_err(|e| checkpoint(format!("{name}: {e}")))?;
            let target = |r: Run| Target { offset: r.at, bytes: r.bytes, address: address + r.into as usize };
            targets.extend(runs.into_iter().map(target));
        }
        // SAFETY: the Python half passes contiguous memory of exactly these sizes, which it keeps
        // alive and does not use during the call.
        py.detach(|| unsafe { self.shard.load_parts(&targets, Readers::within(threads, largest)) }).map_err(restore)
    }

    /// Verifies every byte.
    #[pyo3(signature = (threads=2))]
    fn verify(&self, py: Python<'_>, threads: usize) -> PyResult<()> {
        py.detach(|| self.shard.verify(threads)).map_err(restore)
    }

    /// Returns the bytes of one tensor.
    fn bytes(&self, py: Python<'_>, name: &str) -> PyResult<Vec<u8>> {
        bytes_of(py, &self.shard, name)
    }
}

/// Returns the bytes of one tensor of a shard.
pub fn bytes_of(py: Python<'_>, shard: &Shard, name: &str) -> PyResult<Vec<u8>> {
    let places = shard.index().offsets();
    let (offset, tensor) = places.get(name).ok_or_else(|| checkpoint(format!("{name} is not in the checkpoint")))?;
    py.detach(|| shard.fetch(*offset, tensor.bytes)).map_err(restore)
}

/// Opens a slot by its file.
#[pyfunction]
fn open_slot(path: PathBuf) -> PyResult<PyShard> {
    let slot = Arc::new(Slot::open(&path).map_err(checkpoint)?);
    Ok(Shard::from_slot(slot).map_err(checkpoint)?.0.into())
}

/// Makes a slot file without an agent.
#[pyfunction]
fn reserve_slot(path: PathBuf, bytes: u64) -> PyResult<()> {
    Slot::reserve(&path, bytes).map(drop).map_err(checkpoint)
}

/// Returns the number of bytes that a slot needs for a region and an index of these lengths.
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

/// Returns the names of the objects whose state is in a published checkpoint; empty if it does not
/// list any.
#[pyfunction]
fn objects_in(py: Python<'_>, checkpoint_directory: PathBuf) -> PyResult<BTreeSet<String>> {
    let manifest = py.detach(|| persist::read_manifest(&checkpoint_directory)).map_err(checkpoint)?;
    Ok(manifest.objects())
}

/// Publishes a checkpoint without an agent and deletes those that `keep` does not cover. `shards`
/// are JSON from `write_shard`. Returns the directory of the checkpoint.
#[pyfunction]
fn publish(
    py: Python<'_>,
    directory: PathBuf,
    mark: &PyMark,
    step: u64,
    shards: Vec<String>,
    keep: &PyRetention,
    exactly: bool,
) -> PyResult<String> {
    let shards = shards.iter().map(|s| serde_json::from_str(s)).collect::<Result<Vec<_>, _>>().map_err(checkpoint)?;
    let (mark, policy) = (&mark.mark, keep.policy());
    let done = py.detach(|| {
        let to = persist::publish(&directory, mark, step, &shards, to(exactly))?;
        pruned(&directory, mark, policy).map(|()| to.display().to_string())
    });
    done.map_err(|e| unpublished(&directory, &e))
}

/// Publishes the shards that all ranks have recorded with `note_shard`. Also returns why older
/// checkpoints could not be deleted, if they could not.
#[pyfunction]
fn publish_noted(
    py: Python<'_>,
    directory: PathBuf,
    mark: &PyMark,
    step: u64,
    world_size: u32,
    keep: &PyRetention,
) -> PyResult<(String, Option<String>)> {
    let (mark, policy) = (&mark.mark, keep.policy());
    let done = py.detach(|| {
        let to = persist::publish_noted(&directory, mark, step, world_size, persist::Target::Branch)?;
        // A published checkpoint is durable, even if older ones cannot be deleted.
        Ok((to.display().to_string(), pruned(&directory, mark, policy).err().map(|e| e.to_string())))
    });
    done.map_err(|e| unpublished(&directory, &e))
}

fn pruned(directory: &Path, mark: &Mark, policy: Policy) -> std::io::Result<()> {
    persist::prune(directory, policy, mark).map(drop)
}

fn to(exactly: bool) -> persist::Target {
    if exactly { persist::Target::Exactly } else { persist::Target::Branch }
}

fn unpublished(directory: &Path, e: &std::io::Error) -> PyErr {
    checkpoint(format!("cannot publish the checkpoint in {}: {e}; earlier checkpoints are kept", directory.display()))
}

/// Raises if checkpoints cannot be stored at a URL; does not check directories.
#[pyfunction]
fn reach(py: Python<'_>, directory: PathBuf) -> PyResult<()> {
    py.detach(|| persist::reach(&directory))
        .map_err(|e| checkpoint(format!("cannot keep checkpoints in {}: {e}", directory.display())))
}

/// Records a shard, as JSON from `write_shard`, for the rank that publishes.
#[pyfunction]
fn note_shard(py: Python<'_>, directory: PathBuf, mark: &PyMark, step: u64, shard: &str) -> PyResult<()> {
    let mark = &mark.mark;
    let shard = serde_json::from_str(shard).map_err(checkpoint)?;
    let done = py.detach(|| persist::note(&directory, mark, step, &shard));
    done.map_err(|e| checkpoint(format!("cannot write to {}: {e}; earlier checkpoints are kept", directory.display())))
}

/// Reads a small file beside the checkpoints; `None` if it does not exist.
#[pyfunction]
fn recall(py: Python<'_>, directory: PathBuf, name: &str) -> PyResult<Option<Vec<u8>>> {
    let found = py.detach(|| persist::recall(&directory, name));
    found.map_err(|e| checkpoint(format!("cannot read {name} in {}: {e}", directory.display())))
}

/// Writes a small file beside the checkpoints. In an object store, this waits and raises errors
/// only with `wait`.
#[pyfunction]
fn remember(py: Python<'_>, directory: PathBuf, name: String, bytes: Vec<u8>, wait: bool) -> PyResult<()> {
    if is_url(&directory) && !wait {
        let write = move || drop(persist::remember(&directory, &name, bytes));
        // If no thread can be started, the next call writes the file.
        let _ = std::thread::Builder::new().name("everstep-remember".into()).spawn(write);
        return Ok(());
    }
    let done = py.detach(|| persist::remember(&directory, &name, bytes));
    done.map_err(|e| checkpoint(format!("cannot write {name} in {}: {e}", directory.display())))
}

/// Adds the classes and functions to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyTarget>()?;
    m.add_class::<PyBlock>()?;
    m.add_class::<PyRetention>()?;
    m.add_class::<PyShard>()?;
    m.add_function(wrap_pyfunction!(reserve_slot, m)?)?;
    m.add_function(wrap_pyfunction!(bytes_per_slot, m)?)?;
    m.add_function(wrap_pyfunction!(open_shard, m)?)?;
    m.add_function(wrap_pyfunction!(objects_in, m)?)?;
    m.add_function(wrap_pyfunction!(open_slot, m)?)?;
    m.add_function(wrap_pyfunction!(reach, m)?)?;
    m.add_function(wrap_pyfunction!(note_shard, m)?)?;
    m.add_function(wrap_pyfunction!(recall, m)?)?;
    m.add_function(wrap_pyfunction!(remember, m)?)?;
    m.add_function(wrap_pyfunction!(publish_noted, m)?)?;
    m.add_function(wrap_pyfunction!(publish, m)?)
}
