//! The owner of a directory of checkpoints, for Python.

use crate::error::checkpoint;
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::persist::{self, Claim, Claimant, Origin};
use pyo3::prelude::*;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

/// The writer of a directory (see `everstep_checkpoint::format::mark`).
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

/// A directory that belongs to this process for the lifetime of this object.
#[pyclass(name = "Claim", frozen)]
pub struct PyClaim {
    claim: Mutex<Option<Claim>>,
    epoch: u64,
}

#[pymethods]
impl PyClaim {
    /// Claims the directory. If another owner renews its record within `silence` seconds, raises an
    /// error that names it.
    #[new]
    fn take(py: Python<'_>, directory: PathBuf, silence: f64) -> PyResult<Self> {
        let claim = py.detach(|| {
            let who = Claimant::alone(Duration::from_secs_f64(silence)).map_err(|e| e.to_string())?;
            persist::claim(&directory, &who, |line| drop(writeln!(std::io::stderr(), "everstep: {line}")))
                .map_err(|e| e.to_string())
        });
        let claim = claim.map_err(checkpoint)?;
        Ok(PyClaim { epoch: claim.epoch(), claim: Mutex::new(Some(claim)) })
    }

    /// Returns the number of this ownership.
    #[getter]
    fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Releases the directory, so that the next owner need not wait.
    fn release(&self, py: Python<'_>) {
        if let Some(claim) = self.claim.lock().ok().and_then(|mut c| c.take()) {
            py.detach(|| claim.release());
        }
    }
}

/// Returns the directory's run id, and draws one if there is none.
#[pyfunction]
fn run_id(py: Python<'_>, directory: PathBuf) -> PyResult<String> {
    let run = py.detach(|| persist::run_id(&directory));
    let run = run.map_err(|e| {
        checkpoint(format!("cannot tell which run the checkpoints in {} belong to: {e}", directory.display()))
    })?;
    Ok(run.to_string())
}

/// Records the branch that training continues on after `step` (0: from scratch), which was read
/// from `path`, or from memory; steps published from now on belong to it. `asked`: the user named
/// the step. Returns the number of the branch.
#[pyfunction]
fn begin_branch(
    py: Python<'_>,
    directory: PathBuf,
    mark: &PyMark,
    step: u64,
    path: Option<PathBuf>,
    asked: bool,
) -> PyResult<u64> {
    let mark = &mark.mark;
    let begun = py.detach(|| {
        let manifest = path.filter(|_| step > 0).map(|path| persist::read_manifest(&path)).transpose();
        let manifest = manifest.map_err(std::io::Error::other)?;
        let from = match &manifest {
            _ if step == 0 => Origin::Scratch,
            None => Origin::Memory { step },
            Some(manifest) => Origin::Durable(manifest),
        };
        persist::begin(&directory, from, asked, mark)
    });
    let failed = |e| {
        checkpoint(format!("cannot record in {} which checkpoint training continues from: {e}", directory.display()))
    };
    Ok(begun.map_err(failed)?.branch)
}

/// Returns the step that the user went back to, at which the branch that ran last began, if an
/// earlier generation of this life of the job did so; with `restarted`, an earlier life.
#[pyfunction]
fn asked_before(py: Python<'_>, directory: PathBuf, mark: &PyMark, restarted: bool) -> PyResult<Option<u64>> {
    let mark = &mark.mark;
    let found = py.detach(|| persist::recorded(&directory, Some(mark.run)));
    let record = found.map_err(|e| checkpoint(format!("cannot read {}: {e}", directory.display())))?;
    let earlier = |r: &persist::Record| r.epoch == mark.epoch && r.generation < mark.generation;
    Ok(record.filter(|r| restarted || earlier(r)).and_then(|r| r.asked))
}

/// Adds the class and the function to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyMark>()?;
    m.add_class::<PyClaim>()?;
    m.add_function(wrap_pyfunction!(begin_branch, m)?)?;
    m.add_function(wrap_pyfunction!(asked_before, m)?)?;
    m.add_function(wrap_pyfunction!(run_id, m)?)
}
