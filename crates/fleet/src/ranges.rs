//! The parameters of generated fleets, read from `ranges.toml` and `faults.toml`.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// All ranges. The comments of `ranges.toml` explain them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Ranges {
    pub seconds: usize,
    pub onset_s: [f64; 2],
    pub machines: [f64; 2],
    pub roles: Vec<u32>,
    pub job: Job,
    pub machine: Machine,
    pub jitter: Jitter,
    pub innocent: Innocent,
    pub fault: Fault,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Job {
    pub period_s: [f64; 2],
    pub wave: [f64; 2],
    pub drift: f64,
    pub checkpoint_every_s: [f64; 2],
    pub checkpoint_s: [f64; 2],
    pub evaluation: f64,
    pub evaluation_s: [f64; 2],
    pub warm_up: f64,
    pub warm_up_s: [f64; 2],
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Machine {
    pub role_spread: [f64; 2],
    pub spread: [f64; 2],
    pub noise: [f64; 2],
    pub memory: [f64; 2],
    pub skew_s: usize,
    pub missing: Vec<f64>,
    pub joins: f64,
    pub glitch: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Jitter {
    pub per_machine_day: [f64; 2],
    pub median_s: f64,
    pub spread: f64,
    pub longest_s: f64,
    pub size: [f64; 2],
    pub one_metric: f64,
    pub one_family: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Innocent {
    pub writer: f64,
    pub loader: f64,
    pub loader_size: [f64; 2],
    pub evaluator: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Fault {
    pub median_s: f64,
    pub spread: f64,
    pub ramp_s: [f64; 2],
    pub size: [f64; 2],
    pub halt: f64,
    pub spread_after_s: [f64; 2],
    pub spread_size: [f64; 2],
}

/// A kind of fault. The comments of `faults.toml` explain the fields.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kind {
    pub kind: String,
    /// Its share of all faults, in percent.
    pub percent: f64,
    /// The probability that each kind of metric shows it.
    pub shows: BTreeMap<String, f64>,
    /// The probability that each kind of metric goes missing.
    #[serde(default)]
    pub vanishes: BTreeMap<String, f64>,
    /// Whether it slows down the other machines.
    #[serde(default)]
    pub spreads: bool,
}

#[derive(Deserialize)]
struct Faults {
    fault: Vec<Kind>,
}

fn parsed<T: serde::de::DeserializeOwned>(name: &str, text: &str) -> T {
    match toml::from_str(text) {
        Ok(read) => read,
        Err(e) => panic!("internal error: the built-in {name} is invalid: {e}"),
    }
}

/// The contents of `ranges.toml`.
pub static RANGES: LazyLock<Ranges> = LazyLock::new(|| parsed("ranges.toml", include_str!("ranges.toml")));

/// The contents of `faults.toml`.
pub static FAULTS: LazyLock<Vec<Kind>> =
    LazyLock::new(|| parsed::<Faults>("faults.toml", include_str!("faults.toml")).fault);
