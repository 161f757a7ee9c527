//! Memory of other libraries' objects that is read at each step: where a state keeps its numbers in place, bytes that are as
//! they were mean a state that is as it was.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::Mutex;

/// Blocks of memory, and what they held when they were last looked at.
#[pyclass(name = "WatchedMemory", frozen)]
pub struct PyWatchedMemory {
    /// (address, bytes)
    blocks: Vec<(usize, usize)>,
    seen: Mutex<Vec<u8>>,
}

#[pymethods]
impl PyWatchedMemory {
    /// The Python half keeps the blocks, as (address, bytes), alive.
    #[new]
    fn new(blocks: Vec<(usize, usize)>) -> Self {
        PyWatchedMemory { blocks, seen: Mutex::default() }
    }

    /// Some of it has changed since the last call, or this is the first.
    fn changed(&self) -> bool {
        let Ok(mut seen) = self.seen.lock() else { return true };
        let first = seen.is_empty();
        if first {
            seen.resize(self.blocks.iter().map(|(_, bytes)| bytes).sum(), 0);
        }
        let (mut changed, mut rest) = (first, &mut seen[..]);
        for (address, bytes) in &self.blocks {
            let (before, behind) = rest.split_at_mut(*bytes);
            // SAFETY: the Python half keeps the block alive, and holds the GIL, under which it is written.
            let now = unsafe { block(*address, *bytes) };
            if before != now {
                changed = true;
                before.copy_from_slice(now);
            }
            rest = behind;
        }
        changed
    }
}

/// Copies a block of memory, which the Python half keeps alive meanwhile.
#[pyfunction]
fn memory_at(py: Python<'_>, address: usize, bytes: usize) -> Bound<'_, PyBytes> {
    // SAFETY: as above.
    PyBytes::new(py, unsafe { block(address, bytes) })
}

/// # Safety
/// The block is readable, and nobody writes to it, as long as the slice is used.
unsafe fn block<'a>(address: usize, bytes: usize) -> &'a [u8] {
    if bytes == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }
}

/// Adds class and function to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyWatchedMemory>()?;
    m.add_function(wrap_pyfunction!(memory_at, m)?)
}
