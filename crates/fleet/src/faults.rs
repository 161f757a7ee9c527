//! The fault of an episode: its kind, which metrics show it and how, its effect on the other
//! machines, and its end.

use super::deviation::{Deviation, How, metrics_of, named};
use super::ranges::{FAULTS, Kind, Ranges};
use super::{METRICS, Matrix, Recipe, Truth};
use everstep_detector::Family;
use everstep_rng::Rng;
use std::collections::BTreeMap;

/// Returns the probability that each kind of metric shows this fault.
fn shows(kind: &Kind, matrix: Matrix) -> BTreeMap<String, f64> {
    let mut all = kind.shows.clone();
    match matrix {
        Matrix::Ours => {}
        Matrix::Faint => all.values_mut().for_each(|p| *p *= 0.6),
        Matrix::Random => {
            // The seed is derived from the kind's name, so that all episodes share the
            // probabilities.
            let seed = kind.kind.bytes().fold(7u64, |seed, b| seed.wrapping_mul(31).wrapping_add(b.into()));
            let mut own = Rng::new(seed);
            let sum: f64 = all.values().sum();
            let parts: Vec<f64> = all.values().map(|_| -libm::log(own.open())).collect();
            let whole: f64 = parts.iter().sum();
            all.values_mut().zip(parts).for_each(|(p, part)| *p = (part / whole * sum).min(0.95));
        }
    }
    all
}

fn kind(rng: &mut Rng) -> &'static Kind {
    let mut at = rng.open() * FAULTS.iter().map(|k| k.percent).sum::<f64>();
    let drawn = FAULTS.iter().find(|k| {
        at -= k.percent;
        at <= 0.0
    });
    drawn.unwrap_or(&FAULTS[0])
}

/// How a metric shows the fault: computing and sending decrease, pauses and disk accesses increase,
/// and CPU and memory do either.
fn tells(rng: &mut Rng, of_kind: &str, size: f64) -> How {
    let size = size as f32;
    match of_kind {
        "pfc" => How::More(0.04 + 0.8 * size),
        "disk" => How::More(0.5 * size),
        "cpu" if rng.chance(0.3) => How::More(0.6 * size),
        "memory" if rng.chance(0.3) => How::More(0.4 * size),
        _ => How::Times(1.0 - size),
    }
}

/// Draws a fault, and its effect on the samples.
pub(super) fn drawn(rng: &mut Rng, recipe: &Recipe, roles: &[u32], of: &Ranges) -> (Truth, Vec<Deviation>) {
    let (kind, machines) = (kind(rng), roles.len());
    let onset = rng.between(of.onset_s) as usize;
    let lasts = rng.log_normal(of.fault.median_s, of.fault.spread).max(30.0) as usize;
    let end = (onset + lasts).min(of.seconds);
    let count = recipe.bad.min(machines);
    let first = rng.range(0, (machines - count + 1) as u64) as usize;
    let mut bad: Vec<usize> = Vec::new();
    while bad.len() < count {
        let next = if recipe.switch { first + bad.len() } else { rng.range(0, machines as u64) as usize };
        if !bad.contains(&next) {
            bad.push(next);
        }
    }
    bad.sort_unstable();
    let (mut deviations, mut visible) = (Vec::new(), false);
    let told_by = shows(kind, recipe.matrix);
    // The metrics that show the fault are drawn once, its size for each machine.
    let told: Vec<&str> = told_by.iter().filter(|(_, p)| rng.chance(**p)).map(|(name, _)| name.as_str()).collect();
    let gone: Vec<&str> =
        kind.vanishes.iter().filter(|(_, p)| rng.chance(**p)).map(|(name, _)| name.as_str()).collect();
    // An unreachable machine reports no metric at all.
    let unreachable = kind.kind == "unreachable" && !gone.is_empty();
    let size = rng.log_between(of.fault.size);
    let ramp = rng.between(of.fault.ramp_s) as usize;
    for machine in &bad {
        for (metric, (_, of_kind, ..)) in METRICS.iter().enumerate() {
            let span = onset..end;
            if unreachable || gone.contains(of_kind) {
                deviations.push(Deviation::of(*machine, vec![metric], span.clone(), How::Gone));
                visible = true;
            } else if told.contains(of_kind) {
                let here = (size * rng.between([0.7, 1.3])).min(1.0);
                let how = tells(rng, of_kind, here);
                deviations.push(Deviation { ramp, ..Deviation::of(*machine, vec![metric], span, how) });
                visible = true;
            }
        }
    }
    if kind.spreads {
        let (later, much) = (rng.between(of.fault.spread_after_s) as usize, rng.between(of.fault.spread_size));
        let slowed: Vec<usize> =
            [Family::Gpu, Family::Link].into_iter().flat_map(metrics_of).chain(named(&["net"])).collect();
        let slower = Deviation::of(0, slowed, onset + later..end, How::Times(1.0 - much as f32));
        deviations.push(Deviation { machine: None, but: bad.clone(), ramp: 10, ..slower });
    }
    if end < of.seconds && rng.chance(of.fault.halt) {
        // A collective times out, and all machines stop working.
        let busy = [Family::Gpu, Family::Link, Family::Net].into_iter().flat_map(metrics_of).chain(named(&["cpu"]));
        deviations
            .push(Deviation { machine: None, ..Deviation::of(0, busy.collect(), end..of.seconds, How::Times(0.02)) });
    }
    (Truth { bad, kind: &kind.kind, onset, end, visible }, deviations)
}
