//! Minder (Deng et al.): a model smooths the windows of one metric, and a machine whose windows
//! stay unlike all others' for minutes is bad.
//!
//! ```text
//!  Series ─ prepare ─> windows ─ embedding (as they are, or reconstructed by the LSTM-VAE) ─ similarity ─> candidates ─ continuity ─> verdict
//! ```

mod continuity;
mod moments;
mod similarity;

pub use continuity::Continuity;
pub use similarity::{Candidate, Distance, candidate, outlier};

use crate::lstm_vae::{Model, WINDOW};
use crate::prepare::{Limits, prepared};
use crate::{Series, Verdict};

/// The representation of a machine's window.
#[derive(Clone, Copy, Debug)]
pub enum Embedding<'m> {
    /// The samples themselves (RAW).
    Raw,
    /// Mean, variance, skewness, and kurtosis of the samples, scaled by their covariance
    /// (Mahalanobis).
    Moments,
    /// Each metric on its own, reconstructed by its own model (Minder).
    Each(&'m [Model]),
    /// The same, but the windows of all metrics together form one point (CON).
    Joined(&'m [Model]),
    /// One model for all metrics (INT).
    Whole(&'m Model),
}

/// The machine least like the others in each window, by metric (a single list if all metrics are
/// examined together).
#[derive(Clone, Debug, PartialEq)]
pub struct Candidates {
    /// Seconds between windows.
    pub stride: usize,
    /// By metric, then by window.
    pub by_metric: Vec<Vec<Option<Candidate>>>,
}

/// Returns the machines that have samples; the others offer nothing to compare.
fn present(rows: &[f32], machines: usize) -> Vec<usize> {
    (0..machines).filter(|m| rows.get(*m).is_some_and(|v| v.is_finite())).collect()
}

/// Examines all windows; `limits` has one entry per metric.
#[must_use]
pub fn candidates(
    series: &Series,
    limits: &[Limits],
    embedding: Embedding<'_>,
    of: Distance,
    stride: usize,
) -> Candidates {
    let ready: Vec<Vec<f32>> =
        limits.iter().enumerate().map(|(metric, limits)| prepared(series, metric, *limits)).collect();
    let machines = series.machines();
    let there = ready.first().map_or_else(Vec::new, |rows| present(rows, machines));
    let starts = || (0..(series.seconds() + 1).saturating_sub(WINDOW)).step_by(stride.max(1));
    // By second of the window (or index in the embedding), then by machine.
    let raw = |metric: usize, start: usize| -> Vec<Vec<f32>> {
        let row = |second: usize| there.iter().map(|m| ready[metric][second * machines + m]).collect();
        (start..start + WINDOW).map(row).collect()
    };
    let named = |found: Option<Candidate>| {
        found.and_then(|c| Some(Candidate { machine: *there.get(c.machine as usize)? as u32, ..c }))
    };
    let together = |start: usize, models: &[Model]| -> Vec<Vec<f32>> {
        (0..ready.len()).flat_map(|metric| models[metric].rewritten(&[raw(metric, start)])).collect()
    };
    let by_metric = match embedding {
        Embedding::Raw => {
            let of_metric = |metric| starts().map(|s| named(candidate(of, &raw(metric, s)))).collect();
            (0..ready.len()).map(of_metric).collect()
        }
        Embedding::Moments => {
            let of_metric = |metric| starts().map(|s| named(candidate(of, &moments::of(&raw(metric, s))))).collect();
            (0..ready.len()).map(of_metric).collect()
        }
        Embedding::Each(models) => {
            let of_metric = |metric: usize| {
                starts().map(|s| named(candidate(of, &models[metric].rewritten(&[raw(metric, s)])))).collect()
            };
            (0..ready.len()).map(of_metric).collect()
        }
        Embedding::Joined(models) => vec![starts().map(|s| named(candidate(of, &together(s, models)))).collect()],
        Embedding::Whole(model) => {
            let all = |start| -> Vec<Vec<Vec<f32>>> { (0..ready.len()).map(|m| raw(m, start)).collect() };
            vec![starts().map(|s| named(candidate(of, &model.rewritten(&all(s))))).collect()]
        }
    };
    Candidates { stride: stride.max(1), by_metric }
}

impl Candidates {
    /// Returns the earliest verdict. If several metrics reach one in the same second, the first in
    /// `order` wins (`priority.rs`).
    #[must_use]
    pub fn first(&self, order: &[usize], when: &Continuity) -> Option<Verdict> {
        let of = |metric: &usize| {
            let (machine, at, score) = when.first(self.by_metric.get(*metric)?, WINDOW - 1, self.stride)?;
            Some(Verdict { machines: vec![machine], at, metrics: vec![*metric], score, group: false })
        };
        let mut best: Option<Verdict> = None;
        for verdict in order.iter().filter_map(of) {
            if best.as_ref().is_none_or(|b| verdict.at < b.at) {
                best = Some(verdict);
            }
        }
        best
    }
}
