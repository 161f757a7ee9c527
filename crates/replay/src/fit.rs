//! What a trace is like: how often nodes fail, how bursty, which of them, how long repairs take, how many are down at once.

use super::failures::{DAY, Failures, Kind};

/// In days and nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// Failures of nodes.
    pub failures: usize,
    /// Other failures for each of them.
    pub others: f64,
    /// Mean time to the failure of one node.
    pub mtbf: f64,
    /// Median and mean of repairs, and what 1 of 100 takes longer than.
    pub repair: (f64, f64, f64),
    /// Standard deviation by mean of the times between failures of the cluster: 1 is Poisson.
    pub variation: f64,
    /// Share of all failures that the tenth of nodes that fail most takes.
    pub top_tenth: f64,
    /// Nodes that are down: mean, variance, and what is exceeded in 1 of 100 hours.
    pub down: (f64, f64, usize),
    /// What the same rate would exceed in 1 of 100 hours, were failures independent.
    pub poisson: usize,
}

/// The smallest number of nodes that no more than that are down in this share of the time.
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

/// The same of a Poisson distribution with this mean: what independent failures would need.
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

/// Fits.
///
/// # Errors
/// A sentence, where no node fails.
pub fn fit(of: &Failures) -> Result<Fit, String> {
    let nodes: Vec<_> = of.list.iter().filter(|f| f.kind == Kind::Node).collect();
    if nodes.is_empty() {
        return Err("no node fails in this trace: there is nothing to fit".into());
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
