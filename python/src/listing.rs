//! What lies in a directory of checkpoints, as Python sees it.

use crate::error::checkpoint;
use everstep_checkpoint::persist;
use pyo3::prelude::*;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// One published checkpoint, see [`list_checkpoints`].
type Row = (u64, OsString, Option<u32>, Option<String>);

/// Published checkpoints, newest first: (step, directory, world size or None, what is wrong or None).
#[pyfunction]
fn list_checkpoints(py: Python<'_>, directory: PathBuf) -> PyResult<Vec<Row>> {
    rows(&directory, py.detach(|| persist::list(&directory)))
}

fn rows(directory: &Path, found: std::io::Result<Vec<persist::Found>>) -> PyResult<Vec<Row>> {
    let row = |(step, path, manifest): persist::Found| {
        let (size, wrong) = match manifest {
            Ok(m) => (Some(m.world_size), None),
            Err(e) => (None, Some(e)),
        };
        (step, path.into_os_string(), size, wrong)
    };
    Ok(found.map_err(|e| unreadable(directory, &e))?.into_iter().map(row).collect())
}

/// The same of the branch that ran last, with damaged ones that may have been of it.
#[pyfunction]
fn list_line(py: Python<'_>, directory: PathBuf) -> PyResult<Vec<Row>> {
    rows(&directory, py.detach(|| persist::line(&directory)))
}

/// Steps in the names of what everstep did not write, or cannot tell.
#[pyfunction]
fn foreign_steps(py: Python<'_>, directory: PathBuf) -> PyResult<Vec<u64>> {
    let found = py.detach(|| persist::foreign(&directory)).map_err(|e| unreadable(&directory, &e))?;
    Ok(found.into_iter().filter_map(|f| f.step).collect())
}

fn unreadable(directory: &Path, e: &std::io::Error) -> PyErr {
    checkpoint(format!("cannot read the checkpoint directory {}: {e}", directory.display()))
}

/// Adds the functions to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(list_checkpoints, m)?)?;
    m.add_function(wrap_pyfunction!(list_line, m)?)?;
    m.add_function(wrap_pyfunction!(foreign_steps, m)?)
}
