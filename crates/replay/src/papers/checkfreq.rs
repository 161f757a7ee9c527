//! CheckFreq's interval and the cost of a failure, as far as its text gives numbers (the formula of
//! its bound is an image).

use super::Row;
use everstep_core::frequency::{Costs, choose};

/// Returns the most work that a failure loses, in iterations, over every moment of several cycles.
/// A checkpoint begins every `every` iterations and is usable `written` iterations later.
fn worst(every: u64, written: f64) -> f64 {
    let cycle = every as f64;
    // In thousandths of an iteration, from the time at which the first checkpoint is usable.
    let moments = (0..every * 4000).map(|m| written + m as f64 / 1000.0);
    let lost = |at: f64| {
        let begun = ((at - written) / cycle).floor();
        at - begun * cycle
    };
    moments.map(lost).fold(0.0, f64::max)
}

/// Returns all numbers of the text.
#[must_use]
pub fn rows() -> Vec<Row> {
    // A stall of one iteration, with a budget of 5 % of the time.
    let costs = Costs { iteration: 1.0, update: 0.0, host_copy: 1.0, write: 0.0, device_copy: None };
    let every = choose(&costs, 0.05).every;
    // Writing takes as long as it may: a whole interval.
    let slow = Costs { host_copy: 0.0, write: 20.0, ..costs };
    let bounded = choose(&slow, 0.05).every;
    let within = "at most one checkpoint behind the last one that was begun";
    vec![
        Row::predicted(
            "section 4.2: iterations between checkpoints, stall of 1 iteration, 5 %",
            20.0,
            every as f64,
            "-",
        ),
        Row::predicted(
            "section 4.2: most work lost, in intervals",
            2.0,
            worst(bounded, bounded as f64) / bounded as f64,
            within,
        ),
        Row::predicted(
            "section 4.2: the same where writing takes no time",
            1.0,
            worst(every, 0.0) / every as f64,
            within,
        ),
    ]
}
