//! A state as the native half captures it: tensors described once, values that come behind them at each step.

use crate::error::checkpoint;
use everstep_checkpoint::capture::{Described, InOrder, Source};
use everstep_checkpoint::copiers;
use everstep_checkpoint::format::index::Tensor;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

/// (name, dtype, shape, bytes)
pub type Entry = (String, String, Vec<u64>, u64);

pub fn tensors(entries: Vec<Entry>) -> Vec<Tensor> {
    entries.into_iter().map(|(name, dtype, shape, bytes)| Tensor { name, dtype, shape, bytes }).collect()
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
    /// `sources` are (address, bytes, eager) in the order of `entries`.
    #[new]
    fn new(entries: Vec<Entry>, sources: Vec<(usize, usize, bool)>) -> PyResult<Self> {
        let tensors = Described::of(&tensors(entries)).map_err(checkpoint)?;
        let source = |(address, bytes, eager)| Source { address, bytes, eager };
        let sources: Vec<Source> = sources.into_iter().map(source).collect();
        let in_order = InOrder::of(&sources);
        Ok(PyLayout { tensors, sources, in_order })
    }
}

impl PyLayout {
    /// The tensors and their memory.
    pub fn tensors(&self) -> (Described, &InOrder) {
        (self.tensors.clone(), &self.in_order)
    }

    /// With the values of one step behind the tensors.
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

/// What people must know about threads that could not be created; each sentence once.
#[pyfunction]
fn thread_trouble() -> Option<String> {
    copiers::take_trouble()
}

/// Adds class and function to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyLayout>()?;
    m.add_function(wrap_pyfunction!(thread_trouble, m)?)
}
