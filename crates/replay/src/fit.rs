//! Statistics of a trace: how often nodes fail, how bursty failures are, which nodes fail, how long
//! repairs take, and how many nodes are down at once.

use super::failures::{DAY, Failures, Kind};

/// The statistics of a trace, in days and nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The number of node failures.
    pub failures: usize,
    /// Other failures per node failure.
    pub others: f64,
    /// The mean time to failure of one node.
    pub mtbf: f64,
    /// The median, mean and 99th percentile of repair times.
    pub repair: (f64, f64, f64),
    /// The coefficient of variation of the times between the cluster's node failures: 1 for a
    /// Poisson process.
    pub variation: f64,
    /// The share of node failures that falls on the 10 % of nodes with the most of them.
    pub top_tenth: f64,
    /// The number of nodes down at once: its mean, its variance, and the number exceeded in 1 of
    /// 100 hours.
    pub down: (f64, f64, usize),
    /// The number exceeded in 1 of 100 hours if failures were independent, at the same rate.
    pub poisson: usize,
}

/// Returns the smallest number of nodes such that no more are down for this share of the time.
#[must_use]
pub fn quantile(down: &[u64], share: f64) -> usize {
    let all: u64 = down.iter().sum();
    let mut sum = 0u64;
    for (nodes, time) in down.iter().enumerate() {
        sum += time;
        if sum as f64 >= share * all as f64 {
            return nodes;
        }
    }
    down.len().saturating_sub(1)
}

/// Returns the same quantile of a Poisson distribution with this mean, which holds for independent
/// failures.
#[must_use]
pub fn poisson(mean: f64, share: f64) -> usize {
    let (mut term, mut sum, mut n) = (libm::exp(-mean), libm::exp(-mean), 0);
    while sum < share && n < 1 << 20 {
        n += 1;
        term *= mean / n as f64;
        sum += term;
    }
    n
}

/// A trace in which no node fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no node fails in this trace: there is nothing to fit")]
pub struct NothingToFit;

/// Computes the statistics of a trace.
///
/// # Errors
/// If no node fails.
pub fn fit(of: &Failures) -> Result<Fit, NothingToFit> {
    let nodes: Vec<_> = of.list.iter().filter(|f| f.kind == Kind::Node).collect();
    if nodes.is_empty() {
        return Err(NothingToFit);
    }
    let days = |micros: u64| micros as f64 / DAY as f64;
    let mut repairs: Vec<u64> = nodes.iter().map(|f| f.repair).collect();
    repairs.sort_unstable();
    let at = |share: usize| days(repairs[(repairs.len() * share / 100).min(repairs.len() - 1)]);
    let mean_repair = repairs.iter().map(|r| days(*r)).sum::<f64>() / repairs.len() as f64;
    let gaps: Vec<f64> = nodes.windows(2).map(|w| days(w[1].at - w[0].at)).collect();
    let mean = gaps.iter().sum::<f64>() / gaps.len().max(1) as f64;
    let spread = gaps.iter().map(|g| (g - mean) * (g - mean)).sum::<f64>() / gaps.len().max(1) as f64;
    let mut counts = vec![0usize; of.nodes as usize];
    nodes.iter().for_each(|f| counts[f.node as usize] += 1);
    counts.sort_unstable_by(|a, b| b.cmp(a));
    let top: usize = counts.iter().take(of.nodes.div_ceil(10) as usize).sum();
    let down = of.down();
    let all = of.length as f64;
    let mean_down = down.iter().enumerate().map(|(n, t)| n as f64 * *t as f64).sum::<f64>() / all;
    let squares = down.iter().enumerate().map(|(n, t)| (n * n) as f64 * *t as f64).sum::<f64>() / all;
    Ok(Fit {
        failures: nodes.len(),
        others: (of.list.len() - nodes.len()) as f64 / nodes.len() as f64,
        mtbf: days(of.length) * f64::from(of.nodes) / nodes.len() as f64,
        repair: (at(50), mean_repair, at(99)),
        variation: if mean > 0.0 { libm::sqrt(spread) / mean } else { 0.0 },
        top_tenth: top as f64 / nodes.len() as f64,
        down: (mean_down, squares - mean_down * mean_down, quantile(&down, 0.99)),
        poisson: poisson(mean_down, 0.99),
    })
}
