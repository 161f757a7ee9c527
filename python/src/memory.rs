//! Reads the memory of other libraries' objects at each step: if an object keeps its state in
//! place, unchanged bytes mean an unchanged state.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

const WORD: usize = size_of::<u32>();

/// Blocks of memory, and what they contained when they were last read.
#[pyclass(name = "WatchedMemory", frozen)]
pub struct PyWatchedMemory {
    /// (address, bytes), in whole words.
    blocks: Vec<(usize, usize)>,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    version: u64,
    words: Vec<u32>,
}

#[pymethods]
impl PyWatchedMemory {
    /// Creates the watch. The Python half keeps the blocks, as (address, bytes), alive as long as
    /// this object.
    #[new]
    fn new(blocks: Vec<(usize, usize)>) -> PyResult<Self> {
        if blocks.iter().any(|(address, bytes)| !address.is_multiple_of(WORD) || !bytes.is_multiple_of(WORD)) {
            return Err(PyValueError::new_err("addresses and lengths must be multiples of 4 bytes"));
        }
        Ok(PyWatchedMemory { blocks, seen: Mutex::default() })
    }

    /// Returns a number that differs from the previous call's whenever the memory does.
    fn version(&self) -> PyResult<u64> {
        let mut seen = self.seen.lock().map_err(|e| PyValueError::new_err(e.to_string()))?;
        let mut changed = seen.words.is_empty();
        if changed {
            seen.words.resize(self.blocks.iter().map(|(_, bytes)| bytes / WORD).sum(), 0);
        }
        let mut known = seen.words.as_mut_slice();
        for (address, bytes) in &self.blocks {
            // SAFETY: the Python half keeps the block alive, and it is aligned (`new`). Another
            // thread may draw a number meanwhile, without the interpreter's lock, as numpy's
            // generators allow: hence atomic reads.
            let words = unsafe { std::slice::from_raw_parts(*address as *const AtomicU32, bytes / WORD) };
            let (of_block, rest) = known.split_at_mut(words.len());
            known = rest;
            // Usually nothing has changed, and a loop without stores is enough to find out.
            let differ = |all, (word, known): (&AtomicU32, &u32)| all | (word.load(Ordering::Relaxed) ^ known);
            if words.iter().zip(&*of_block).fold(0, differ) != 0 {
                changed = true;
                of_block.iter_mut().zip(words).for_each(|(known, word)| *known = word.load(Ordering::Relaxed));
            }
        }
        seen.version += u64::from(changed);
        Ok(seen.version)
    }
}

/// Copies a block of memory. The Python half keeps it alive, and nothing writes to it meanwhile.
#[pyfunction]
fn memory_at(py: Python<'_>, address: usize, bytes: usize) -> Bound<'_, PyBytes> {
    if bytes == 0 {
        return PyBytes::new(py, &[]);
    }
    // SAFETY: the caller in the Python half has created the object that the block belongs to, has a
    // reference to it, and has given it to no one else.
    PyBytes::new(py, unsafe { std::slice::from_raw_parts(address as *const u8, bytes) })
}

/// Adds the class and the function to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyWatchedMemory>()?;
    m.add_function(wrap_pyfunction!(memory_at, m)?)
}
