//! What a machine's device counters reveal about its health. A change for the worse becomes a line
//! of text, which the failure table reads like a line of the kernel log.
//!
//! A condition that existed before the job never excludes a node from it: only changes for the
//! worse are reported.

use std::collections::BTreeMap;

/// A counter or state of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    /// 1: the device no longer responds.
    Lost,
    /// Uncorrectable memory errors since the driver was loaded.
    Uncorrected,
    /// 1: a memory row will be remapped at the next reset.
    RemapPending,
    /// Memory rows that could not be remapped because no spare row was left.
    RemapFailed,
    /// Degrees Celsius.
    Temperature,
    /// 1: the hardware throttles itself because it is too hot.
    TooHot,
    /// 1: the hardware throttles itself because its power supply requests it.
    PowerBrake,
    /// Links to other devices that are up.
    LinksUp,
    /// PCIe lanes to the host that are in use.
    Lanes,
}

/// One value, read at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// PCI address of the device in the kernel's notation: `0000:3b:00`.
    pub device: String,
    /// Kind of the measurement.
    pub metric: Metric,
    /// The value, in the metric's unit.
    pub value: u64,
}

/// The latest values of a machine's devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health(BTreeMap<(String, Metric), u64>);

impl Health {
    /// Records new samples and returns what has become worse, as pairs of device and line.
    pub fn take(&mut self, samples: &[Sample]) -> Vec<(String, String)> {
        let hot = |device: &str| samples.iter().find(|s| s.device == device && s.metric == Metric::Temperature);
        let mut worse = Vec::new();
        for Sample { device, metric, value } in samples {
            let Some(before) = self.0.insert((device.clone(), *metric), *value).filter(|before| before != value) else {
                continue;
            };
            let (more, less) = (value.saturating_sub(before), before.saturating_sub(*value));
            let line = match metric {
                Metric::Lost if more > 0 => "the GPU is lost: it no longer responds".to_owned(),
                Metric::Uncorrected if more > 0 => format!("GPU memory error count rose by {more} (uncorrected)"),
                Metric::RemapPending if more > 0 => "GPU memory row will be remapped at the next reset".to_owned(),
                Metric::RemapFailed if more > 0 => {
                    "row remapping failed: the GPU's memory has no spare row left".to_owned()
                }
                Metric::TooHot if more > 0 => {
                    let degrees = hot(device).map_or(String::new(), |s| format!(" at {} degrees", s.value));
                    format!("GPU slowed by its hardware{degrees}: too hot")
                }
                Metric::PowerBrake if more > 0 => "GPU slowed by its hardware: power brake".to_owned(),
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
