//! The order of an epoch's samples and the exactly-once hash, for the samplers.

use everstep_core::sample_order::{Exactly, Order};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The order of one epoch: a keyed bijection of `0..n`.
#[pyclass(name = "Order", frozen)]
pub struct PyOrder {
    order: Order,
}

fn pair(e: Exactly) -> (u64, u64) {
    (e.sum, e.xor)
}

#[pymethods]
impl PyOrder {
    #[new]
    fn new(n: u64, seed: u64, epoch: u64, shuffle: bool) -> PyResult<Self> {
        if n > 1 << 62 {
            return Err(PyValueError::new_err(format!("{n} samples are more than can be counted")));
        }
        Ok(PyOrder { order: Order::new(n, seed, epoch, shuffle) })
    }

    /// Returns the samples at `count` positions from `first` on, each `stride` after the one
    /// before.
    fn samples(&self, first: u64, count: u64, stride: u64) -> PyResult<Vec<u64>> {
        let last = count.checked_sub(1).and_then(|c| c.checked_mul(stride)).and_then(|d| d.checked_add(first));
        if count > 0 && last.is_none_or(|l| l >= self.order.size()) {
            return Err(PyValueError::new_err("position beyond the end of the epoch"));
        }
        Ok((0..count).map(|i| self.order.sample(first + i * stride)).collect())
    }

    /// Returns the hash of the samples at positions `first..last`.
    fn hash_range(&self, py: Python<'_>, first: u64, last: u64) -> (u64, u64) {
        pair(py.detach(|| self.order.hash_range(first, last.min(self.order.size()))))
    }

    /// Returns the hash of these samples.
    fn hash_of(&self, samples: Vec<u64>) -> (u64, u64) {
        pair(samples.into_iter().fold(Exactly::default(), |all, s| all.with(self.order.hash(s))))
    }

    /// Returns the hash of an epoch in which every sample was used exactly once.
    fn hash_of_all(&self, py: Python<'_>) -> (u64, u64) {
        pair(py.detach(|| self.order.hash_of_all()))
    }
}

/// Adds the class to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyOrder>()
}
