//! What `everstep detect` finds in samples.

use schemars::JsonSchema;
use serde::Serialize;

/// What `everstep detect run --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Detected {
    /// Version of this document: 1.
    pub version: u32,
    /// The alarms, by episode, then by time.
    pub alarms: Vec<Alarm>,
}

/// Machines that behave unlike their peers.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Alarm {
    /// The episode; empty if the samples do not name one.
    pub episode: String,
    /// The machines.
    pub machines: Vec<String>,
    /// When the alarm was raised, in seconds on the clock of the samples (usually since 1970).
    pub at: i64,
    /// When any of the machines last deviated, on the same clock.
    pub until: i64,
    /// The metrics that deviate, clearest first; empty: samples stopped arriving.
    pub metrics: Vec<String>,
    /// Size of the deviation, as a multiple of the usual spread; null: infinite.
    pub score: Option<f64>,
    /// Whether a whole group deviates (a switch, a rack, a role), which points to a shared cause.
    pub group: bool,
}

/// What `everstep detect eval --json` prints.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Evaluated {
    /// Version of this document: 1.
    pub version: u32,
    /// Share of correct detections, `right / (right + wrong)`; null: nothing was reported.
    pub precision: Option<f64>,
    /// Share of the faults that were found; null: there were no faults.
    pub recall: Option<f64>,
    /// Harmonic mean of precision and recall; null if either is.
    pub f1: Option<f64>,
    /// Number of faults found.
    pub right: usize,
    /// Number of machines reported without a fault.
    pub wrong: usize,
    /// Number of faults missed.
    pub missed: usize,
    /// Median time from the start of a fault to its first alarm, in seconds; null: no fault was
    /// found.
    pub delay_median_s: Option<f64>,
    /// Machine-days examined.
    pub machine_days: f64,
    /// `wrong` per 1,000 machine-days.
    pub false_alarms_per_1000_machine_days: f64,
    /// The alarms.
    pub alarms: Vec<Alarm>,
}
