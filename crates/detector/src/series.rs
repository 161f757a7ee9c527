//! What machines of one job have told of themselves, second by second.

use serde::{Deserialize, Serialize};

/// What a metric is about. Metrics of one family fail together; two families that agree are two witnesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// CPU, memory, disk.
    Host,
    /// Utilisation, power, tensor activity, clocks, temperature.
    Gpu,
    /// NVLink, PCIe.
    Link,
    /// The network between machines.
    Net,
    /// Step times of the job itself.
    Step,
}

/// In which direction a metric gets worse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Worse {
    /// Throughput, utilisation.
    Less,
    /// Pauses, temperature, time.
    More,
    /// A CPU that idles, and one that spins.
    #[default]
    Either,
}

/// One metric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// As the source calls it.
    pub name: String,
    /// What it is about.
    pub family: Family,
    /// When it is worse.
    #[serde(default)]
    pub worse: Worse,
    /// In its unit: what differs by less does not differ. 0: only shares of the usual level count.
    #[serde(default)]
    pub floor: f32,
}

/// Samples at 1 Hz. What is missing is not a number.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// What is measured.
    pub metrics: Vec<Metric>,
    /// By machine: machines of one role do the same (pipeline stage, kind of host), and are compared with each other only.
    pub roles: Vec<u32>,
    /// By machine: what fails together (a switch, a rack). Empty where that is not known.
    pub domains: Vec<u32>,
    seconds: usize,
    /// By metric, then second, then machine: a second's peers lie beside each other.
    values: Vec<f32>,
}

impl Series {
    /// Of so many seconds, all missing.
    #[must_use]
    pub fn new(metrics: Vec<Metric>, roles: Vec<u32>, seconds: usize) -> Series {
        let values = vec![f32::NAN; metrics.len() * roles.len() * seconds];
        Series { metrics, roles, domains: Vec::new(), seconds, values }
    }

    /// How many machines.
    #[must_use]
    pub fn machines(&self) -> usize {
        self.roles.len()
    }

    /// How long.
    #[must_use]
    pub fn seconds(&self) -> usize {
        self.seconds
    }

    fn start(&self, metric: usize, second: usize) -> usize {
        (metric * self.seconds + second) * self.machines()
    }

    /// All machines in one second. Empty where there is no such metric or second.
    #[must_use]
    pub fn row(&self, metric: usize, second: usize) -> &[f32] {
        let at = self.start(metric, second);
        self.values.get(at..at + self.machines()).unwrap_or_default()
    }

    /// See [`Series::row`].
    pub fn row_mut(&mut self, metric: usize, second: usize) -> &mut [f32] {
        let (at, many) = (self.start(metric, second), self.machines());
        self.values.get_mut(at..at + many).unwrap_or_default()
    }

    /// All seconds of one metric, one row after the other.
    #[must_use]
    pub fn metric(&self, metric: usize) -> &[f32] {
        let at = self.start(metric, 0);
        self.values.get(at..at + self.machines() * self.seconds).unwrap_or_default()
    }

    /// One sample; not a number where it is missing.
    #[must_use]
    pub fn at(&self, metric: usize, second: usize, machine: usize) -> f32 {
        self.row(metric, second).get(machine).copied().unwrap_or(f32::NAN)
    }

    /// Some seconds of it.
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
