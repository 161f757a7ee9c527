//! A durable checkpoint of sharded state as a whole, for Python.

use crate::error::{checkpoint, damaged, restore};
use crate::shards::{PyShard, bytes_of};
use everstep_checkpoint::reshard::part::Part;
use everstep_checkpoint::reshard::together::{Member, Window};
use everstep_checkpoint::reshard::whole::{self, Wanted, Whole, WholeError};
use pyo3::prelude::*;
use std::path::PathBuf;

/// (name, dtype, shape of the whole, bytes of an element, in parts, number of ranks that hold some of it, the first
/// of them)
type Described = (String, String, Vec<u64>, u64, bool, usize, u32);
/// (name, offsets or first element, sizes or number of elements, is a range of the flattened tensor, address, bytes that there is
/// room for)
type Asked = (String, Vec<u64>, Vec<u64>, bool, usize, u64);

/// (shard, first chunk, one after the last)
type Span = (u32, usize, usize);

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

fn wanted(asked: Vec<Asked>) -> Vec<Wanted> {
    let one = |(name, offsets, sizes, flat, address, bytes)| {
        let part = part_of(offsets, sizes, flat);
        Wanted { name, part, address, bytes }
    };
    asked.into_iter().map(one).collect()
}

fn error(e: WholeError) -> PyErr {
    match e {
        WholeError::Shard(e) => restore(e),
        // Somewhere on this node it is not what was written.
        WholeError::Together(what) => damaged(what),
        e @ (WholeError::Part(..) | WholeError::Room { .. }) => damaged(e.to_string()),
        e => checkpoint(e),
    }
}

#[pymethods]
impl PyWholeCheckpoint {
    /// Opens all shards of a published checkpoint; headers and tables are verified.
    #[new]
    fn open(py: Python<'_>, directory: PathBuf) -> PyResult<Self> {
        py.detach(|| Whole::open(&directory)).map(PyWholeCheckpoint).map_err(error)
    }

    /// Number of ranks that wrote it.
    #[getter]
    fn world_size(&self) -> usize {
        self.0.shards().len()
    }

    /// Its tensors as a whole: (name, dtype, shape, bytes of an element, it was in parts, number of ranks that hold some of it, the first
    /// of them).
    fn tensors(&self) -> Vec<Described> {
        let all = self.0.tensors().iter();
        all.map(|(name, t)| (name.clone(), t.dtype.clone(), t.shape.clone(), t.element, t.in_parts, t.holders, t.first))
            .collect()
    }

    /// Names of the tensors of one rank's shard.
    fn names(&self, rank: usize) -> Vec<String> {
        let shard = self.0.shards().get(rank);
        shard.into_iter().flat_map(|s| s.index().tensors().iter().map(|t| t.name.clone())).collect()
    }

    /// Bytes of one tensor of one rank's shard.
    fn bytes(&self, py: Python<'_>, rank: usize, name: &str) -> PyResult<Vec<u8>> {
        let shard = self.0.shards().get(rank).ok_or_else(|| checkpoint(format!("there is no rank {rank}")))?;
        bytes_of(py, shard, name)
    }

    /// What reading these parts would read: (number of runs, bytes).
    fn plan(&self, asked: Vec<Asked>) -> PyResult<(usize, u64)> {
        let plan = self.0.plan(&wanted(asked)).map_err(error)?;
        let runs = plan.values().flatten();
        Ok((runs.clone().count(), runs.map(|t| t.bytes).sum()))
    }

    /// Chunks that have some of these parts: (shard, first, one after the last).
    fn chunks(&self, asked: Vec<Asked>) -> PyResult<Vec<Span>> {
        let found = self.0.chunks_of(&wanted(asked)).map_err(error)?;
        Ok(found.into_iter().map(|(shard, range)| (shard, range.start, range.end)).collect())
    }

    /// As `read`, together with the other ranks of this node: (process, its `chunks`) each, and which of them this one is. Returns
    /// the bytes that it has read for all.
    fn read_together(
        &self,
        py: Python<'_>,
        asked: Vec<Asked>,
        members: Vec<(i32, Vec<Span>)>,
        me: usize,
        window: PathBuf,
    ) -> PyResult<u64> {
        let member = |(pid, wants): (i32, Vec<Span>)| Member {
            pid,
            wants: wants.into_iter().map(|(shard, first, end)| (shard, first..end)).collect(),
        };
        let (wanted, members): (_, Vec<Member>) = (wanted(asked), members.into_iter().map(member).collect());
        let window = Window::open(&window).map_err(|e| error(WholeError::Window(e)))?;
        // SAFETY: the Python half passes live, contiguous memory of exactly these sizes.
        py.detach(|| unsafe { self.0.read_together(&wanted, &members, me, &window) }).map_err(error)
    }

    /// Copies parts of tensors to contiguous memory: (name, offsets, sizes, flat, address, room) each, every byte verified; with
    /// about `room` bytes of memory beside.
    fn read(&self, py: Python<'_>, asked: Vec<Asked>, threads: usize, room: u64) -> PyResult<()> {
        let wanted = wanted(asked);
        // SAFETY: the Python half passes live, contiguous memory of exactly these sizes.
        py.detach(|| unsafe { self.0.read(&wanted, threads, room) }).map_err(error)
    }
}

/// Opens every rank's shard of a published checkpoint, headers verified.
#[pyfunction]
fn open_shards(py: Python<'_>, checkpoint_directory: PathBuf) -> PyResult<Vec<PyShard>> {
    let shards = py.detach(|| whole::open_shards(&checkpoint_directory)).map_err(error)?;
    Ok(shards.into_iter().map(PyShard::from).collect())
}

/// Bytes of memory that ranks of one node need to read together, for so much data at a time.
#[pyfunction]
fn window_bytes(data: u64) -> u64 {
    Window::bytes(data)
}

/// Adds the class to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(window_bytes, m)?)?;
    m.add_function(wrap_pyfunction!(open_shards, m)?)?;
    m.add_class::<PyWholeCheckpoint>()
}
