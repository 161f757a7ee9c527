//! Deviations of single machines from the others for a while: jitter, harmless stragglers, machines
//! that join late, glitches, and faults.

use super::METRICS;
use super::profile::Profile;
use super::ranges::Ranges;
use everstep_detector::{Family, Series};
use everstep_rng::Rng;
use std::ops::Range;

/// How values are changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum How {
    /// Multiplied by this factor.
    Times(f32),
    /// Increased by this share of the metric's maximum.
    More(f32),
    /// Missing.
    Gone,
}

/// A change to some metrics of one machine, or of all, for a while.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Deviation {
    /// The affected machine. `None` means all machines except those in `but`.
    pub machine: Option<usize>,
    pub but: Vec<usize>,
    pub metrics: Vec<usize>,
    pub from: usize,
    pub until: usize,
    /// Seconds until the change reaches its full size.
    pub ramp: usize,
    pub how: How,
}

impl Deviation {
    pub(super) fn of(machine: usize, metrics: Vec<usize>, span: Range<usize>, how: How) -> Deviation {
        let Range { start: from, end: until } = span;
        Deviation { machine: Some(machine), but: Vec::new(), metrics, from, until, ramp: 0, how }
    }

    /// Returns a gap in all metrics of a machine.
    pub(super) fn gone(machine: usize, from: usize, until: usize) -> Deviation {
        Deviation::of(machine, (0..METRICS.len()).collect(), from..until, How::Gone)
    }

    pub(super) fn apply(&self, series: &mut Series, rng: &mut Rng) {
        let until = self.until.min(series.seconds());
        for metric in &self.metrics {
            for second in self.from..until {
                let grown = ((second - self.from + 1) as f32 / (self.ramp + 1) as f32).min(1.0);
                // The size varies from second to second.
                let now = grown * (1.0 + 0.1 * super::noise(rng));
                let changed = |value: f32| match self.how {
                    How::Times(times) => (value * (1.0 + (times - 1.0) * now)).clamp(0.0, 1.0),
                    How::More(more) => (value + more * now).clamp(0.0, 1.0),
                    How::Gone => f32::NAN,
                };
                let row = series.row_mut(*metric, second);
                match self.machine {
                    Some(machine) => row.iter_mut().skip(machine).take(1).for_each(|v| *v = changed(*v)),
                    None => {
                        let others = row.iter_mut().enumerate().filter(|(m, _)| !self.but.contains(m));
                        others.for_each(|(_, v)| *v = changed(*v));
                    }
                }
            }
        }
    }
}

pub(super) fn metrics_of(family: Family) -> Vec<usize> {
    (0..METRICS.len()).filter(|m| METRICS[*m].2 == family).collect()
}

pub(super) fn named(names: &[&str]) -> Vec<usize> {
    (0..METRICS.len()).filter(|m| names.contains(&METRICS[*m].0)).collect()
}

const FAMILIES: [Family; 4] = [Family::Host, Family::Gpu, Family::Link, Family::Net];

/// Returns all deviations that are not faults.
pub(super) fn harmless(rng: &mut Rng, profile: &Profile, machines: usize, of: &Ranges) -> Vec<Deviation> {
    let mut all = jitters(rng, machines, of);
    let any = |rng: &mut Rng| rng.range(0, machines as u64) as usize;
    if rng.chance(of.innocent.writer) {
        for span in &profile.checkpoints {
            all.push(Deviation::of(0, named(&["disk", "net"]), span.0..span.1, How::More(0.3)));
            all.push(Deviation::of(0, named(&["cpu"]), span.0..span.1, How::More(0.2)));
        }
    }
    if rng.chance(of.innocent.loader) {
        let (machine, size) = (any(rng), rng.between(of.innocent.loader_size));
        all.push(Deviation::of(machine, named(&["cpu"]), 0..of.seconds, How::More(size as f32)));
    }
    if let Some(span) = profile.evaluation
        && rng.chance(of.innocent.evaluator)
    {
        // The other machines wait for the evaluator.
        let machine = any(rng);
        let gpu = metrics_of(Family::Gpu);
        all.push(Deviation {
            machine: None,
            but: vec![machine],
            ..Deviation::of(0, gpu, span.0..span.1, How::Times(0.5))
        });
    }
    if rng.chance(of.machine.joins) {
        all.push(Deviation::gone(any(rng), 0, rng.range(10, 300) as usize));
    }
    let glitches = of.machine.glitch * (machines * of.seconds * METRICS.len()) as f64;
    for _ in 0..drawn_count(rng, glitches) {
        let (metric, from) = (rng.range(0, METRICS.len() as u64) as usize, rng.range(0, of.seconds as u64) as usize);
        let times = if rng.chance(0.5) { 0.0 } else { 10.0 };
        all.push(Deviation::of(any(rng), vec![metric], from..from + 1, How::Times(times)));
    }
    all
}

/// Draws a count from a Poisson distribution with this mean.
fn drawn_count(rng: &mut Rng, mean: f64) -> usize {
    let mut left = mean;
    let mut count = 0;
    loop {
        left += libm::log(rng.open());
        if left <= 0.0 {
            return count;
        }
        count += 1;
    }
}

fn jitters(rng: &mut Rng, machines: usize, of: &Ranges) -> Vec<Deviation> {
    let jitter = &of.jitter;
    let days = (machines * of.seconds) as f64 / 86_400.0;
    let mean = days * rng.between(jitter.per_machine_day);
    let mut all = Vec::new();
    for _ in 0..drawn_count(rng, mean) {
        let machine = rng.range(0, machines as u64) as usize;
        let from = rng.range(0, of.seconds as u64) as usize;
        let lasts = rng.log_normal(jitter.median_s, jitter.spread).clamp(1.0, jitter.longest_s) as usize;
        let kind = rng.open();
        let mut families = FAMILIES.to_vec();
        let mut family = |rng: &mut Rng| families.swap_remove(rng.range(0, families.len() as u64) as usize);
        let metrics = if kind < jitter.one_metric {
            vec![rng.range(0, METRICS.len() as u64) as usize]
        } else {
            let several = if kind < jitter.one_metric + jitter.one_family { 1 } else { rng.range(2, 4) };
            (0..several).flat_map(|_| metrics_of(family(rng))).collect()
        };
        for metric in metrics {
            let size = rng.between(jitter.size) as f32;
            let how = if rng.chance(0.5) { How::Times(1.0 - size) } else { How::Times(1.0 + size) };
            all.push(Deviation::of(machine, vec![metric], from..from + lasts, how));
        }
    }
    all
}
