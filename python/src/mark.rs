//! Whose a directory of checkpoints is, as Python sees it.

use crate::error::checkpoint;
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::persist;
use pyo3::prelude::*;
use std::path::PathBuf;

/// Who writes into a directory (see `everstep_checkpoint::format::mark`).
#[pyclass(name = "Mark", frozen)]
pub struct PyMark {
    pub mark: Mark,
}

#[pymethods]
impl PyMark {
    #[new]
    fn new(run: &str, epoch: u64, generation: u64, attempt: u64) -> PyResult<Self> {
        let run = run.parse().map_err(|e: String| checkpoint(e))?;
        Ok(PyMark { mark: Mark { run, epoch, generation, attempt } })
    }
}

/// The directory's run id, drawn now if it has none.
#[pyfunction]
fn run_id(py: Python<'_>, directory: PathBuf) -> PyResult<String> {
    let run = py.detach(|| persist::run_id(&directory));
    let run = run.map_err(|e| {
        checkpoint(format!("cannot tell which run the checkpoints in {} belong to: {e}", directory.display()))
    })?;
    Ok(run.to_string())
}

/// Adds the class and the function to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyMark>()?;
    m.add_function(wrap_pyfunction!(run_id, m)?)
}
