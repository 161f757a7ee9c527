//! A durable checkpoint of sharded state as a whole, for Python.

use crate::error::{checkpoint, damaged, restore};
use crate::shards::{PyShard, PyTarget, bytes_of};
use everstep_checkpoint::reshard::copies::Difference;
use everstep_checkpoint::reshard::node_reader::{Member, Window};
use everstep_checkpoint::reshard::part::Part;
use everstep_checkpoint::reshard::whole::{self, Wanted, Whole, WholeError};
use everstep_checkpoint::restore::Readers;
use pyo3::prelude::*;
use std::ops::Range;
use std::path::PathBuf;

/// Threads that read one rank's tensors.
const THREADS: usize = 2;

/// A tensor of a checkpoint as a whole.
#[pyclass(name = "WholeTensor", frozen, get_all)]
pub struct PyWholeTensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    /// Length of an element in bytes.
    element: u64,
    /// Whether the shards contain parts of it.
    in_parts: bool,
    /// Number of ranks that have some of it.
    holders: usize,
    /// Number of the first of those ranks.
    first: u32,
}

/// A part of a tensor of a checkpoint, and the contiguous memory that it is copied to.
#[pyclass(name = "WantedPart", frozen, get_all, from_py_object)]
#[derive(Clone)]
pub struct PyWantedPart {
    name: String,
    /// Offsets of a block, or the first element of a range.
    offsets: Vec<u64>,
    /// Sizes of a block, or the number of elements of a range.
    sizes: Vec<u64>,
    /// Whether it is a range of the flattened tensor.
    flat: bool,
    address: usize,
    /// Length of that memory in bytes.
    room: u64,
}

#[pymethods]
impl PyWantedPart {
    #[new]
    #[pyo3(signature = (name, offsets, sizes, flat=false, address=0, room=0))]
    fn new(name: String, offsets: Vec<u64>, sizes: Vec<u64>, flat: bool, address: usize, room: u64) -> Self {
        PyWantedPart { name, offsets, sizes, flat, address, room }
    }
}

/// Consecutive chunks of a shard.
#[pyclass(name = "ChunkSpan", frozen, get_all, from_py_object)]
#[derive(Clone, Copy)]
pub struct PyChunkSpan {
    shard: u32,
    first: usize,
    /// One after the last chunk.
    end: usize,
}

#[pymethods]
impl PyChunkSpan {
    #[new]
    fn new(shard: u32, first: usize, end: usize) -> Self {
        PyChunkSpan { shard, first, end }
    }
}

/// All shards of a checkpoint.
#[pyclass(name = "WholeCheckpoint", frozen)]
pub struct PyWholeCheckpoint(Whole);

fn part_of(offsets: Vec<u64>, sizes: Vec<u64>, flat: bool) -> Part {
    if flat {
        let (first, n) = (offsets.first().copied().unwrap_or(0), sizes.first().copied().unwrap_or(0));
        return Part::Flat { first, last: first.saturating_add(n) };
    }
    Part::Block { offsets: offsets.into(), sizes: sizes.into() }
}

fn wanted(parts: Vec<PyWantedPart>) -> Vec<Wanted> {
    let one = |PyWantedPart { name, offsets, sizes, flat, address, room }| {
        let part = part_of(offsets, sizes, flat);
        Wanted { name, part, address, bytes: room }
    };
    parts.into_iter().map(one).collect()
}

fn error(e: WholeError) -> PyErr {
    match e {
        WholeError::Shard(e) => restore(e),
        // A rank of this node has found bytes that differ from those that were written.
        WholeError::Together(what) => damaged(what),
        e @ (WholeError::Part(..) | WholeError::Room { .. }) => damaged(e.to_string()),
        e => checkpoint(e),
    }
}

#[pymethods]
impl PyWholeCheckpoint {
    /// Opens all shards of a published checkpoint. Headers and tables are verified.
    #[new]
    fn open(py: Python<'_>, directory: PathBuf) -> PyResult<Self> {
        py.detach(|| Whole::open(&directory)).map(PyWholeCheckpoint).map_err(error)
    }

    /// Returns the number of ranks that wrote the checkpoint.
    #[getter]
    fn world_size(&self) -> usize {
        self.0.shards().len()
    }

    /// Returns the tensors of the whole checkpoint.
    fn tensors(&self) -> Vec<PyWholeTensor> {
        let tensor = |(name, t): (&String, &whole::WholeTensor)| PyWholeTensor {
            name: name.clone(),
            dtype: t.dtype.clone(),
            shape: t.shape.clone(),
            element: t.element,
            in_parts: t.in_parts,
            holders: t.holders,
            first: t.first,
        };
        self.0.tensors().iter().map(tensor).collect()
    }

    /// Returns the names of the tensors of one rank's shard.
    fn names(&self, rank: usize) -> Vec<String> {
        let shard = self.0.shards().get(rank);
        shard.into_iter().flat_map(|s| s.index().tensors().iter().map(|t| t.name.clone())).collect()
    }

