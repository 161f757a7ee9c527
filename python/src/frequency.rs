//! The rule for how often checkpoints are made, for the schedule in Python. The rule itself is in
//! the core.

use crate::error::checkpoint;
use everstep_core::frequency::rate::Rate;
use everstep_core::frequency::{Bound as Limit, Costs, choose};
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Estimates the cost of checkpoints. All times are in seconds.
#[pyclass(name = "Rate", frozen)]
pub struct PyRate {
    rate: Mutex<Rate>,
}

impl PyRate {
    fn rate(&self) -> MutexGuard<'_, Rate> {
        self.rate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn word(bound: Limit) -> &'static str {
    match bound {
        Limit::None => "every step fits",
        Limit::Budget => "stall budget",
        Limit::Write => "storage",
        Limit::Failures => "failures are rare",
    }
}

/// Measured cost of checkpoints, in seconds; `None` for values that were not measured yet.
#[pyclass(name = "CheckpointCost", frozen, get_all)]
pub struct PyCheckpointCost {
    /// Duration of a step without any part of a checkpoint.
    iteration: Option<f64>,
    /// Time that a checkpoint costs the loop.
    cost: Option<f64>,
    /// Time from the step of a checkpoint until it is written.
    occupied: Option<f64>,
}

#[pymethods]
impl PyRate {
    /// Creates the estimate. `budget`: part of the loop's time that checkpoints may cost. `share`:
    /// part of the time in which they may use storage. `kept`: the result of [`PyRate::keep`] in an
    /// earlier life of the job.
    #[new]
    #[pyo3(signature = (budget, share, kept=None))]
    fn new(budget: f64, share: f64, kept: Option<&str>) -> Self {
        let kept: Option<Rate> = kept.and_then(|json| serde_json::from_str(json).ok());
        let rate = kept.map_or_else(|| Rate::new(budget, share), |rate| rate.under(budget, share));
        PyRate { rate: Mutex::new(rate) }
    }

    /// Returns the number of steps of a profile.
    #[staticmethod]
    fn profiled(epoch: Option<u64>) -> u64 {
        Rate::profiled(epoch)
    }

    /// Records the seconds of steps without any part of a checkpoint.
    fn profile(&self, steps: Vec<f64>) {
        self.rate().profile(&steps);
    }

    /// Records the seconds of a step; `quiet`: no part of a checkpoint was in progress.
    fn step(&self, seconds: f64, quiet: bool) {
        self.rate().step(seconds, quiet);
    }

    /// Records a step whose time is not representative.
    fn passed(&self) {
        self.rate().passed();
    }

    /// Records that a checkpoint begins.
    fn begins(&self) {
        self.rate().begins();
    }

    /// Records that the checkpoint which began this interval is written, `occupied` seconds after
    /// its step.
    fn written(&self, occupied: f64) {
        self.rate().written(occupied);
    }

    /// Records that something else has delayed the loop.
    fn disturbed(&self) {
        self.rate().disturbed();
    }

    /// Sets the mean seconds between failures; `None` if there were none.
    fn failures(&self, mtbf: Option<f64>) {
        self.rate().failures(mtbf);
    }

    /// Returns the number of steps until a checkpoint is due, 0 for now; `None` without a profile.
    fn left(&self) -> Option<u64> {
        self.rate().left()
    }

    /// Returns the interval in steps and what bounds it; `None` without a profile.
    fn every(&self) -> Option<(u64, &'static str)> {
        self.rate().every().map(|(every, bound)| (every, word(bound)))
    }

    /// Returns the measured cost of checkpoints.
    fn measured(&self) -> PyCheckpointCost {
        let seen = self.rate().measured();
        PyCheckpointCost { iteration: seen.iteration, cost: seen.cost, occupied: seen.occupied }
    }

    /// Returns all measurements as JSON, for the next life of the job.
    fn keep(&self) -> PyResult<String> {
        serde_json::to_string(&*self.rate()).map_err(checkpoint)
    }
}

/// Returns the number of steps between snapshots, each of which delays the loop for `stall`
/// seconds, when a step takes `iteration` seconds.
#[pyfunction]
fn snapshot_interval(stall: f64, iteration: f64, budget: f64) -> u64 {
    choose(&Costs { iteration, update: 0.0, host_copy: stall, write: 0.0, device_copy: None }, budget).every
}

/// Adds the classes and the function to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyCheckpointCost>()?;
    m.add_class::<PyRate>()?;
    m.add_function(wrap_pyfunction!(snapshot_interval, m)?)
}
