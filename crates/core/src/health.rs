//! What the counters of a machine's devices say of their health: a change for the worse becomes a line, which the table of signs reads like
//! a line of the kernel.
//!
//! What was so before the job is never a reason to leave a node out of it: only what gets worse is told.

use std::collections::BTreeMap;

/// What is counted of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    /// 1: the device does not answer any more.
    Lost,
    /// Errors of memory that could not be corrected, since the driver was loaded.
    Uncorrected,
    /// 1: a row of memory is replaced at the next reset.
    RemapPending,
    /// Rows of memory for which no replacement was left.
    RemapFailed,
    /// Degrees Celsius.
    Temperature,
    /// 1: the hardware itself runs slower, so as not to get too hot.
    TooHot,
    /// 1: the hardware itself runs slower, since its power supply asks for that.
    PowerBrake,
    /// Links to other devices that are up.
    LinksUp,
    /// Lanes to the host that are in use.
    Lanes,
}

/// One value, read at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The device, as the kernel writes it: `0000:3b:00`.
    pub device: String,
    /// what was read
    pub metric: Metric,
    /// in the metric's unit
    pub value: u64,
}

/// The latest values of a machine's devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health(BTreeMap<(String, Metric), u64>);

impl Health {
    /// Takes what was read now; what has become worse, as device and line.
    pub fn take(&mut self, samples: &[Sample]) -> Vec<(String, String)> {
        let hot = |device: &str| samples.iter().find(|s| s.device == device && s.metric == Metric::Temperature);
        let mut worse = Vec::new();
        for Sample { device, metric, value } in samples {
            let Some(before) = self.0.insert((device.clone(), *metric), *value).filter(|before| before != value) else {
                continue;
            };
            let (more, less) = (value.saturating_sub(before), before.saturating_sub(*value));
            let line = match metric {
                Metric::Lost if more > 0 => "the GPU is lost: it does not answer any more".to_owned(),
                Metric::Uncorrected if more > 0 => format!("GPU memory error count rose by {more} (not corrected)"),
                Metric::RemapPending if more > 0 => "GPU memory row is replaced at the next reset".to_owned(),
                Metric::RemapFailed if more > 0 => {
                    "row remapping failed: the GPU's memory has no spare row left".to_owned()
                }
                Metric::TooHot if more > 0 => {
                    let degrees = hot(device).map_or(String::new(), |s| format!(" at {} degrees", s.value));
                    format!("GPU slowed by its hardware{degrees}: too hot")
                }
                Metric::PowerBrake if more > 0 => "GPU slowed by its hardware: the power supply asks for it".to_owned(),
                Metric::LinksUp if less > 0 => format!("NVLink link down: {value} of {before} links are up"),
                Metric::Lanes if less > 0 => format!("GPU slowed: it uses {value} instead of {before} PCIe lanes"),
                _ => continue,
            };
            worse.push((device.clone(), format!("NVML (PCI:{device}): {line}")));
        }
        worse
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::severity::{Severity, Table};

    fn sample(metric: Metric, value: u64) -> Sample {
        Sample { device: "0000:3b:00".into(), metric, value }
    }

    #[test]
    fn what_gets_worse_has_a_class_and_what_was_so_before_has_none() {
        let cases = [
            (Metric::Lost, 0, 1, "gpu-lost", Severity::Sev1),
            (Metric::Uncorrected, 3, 4, "gpu-notice", Severity::Sev3),
            (Metric::RemapPending, 0, 1, "gpu-notice", Severity::Sev3),
            (Metric::RemapFailed, 0, 1, "gpu-memory", Severity::Sev1),
            (Metric::TooHot, 0, 1, "gpu-slowed", Severity::Sev3),
            (Metric::PowerBrake, 0, 1, "gpu-slowed", Severity::Sev3),
            (Metric::LinksUp, 18, 17, "nvlink", Severity::Sev1),
            (Metric::Lanes, 16, 8, "gpu-slowed", Severity::Sev3),
        ];
        for (metric, before, after, class, severity) in cases {
            let mut health = Health::default();
            assert!(health.take(&[sample(metric, after)]).is_empty(), "{metric:?} at the start");
            health.take(&[sample(metric, before)]);
            let worse = health.take(&[sample(metric, after)]);
            let sign = Table::built_in().sign(&worse[0].1).unwrap();
            assert_eq!((sign.verdict.class.as_str(), sign.verdict.severity), (class, severity), "{}", worse[0].1);
            assert!(health.take(&[sample(metric, after)]).is_empty(), "{metric:?} is told once");
            assert!(health.take(&[sample(metric, before)]).is_empty(), "{metric:?} is well again");
        }
    }

    #[test]
    fn heat_alone_is_no_news() {
        let mut health = Health::default();
        health.take(&[sample(Metric::Temperature, 40), sample(Metric::TooHot, 0)]);
        assert!(health.take(&[sample(Metric::Temperature, 80), sample(Metric::TooHot, 0)]).is_empty());
        let worse = health.take(&[sample(Metric::Temperature, 91), sample(Metric::TooHot, 1)]);
        assert!(worse[0].1.contains("at 91 degrees"));
    }
}
