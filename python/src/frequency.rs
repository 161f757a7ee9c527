//! How often checkpoints are made, for the schedule in Python. The rule and what it follows are the core's.

use crate::error::checkpoint;
use everstep_core::frequency::rate::Rate;
use everstep_core::frequency::{Bound as Limit, Costs, choose};
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Follows what checkpoints cost. Seconds everywhere.
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

#[pymethods]
impl PyRate {
    /// `budget`: part of the loop's time that checkpoints may cost. `share`: part of the time in which they may use storage.
    /// `kept`: what [`PyRate::keep`] gave in an earlier life.
    #[new]
    #[pyo3(signature = (budget, share, kept=None))]
    fn new(budget: f64, share: f64, kept: Option<&str>) -> Self {
        let kept: Option<Rate> = kept.and_then(|json| serde_json::from_str(json).ok());
        let rate = kept.map_or_else(|| Rate::new(budget, share), |rate| rate.under(budget, share));
        PyRate { rate: Mutex::new(rate) }
    }

    /// Steps that make a profile.
    #[staticmethod]
    fn profiled(epoch: Option<u64>) -> u64 {
        Rate::profiled(epoch)
    }

    /// Undisturbed steps.
    fn profile(&self, steps: Vec<f64>) {
        self.rate().profile(&steps);
    }

    /// A step took so long; `quiet`: beside no part of a checkpoint.
    fn step(&self, seconds: f64, quiet: bool) {
        self.rate().step(seconds, quiet);
    }

    /// A step whose time says nothing.
    fn passed(&self) {
        self.rate().passed();
    }

    /// A checkpoint begins.
    fn begins(&self) {
        self.rate().begins();
    }

    /// The checkpoint that began this interval is written, so many seconds after its step.
    fn written(&self, occupied: f64) {
        self.rate().written(occupied);
    }

    /// Something else has held the loop up.
    fn disturbed(&self) {
        self.rate().disturbed();
    }

    /// Seconds between failures, once there were any.
    fn failures(&self, mtbf: Option<f64>) {
        self.rate().failures(mtbf);
    }

    /// Steps until one is due, 0 for now; `None` without a profile.
    fn left(&self) -> Option<u64> {
        self.rate().left()
    }

    /// (a checkpoint every so many steps, what bounds that); `None` without a profile.
    fn every(&self) -> Option<(u64, &'static str)> {
        self.rate().every().map(|(every, bound)| (every, word(bound)))
    }

    /// (an undisturbed step, what a checkpoint costs the loop, from its step to where it is written), as far as known.
    fn measured(&self) -> (Option<f64>, Option<f64>, Option<f64>) {
        let seen = self.rate().measured();
        (seen.iteration, seen.cost, seen.occupied)
    }

    /// For the next life of the job.
    fn keep(&self) -> PyResult<String> {
        serde_json::to_string(&*self.rate()).map_err(checkpoint)
    }
}

/// Steps from one snapshot to the next when each holds the loop up for `stall` seconds and a step takes `iteration`.
#[pyfunction]
fn snapshot_interval(stall: f64, iteration: f64, budget: f64) -> u64 {
    choose(&Costs { iteration, update: 0.0, host_copy: stall, write: 0.0, device_copy: None }, budget).every
}

/// Adds class and function to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyRate>()?;
    m.add_function(wrap_pyfunction!(snapshot_interval, m)?)
}