    /// Returns the bytes of one tensor of one rank's shard.
    fn bytes(&self, py: Python<'_>, rank: usize, name: &str) -> PyResult<Vec<u8>> {
        let shard = self.0.shards().get(rank).ok_or_else(|| checkpoint(format!("there is no rank {rank}")))?;
        bytes_of(py, shard, name)
    }

    /// Returns the cost of reading these parts: (number of runs, bytes).
    fn plan(&self, parts: Vec<PyWantedPart>) -> PyResult<(usize, u64)> {
        let plan = self.0.plan(&wanted(parts)).map_err(error)?;
        let runs = plan.values().flatten();
        Ok((runs.clone().count(), runs.map(|t| t.bytes).sum()))
    }

    /// Returns the chunks that contain some of these parts.
    fn chunks(&self, parts: Vec<PyWantedPart>) -> PyResult<Vec<PyChunkSpan>> {
        let found = self.0.chunks_of(&wanted(parts)).map_err(error)?;
        let span = |(shard, range): (u32, Range<usize>)| PyChunkSpan { shard, first: range.start, end: range.end };
        Ok(found.into_iter().map(span).collect())
    }

    /// Does what `read` does, together with the other ranks of this node: `members` are the
    /// processes and their `chunks`, `me` is the index of this one. Returns the number of bytes
    /// that this process has read for all.
    fn read_together(
        &self,
        py: Python<'_>,
        parts: Vec<PyWantedPart>,
        members: Vec<(i32, Vec<PyChunkSpan>)>,
        me: usize,
        window: PathBuf,
    ) -> PyResult<u64> {
        let member = |(pid, wants): (i32, Vec<PyChunkSpan>)| Member {
            pid,
            wants: wants.into_iter().map(|s| (s.shard, s.first..s.end)).collect(),
        };
        let (wanted, members): (_, Vec<Member>) = (wanted(parts), members.into_iter().map(member).collect());
        let window = Window::open(&window).map_err(|e| error(WholeError::Window(e)))?;
        // SAFETY: the Python half passes contiguous memory of exactly these sizes, which it keeps
        // alive and does not use during the call.
        py.detach(|| unsafe { self.0.read_together(&wanted, &members, me, &window) }).map_err(error)
    }

    /// Returns the tensors in `names` of which `rank` has other values than the whole, at most
    /// `most`, each with the rank that the whole has them from.
    fn differences(&self, py: Python<'_>, rank: u32, names: Vec<String>, most: usize) -> PyResult<Vec<(String, u32)>> {
        let found = py.detach(|| self.0.differences(rank, &names, most)).map_err(error)?;
        Ok(found.into_iter().map(|Difference { name, rank }| (name, rank)).collect())
    }

    /// Copies tensors of one rank's shard. Reads and verifies only the chunks that contain some of
    /// them.
    fn copy_of(&self, py: Python<'_>, rank: usize, targets: Vec<PyTarget>) -> PyResult<()> {
        let shard = self.0.shards().get(rank).ok_or_else(|| checkpoint(format!("there is no rank {rank}")))?;
        let largest = targets.iter().map(|t| t.bytes as u64).max().unwrap_or(0);
        let targets: Vec<_> = targets.into_iter().map(|t| (t.name, t.address, t.bytes)).collect();
        let targets = shard.targets(&targets).map_err(|e| damaged(e.to_string()))?;
        let readers = Readers::within(shard.threads(THREADS), largest);
        // SAFETY: the Python half passes contiguous tensors of exactly these lengths, which it
        // keeps alive and does not use during the call.
        py.detach(|| unsafe { shard.load_parts(&targets, readers) }).map_err(restore)
    }

    /// Copies parts of tensors, every byte verified, with about `room` bytes of additional memory.
    fn read(&self, py: Python<'_>, parts: Vec<PyWantedPart>, threads: usize, room: u64) -> PyResult<()> {
        let wanted = wanted(parts);
        // SAFETY: the Python half passes contiguous memory of exactly these sizes, which it keeps
        // alive and does not use during the call.
        py.detach(|| unsafe { self.0.read(&wanted, threads, room) }).map_err(error)
    }
}

/// Opens every rank's shard of a published checkpoint, headers verified.
#[pyfunction]
fn open_shards(py: Python<'_>, checkpoint_directory: PathBuf) -> PyResult<Vec<PyShard>> {
    let shards = py.detach(|| whole::open_shards(&checkpoint_directory)).map_err(error)?;
    Ok(shards.into_iter().map(PyShard::from).collect())
}

/// Returns the number of bytes of memory that the ranks of a node need to read together, for `data`
/// bytes at a time.
#[pyfunction]
fn window_bytes(data: u64) -> u64 {
    Window::bytes(data)
}

/// Adds the classes and functions to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(window_bytes, m)?)?;
    m.add_function(wrap_pyfunction!(open_shards, m)?)?;
    m.add_class::<PyWholeTensor>()?;
    m.add_class::<PyWantedPart>()?;
    m.add_class::<PyChunkSpan>()?;
    m.add_class::<PyWholeCheckpoint>()
}
