//! The known metrics: their families, in which direction they get worse, and which differences are
//! negligible (`catalogue.toml`).

use crate::{Family, Metric, Worse};
use serde::Deserialize;
use std::sync::LazyLock;

/// A known metric.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    /// Name of the metric in everstep.
    pub name: String,
    /// What the metric is about.
    pub family: Family,
    /// The direction in which it gets worse.
    pub worse: Worse,
    /// The unit, for display.
    pub unit: String,
    /// Differences below this are negligible, in `unit`.
    pub floor: f32,
    /// The Prometheus query, if exporters provide this metric.
    pub prometheus: Option<String>,
}

impl Known {
    /// Returns the metric in the form that a [`Series`](crate::Series) uses.
    #[must_use]
    pub fn metric(&self) -> Metric {
        Metric { name: self.name.clone(), family: self.family, worse: self.worse, floor: self.floor }
    }
}

#[derive(Deserialize)]
struct Catalogue {
    metric: Vec<Known>,
}

/// All known metrics. Their order must not change: messages identify a metric by its index.
pub static KNOWN: LazyLock<Vec<Known>> =
    LazyLock::new(|| match toml::from_str::<Catalogue>(include_str!("catalogue.toml")) {
        Ok(read) => read.metric,
        Err(e) => panic!("internal error: the built-in catalogue.toml is invalid: {e}"),
    });

/// Returns the index of the metric with this name.
#[must_use]
pub fn number(name: &str) -> Option<usize> {
    KNOWN.iter().position(|k| k.name == name)
}

/// Returns a metric for this name, and whether the name was recognized: by the catalogue, or by a
/// word in it. An unrecognized metric is assigned to the host, and both directions count as worse.
#[must_use]
pub fn by_name(name: &str) -> (Metric, bool) {
    let lower = name.to_ascii_lowercase().replace(['_', '.', ' '], "-");
    if let Some(known) = number(&lower).and_then(|at| KNOWN.get(at)) {
        // A table may use other units, so the floor does not apply.
        return (Metric { name: name.into(), floor: 0.0, ..known.metric() }, true);
    }
    let has = |words: &[&str]| words.iter().any(|w| lower.contains(w));
    let of = match () {
        () if has(&["pfc", "pause", "ecn", "cnp", "retrans", "drop"]) => Some((Family::Net, Worse::More)),
        () if has(&["nvlink", "pcie"]) => Some((Family::Link, Worse::Less)),
        () if has(&["temperature", "temp"]) => Some((Family::Gpu, Worse::More)),
        () if has(&["gpu", "tensor", "sm-", "graphics", "power", "cuda"]) => Some((Family::Gpu, Worse::Less)),
        () if has(&["net", "tcp", "rdma", "nic", "throughput"]) => Some((Family::Net, Worse::Less)),
        () if has(&["step", "iteration"]) => Some((Family::Step, Worse::More)),
        () if has(&["cpu", "mem", "disk", "load"]) => Some((Family::Host, Worse::Either)),
        () => None,
    };
    let (family, worse) = of.unwrap_or((Family::Host, Worse::Either));
    (Metric { name: name.into(), family, worse, floor: 0.0 }, of.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_however_they_are_written() {
        assert!(KNOWN.len() >= 20);
        let mut names: Vec<&str> = KNOWN.iter().map(|k| k.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), KNOWN.len());
        assert_eq!(by_name("GPU_Duty").0.family, Family::Gpu);
        assert_eq!(by_name("PFC Tx packet rate").0.worse, Worse::More);
        assert_eq!((by_name("fan").0.family, by_name("fan").1), (Family::Host, false));
    }
}
