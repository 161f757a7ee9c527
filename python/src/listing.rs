//! The contents of a directory of checkpoints, for Python.

use crate::error::checkpoint;
use everstep_checkpoint::persist;
use pyo3::prelude::*;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A published checkpoint.
#[pyclass(name = "ListedCheckpoint", frozen, get_all)]
pub struct PyListedCheckpoint {
    step: u64,
    /// Path of the checkpoint's own directory.
    path: OsString,
    /// Number of ranks that wrote it; `None` if it cannot be read.
    world_size: Option<u32>,
    /// Why it cannot be read; `None` if it is complete.
    wrong: Option<String>,
}

/// Lists published checkpoints, the newest first.
#[pyfunction]
fn list_checkpoints(py: Python<'_>, directory: PathBuf) -> PyResult<Vec<PyListedCheckpoint>> {
    rows(&directory, py.detach(|| persist::list(&directory)))
}

fn rows(directory: &Path, found: std::io::Result<Vec<persist::Found>>) -> PyResult<Vec<PyListedCheckpoint>> {
    let row = |(step, path, manifest): persist::Found| {
        let (world_size, wrong) = match manifest {
            Ok(m) => (Some(m.world_size), None),
            Err(e) => (None, Some(e.to_string())),
        };
        PyListedCheckpoint { step, path: path.into_os_string(), world_size, wrong }
    };
    Ok(found.map_err(|e| unreadable(directory, &e))?.into_iter().map(row).collect())
}

/// Lists the checkpoints of the branch that ran last, and damaged ones that may belong to it, the
/// newest first.
#[pyfunction]
fn list_line(py: Python<'_>, directory: PathBuf) -> PyResult<Vec<PyListedCheckpoint>> {
    rows(&directory, py.detach(|| persist::line(&directory)))
}

/// Lists the steps in the names of entries that everstep did not write, or cannot identify.
#[pyfunction]
fn foreign_steps(py: Python<'_>, directory: PathBuf) -> PyResult<Vec<u64>> {
    let found = py.detach(|| persist::foreign(&directory)).map_err(|e| unreadable(&directory, &e))?;
    Ok(found.into_iter().filter_map(|f| f.step).collect())
}

fn unreadable(directory: &Path, e: &std::io::Error) -> PyErr {
    checkpoint(format!("cannot read the checkpoint directory {}: {e}", directory.display()))
}

/// Adds the class and the functions to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyListedCheckpoint>()?;
    m.add_function(wrap_pyfunction!(list_checkpoints, m)?)?;
    m.add_function(wrap_pyfunction!(list_line, m)?)?;
    m.add_function(wrap_pyfunction!(foreign_steps, m)?)
}
