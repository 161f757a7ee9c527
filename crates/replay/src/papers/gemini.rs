//! Gemini's figures 9 to 15, as far as its text gives their numbers.

use super::Row;
use everstep_core::placement::Scheme;
use everstep_core::survival::{survival, wasted_seconds};

/// GPT-2 100B on 16 p4d machines (section 7.1), in seconds.
struct Setting {
    /// The whole checkpoint to storage at 20 Gb/s.
    storage: f64,
    /// To another machine at 400 Gb/s.
    peer: f64,
    /// One iteration.
    step: f64,
    /// `torch.save`, which stops the job.
    save: f64,
    /// Detecting a failure, serialising, warming up, and getting another machine without standby.
    detect: f64,
    serialise: f64,
    warm: f64,
    replace: f64,
}

const GPT2: Setting = Setting {
    storage: 481.0,
    peer: 1.5,
    step: 62.0,
    save: 81.0,
    detect: 15.0,
    serialise: 162.0,
    warm: 240.0,
    replace: 300.0,
};
const MINUTE: f64 = 60.0;
const DAY: f64 = 86_400.0;

/// Returns the share of a day that trains: 1 − stall − failures per day · (wasted + recovery).
fn effective(stall: f64, failures: f64, wasted: f64, recovery: f64) -> f64 {
    1.0 - stall - failures * (wasted + recovery) / DAY
}

/// Returns the rows about the placement of copies.
fn placements() -> Vec<Row> {
    let mut rows = Vec::new();
    let placement = "machines fail at once, any of them as likely";
    for (nodes, k, failed, paper) in [
        (8, 2, 2, 0.8571),
        (8, 2, 3, 0.5714),
        (16, 2, 2, 0.9333),
        (16, 2, 3, 0.8),
        (16, 2, 4, 0.6154),
        (32, 2, 2, 0.9677),
        (32, 2, 3, 0.9032),
        (128, 2, 2, 0.9921),
        (128, 2, 4, 0.9529),
        (16, 3, 3, 0.9857),
        (16, 3, 4, 0.9445),
        (128, 3, 3, 0.9999),
    ] {
        let what = format!("figure 9: {failed} of {nodes} machines, {k} copies in groups");
        rows.push(Row::predicted(what, paper, survival(nodes, k, failed, Scheme::Mixed), placement));
    }
    for (nodes, failed, paper) in [(8, 2, 0.7143), (16, 2, 0.8667), (16, 3, 0.6286), (32, 2, 0.9355), (128, 2, 0.9843)]
    {
        let what = format!("figure 9: {failed} of {nodes} machines, 2 copies in a ring");
        rows.push(Row::predicted(what, paper, survival(nodes, 2, failed, Scheme::Ring), placement));
    }
    rows
}

/// Returns all numbers of the text.
#[must_use]
pub fn rows() -> Vec<Row> {
    let s = &GPT2;
    let recovered = s.detect + s.serialise + s.warm;
    let gemini = wasted_seconds(s.step, s.step, s.step, 0.0);
    let strawman = wasted_seconds(s.storage, 3.0 * 3600.0, s.step, s.storage);
    // As often as storage allows: 8 iterations cover the 481 s. With the 81 s of torch.save before
    // them, it is every 9th iteration.
    let often = wasted_seconds(s.storage, (s.storage / s.step).ceil() * s.step, s.step, s.storage);
    let every = ((s.storage + s.save) / s.step).round();
    let stall = s.save / (every * s.step);
    let mut rows = placements();
    let step = "one iteration takes 62 s (174 of them are 3 h)";
    rows.extend([
        Row::predicted(
            "section 2.2: MT-NLG at 20 Gb/s, wasted on average (min)",
            105.0,
            wasted_seconds(42.0 * MINUTE, 42.0 * MINUTE, 1.0, 42.0 * MINUTE) / MINUTE,
            "checkpoints one after another",
        ),
        Row::predicted("figure 10: Strawman, wasted (min)", 106.0, strawman / MINUTE, "every 3 h, 481 s each way"),
        Row::predicted("figure 10: HighFreq, wasted (min)", 20.2, often / MINUTE, step),
        Row::predicted("figure 10: HighFreq by Gemini", 13.0, often / gemini, step),
        Row::predicted(
            "figure 11: checkpoint to storage by checkpoint to a machine, at least",
            250.0,
            s.storage / s.peer,
            "75 GB at 400 Gb/s: all of the line",
        ),
        Row::predicted("figure 12: Gemini's checkpoints by Strawman's", 174.0, 3.0 * 3600.0 / s.step, step),
        Row::predicted("figure 12: Gemini's by HighFreq's", 9.0, every, step),
        Row::predicted(
            "figure 14: recovery of software (min)",
            7.0,
            recovered / MINUTE,
            "15 s to notice, 162 s to serialise, 4 min to warm up",
        ),
        Row::predicted(
            "figure 14: recovery of hardware without standby (min)",
            12.0,
            (recovered + s.replace) / MINUTE,
            "another machine in 5 min (4 to 7)",
        ),
        Row::predicted(
            "figure 15: HighFreq without failures",
            0.855,
            effective(stall, 0.0, 0.0, 0.0),
            "81 s of 558 s are spent on torch.save",
        ),
        Row::predicted(
            "figure 15b: Gemini, 1000 machines, 1.5 % a day",
            0.91,
            effective(0.0, 15.0, gemini, recovered),
            "15 failures a day, standby machines",
        ),
        Row::predicted(
            "figure 15b: HighFreq, the same",
            0.591,
            effective(stall, 15.0, often, s.detect + s.warm),
            "15 failures a day, standby machines",
        ),
        Row::predicted(
            "figure 15a: Gemini, 8 a day, software",
            0.953,
            effective(0.0, 8.0, gemini, recovered),
            "standby machines",
        ),
        Row::predicted(
            "figure 15a: Gemini, 8 a day, hardware without standby",
            0.925,
            effective(0.0, 8.0, gemini, recovered + s.replace),
            "another machine in 5 min",
        ),
    ]);
    rows
}
