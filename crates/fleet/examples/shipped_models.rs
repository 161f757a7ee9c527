//! Trains the models that ship with everstep on generated fleets, and writes them to a file:
//!
//! ```text
//! cargo run --release -p everstep-fleet --example shipped_models -- \
//!     6 crates/everstep/src/detect/models.json
//! ```

use everstep_detector::lstm_vae::Training;
use everstep_detector::models::Models;
use everstep_detector::{Series, priority};
use everstep_fleet::{Episode, Matrix, Recipe, generate};
use std::error::Error;

/// The first seed of the normal episodes, in the development split.
const TAUGHT: u64 = 2_000_000;
/// Faulty episodes per normal one, used to order the metrics.
const FAULTY: u64 = 10;
/// The best threshold and continuity on the development episodes (docs/benchmarks/detector.md).
const THRESHOLD: f32 = 1.875;
const CONTINUITY: usize = 180;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [episodes, output] = &arguments[..] else {
        return Err("usage: shipped_models EPISODES FILE".into());
    };
    let episodes: u64 = episodes.parse()?;
    let recipe = |bad| Recipe { machines: Some(64), roles: Some(1), matrix: Matrix::Ours, bad, switch: false };
    let normal: Vec<Series> = (0..episodes).map(|seed| generate(&recipe(0), TAUGHT + seed).series).collect();
    let how = Training { seed: 1, ..Training::default() };
    let about = format!("{episodes} generated normal episodes of 64 machines");
    let mut models = Models::trained(&normal, &how, None, &about)?;
    let faulty: Vec<Episode> = (0..FAULTY * episodes).map(|seed| generate(&recipe(1), seed)).collect();
    let faults = |of: &Episode| of.truth.iter().map(|t| (t.onset, t.end)).collect();
    let known: Vec<_> = faulty.iter().map(|of| (&of.series, faults(of))).collect();
    priority::put_in_order(&mut models, &known);
    (models.when.threshold, models.when.seconds, models.general) = (THRESHOLD, CONTINUITY, true);
    std::fs::write(output, models.written())?;
    Ok(())
}
