//! CheckFreq's interval and what a failure may cost, as far as its text has numbers (its formula of the bound is a picture).

use super::Row;
use everstep_core::frequency::{Costs, choose};

/// Most work that a failure takes, in iterations: every moment of some cycles is tried. A checkpoint begins every `every` iterations and is
/// written (and may be used) `written` iterations later.
fn worst(every: u64, written: f64) -> f64 {
    let cycle = every as f64;
    // In thousandths of an iteration, from when the first checkpoint is there.
    let moments = (0..every * 4000).map(|m| written + m as f64 / 1000.0);
    let lost = |at: f64| {
        let begun = ((at - written) / cycle).floor();
        at - begun * cycle
    };
    moments.map(lost).fold(0.0, f64::max)
}

/// All numbers of the text.
#[must_use]
pub fn rows() -> Vec<Row> {
    // A stall of one iteration, and 5 % of the time for it.
    let costs = Costs { iteration: 1.0, update: 0.0, host_copy: 1.0, write: 0.0, device_copy: None };
    let every = choose(&costs, 0.05).every;
    // Writing takes as long as it may: all of an interval.
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
