//! Samples from the machines of one job, second by second.

use serde::{Deserialize, Serialize};

/// What a metric is about. Metrics of one family fail together; two families that agree are
/// independent evidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// CPU, memory, disk.
    Host,
    /// Utilization, power, tensor activity, clocks, temperature.
    Gpu,
    /// NVLink, PCIe.
    Link,
    /// The network between machines.
    Net,
    /// Step times of the job.
    Step,
}

/// The direction in which a metric gets worse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Worse {
    /// Lower is worse: throughput, utilization.
    Less,
    /// Higher is worse: pauses, temperature, time.
    More,
    /// Both are worse: a CPU may idle or spin.
    #[default]
    Either,
}

/// A metric and how to judge it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// The source's name for it.
    pub name: String,
    /// What it is about.
    pub family: Family,
    /// The direction in which it gets worse.
    #[serde(default)]
    pub worse: Worse,
    /// Differences below this are negligible, in the metric's unit. 0: only shares of the usual
    /// level count.
    #[serde(default)]
    pub floor: f32,
}

/// Samples at 1 Hz. Missing samples are NaN.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// The metrics, in the order of their indices.
    pub metrics: Vec<Metric>,
    /// Role of each machine. Machines of one role (pipeline stage, kind of host) do the same work,
    /// and are compared only with each other.
    pub roles: Vec<u32>,
    /// Failure domain of each machine (a switch, a rack). Empty if they are unknown.
    pub domains: Vec<u32>,
    seconds: usize,
    /// By metric, second, and machine, so that the peers of one second are contiguous.
    values: Vec<f32>,
}

impl Series {
    /// Creates a series of `seconds` seconds in which all samples are missing.
    #[must_use]
    pub fn new(metrics: Vec<Metric>, roles: Vec<u32>, seconds: usize) -> Series {
        let values = vec![f32::NAN; metrics.len() * roles.len() * seconds];
        Series { metrics, roles, domains: Vec::new(), seconds, values }
    }

    /// Returns the number of machines.
    #[must_use]
    pub fn machines(&self) -> usize {
        self.roles.len()
    }

    /// Returns the length in seconds.
    #[must_use]
    pub fn seconds(&self) -> usize {
        self.seconds
    }

    fn start(&self, metric: usize, second: usize) -> usize {
        (metric * self.seconds + second) * self.machines()
    }

    /// Returns the samples of all machines in one second; empty if there is no such metric or
    /// second.
    #[must_use]
    pub fn row(&self, metric: usize, second: usize) -> &[f32] {
        let at = self.start(metric, second);
        self.values.get(at..at + self.machines()).unwrap_or_default()
    }

    /// The mutable version of [`Series::row`].
    pub fn row_mut(&mut self, metric: usize, second: usize) -> &mut [f32] {
        let (at, many) = (self.start(metric, second), self.machines());
        self.values.get_mut(at..at + many).unwrap_or_default()
    }

    /// Returns all samples of one metric, second by second.
    #[must_use]
    pub fn metric(&self, metric: usize) -> &[f32] {
        let at = self.start(metric, 0);
        self.values.get(at..at + self.machines() * self.seconds).unwrap_or_default()
    }

    /// Returns one sample, or NaN if it is missing.
    #[must_use]
    pub fn at(&self, metric: usize, second: usize, machine: usize) -> f32 {
        self.row(metric, second).get(machine).copied().unwrap_or(f32::NAN)
    }

    /// Returns a copy of up to `seconds` seconds, starting at `from`.
    #[must_use]
    pub fn part(&self, from: usize, seconds: usize) -> Series {
        let mut part =
            Series::new(self.metrics.clone(), self.roles.clone(), seconds.min(self.seconds - from.min(self.seconds)));
        part.domains.clone_from(&self.domains);
        for metric in 0..self.metrics.len() {
            for second in 0..part.seconds {
                part.row_mut(metric, second).copy_from_slice(self.row(metric, from + second));
            }
        }
        part
    }
}
