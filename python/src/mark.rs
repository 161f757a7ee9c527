//! Whose a directory of checkpoints is, as Python sees it.

use crate::error::checkpoint;
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::lineage::From;
use everstep_checkpoint::persist::{self, Claim, Claimant};
use pyo3::prelude::*;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

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

/// A directory that belongs to this process for as long as this lives.
#[pyclass(name = "Claim", frozen)]
pub struct PyClaim {
    claim: Mutex<Option<Claim>>,
    epoch: u64,
}

#[pymethods]
impl PyClaim {
    /// Takes the directory; whoever renews its record within `silence` seconds has it, and is named in the refusal.
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

    /// Which ownership this is.
    #[getter]
    fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Lets go: the next one need not wait.
    fn release(&self, py: Python<'_>) {
        if let Some(claim) = self.claim.lock().ok().and_then(|mut c| c.take()) {
            py.detach(|| claim.release());
        }
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

/// Training goes on after `step` (0: from scratch), which was read from `path`, or from memory: the branch that it is in is recorded, and
/// published steps are its. `asked`: the user named the step. Returns the number of the branch.
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
        let from = match path {
            _ if step == 0 => From::Scratch,
            None => From::Memory { step },
            Some(path) => {
                let manifest = persist::read_manifest(&path).map_err(std::io::Error::other)?;
                From::Durable(persist::place_of(&manifest, Some(mark.run)))
            }
        };
        persist::begin(&directory, from, asked, mark)
    });
    let failed = |e| {
        checkpoint(format!("cannot record in {} which checkpoint training continues from: {e}", directory.display()))
    };
    Ok(begun.map_err(failed)?.branch)
}

/// The step that the user went back to, from which the branch that ran last began, if an earlier generation of this life of the job did it;
/// with `restarted`, an earlier life.
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
