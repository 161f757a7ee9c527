//! One Python exception tree for the errors of the native half.

use everstep_checkpoint::capture::Torn;
use everstep_checkpoint::restore::RestoreError;
use pyo3::create_exception;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

create_exception!(
    everstep,
    EverstepError,
    PyRuntimeError,
    "Base class of everstep's errors; the message says what to do."
);
create_exception!(everstep, CheckpointError, EverstepError, "A checkpoint cannot be written or read.");
create_exception!(
    everstep,
    DamagedError,
    CheckpointError,
    "Parts of a shard are not what was written; args: text, numbers of the chunks."
);
create_exception!(everstep, TornError, CheckpointError, "The state was written to while a snapshot of it was copied.");
create_exception!(everstep, AgentError, EverstepError, "The agent of this node refused a request or did not answer.");

/// Adds the exceptions to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("EverstepError", m.py().get_type::<EverstepError>())?;
    m.add("CheckpointError", m.py().get_type::<CheckpointError>())?;
    m.add("DamagedError", m.py().get_type::<DamagedError>())?;
    m.add("TornError", m.py().get_type::<TornError>())?;
    m.add("AgentError", m.py().get_type::<AgentError>())
}

/// Converts anything that can be displayed to a checkpoint error.
pub fn checkpoint(e: impl std::fmt::Display) -> PyErr {
    CheckpointError::new_err(e.to_string())
}

/// Converts the error of a capture.
pub fn capture(e: std::io::Error) -> PyErr {
    match e.get_ref().and_then(|e| e.downcast_ref::<Torn>()) {
        Some(torn) => TornError::new_err(torn.to_string()),
        None => checkpoint(e),
    }
}

/// Returns the error for a shard that is damaged or cannot be read.
pub fn damaged(what: String) -> PyErr {
    DamagedError::new_err((what, Vec::<usize>::new()))
}

/// Converts the error of a restore.
pub fn restore(e: RestoreError) -> PyErr {
    match e {
        RestoreError::Chunks { ref chunks, .. } => DamagedError::new_err((e.to_string(), chunks.clone())),
        other => damaged(other.to_string()),
    }
}
