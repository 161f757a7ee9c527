//! A state as the native half captures it: tensors described once, and after them the values of
//! each step.

use crate::error::checkpoint;
use everstep_checkpoint::capture::{Described, InOrder, Source};
use everstep_checkpoint::copiers;
use everstep_checkpoint::format::index::Tensor;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

/// A tensor as the index of a shard describes it.
#[pyclass(name = "Entry", frozen, get_all, from_py_object)]
#[derive(Clone)]
pub struct PyEntry {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
}

#[pymethods]
impl PyEntry {
    #[new]
    fn new(name: String, dtype: String, shape: Vec<u64>, bytes: u64) -> Self {
        PyEntry { name, dtype, shape, bytes }
    }
}

impl From<&Tensor> for PyEntry {
    fn from(t: &Tensor) -> Self {
        PyEntry { name: t.name.clone(), dtype: t.dtype.clone(), shape: t.shape.clone(), bytes: t.bytes }
    }
}

pub fn tensors(entries: Vec<PyEntry>) -> Vec<Tensor> {
    let tensor = |PyEntry { name, dtype, shape, bytes }| Tensor { name, dtype, shape, bytes };
    entries.into_iter().map(tensor).collect()
}

/// Memory of a tensor that is captured.
#[pyclass(name = "Source", frozen, get_all, from_py_object)]
#[derive(Clone, Copy)]
pub struct PySource {
    address: usize,
    bytes: usize,
    /// Whether it changes outside the optimizer, so that it is copied first.
    eager: bool,
}

#[pymethods]
impl PySource {
    #[new]
    fn new(address: usize, bytes: usize, eager: bool) -> Self {
        PySource { address, bytes, eager }
    }
}

/// Tensors of a state and their memory, described once for many captures.
#[pyclass(name = "SlotLayout", frozen)]
pub struct PyLayout {
    tensors: Described,
    sources: Vec<Source>,
    in_order: InOrder,
}

#[pymethods]
impl PyLayout {
    /// Describes `entries`, whose memory is `sources` in the same order.
    #[new]
    fn new(entries: Vec<PyEntry>, sources: Vec<PySource>) -> PyResult<Self> {
        let tensors = Described::of(&tensors(entries)).map_err(checkpoint)?;
        let source = |PySource { address, bytes, eager }| Source { address, bytes, eager };
        let sources: Vec<Source> = sources.into_iter().map(source).collect();
        let in_order = InOrder::of(&sources);
        Ok(PyLayout { tensors, sources, in_order })
    }
}

impl PyLayout {
    /// Returns the tensors and their memory.
    pub fn tensors(&self) -> (Described, &InOrder) {
        (self.tensors.clone(), &self.in_order)
    }

    /// Returns the tensors and their memory, followed by the values of one step.
    pub fn with(&self, blobs: &[(String, PyBackedBytes)]) -> std::io::Result<(Described, Vec<Source>)> {
        let mut tensors = self.tensors.clone();
        tensors.push(&blobs.iter().map(|(name, bytes)| value(name, bytes)).collect::<Vec<_>>())?;
        let source = |(_, bytes): &(String, PyBackedBytes)| Source {
            address: bytes.as_ptr() as usize,
            bytes: bytes.len(),
            eager: true,
        };
        let sources = self.sources.iter().copied().chain(blobs.iter().map(source)).collect();
        Ok((tensors, sources))
    }
}

/// Describes a value of one step for the index.
pub fn value(name: &str, bytes: &[u8]) -> Tensor {
    let bytes = bytes.len() as u64;
    Tensor { name: name.into(), dtype: "U8".into(), shape: vec![bytes], bytes }
}

/// Returns the message about threads that could not be created for the user; each message once.
#[pyfunction]
fn thread_trouble() -> Option<String> {
    copiers::take_trouble()
}

/// Adds the classes and the function to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyEntry>()?;
    m.add_class::<PySource>()?;
    m.add_class::<PyLayout>()?;
    m.add_function(wrap_pyfunction!(thread_trouble, m)?)
}
