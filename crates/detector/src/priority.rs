//! The order in which metrics are examined (Minder, section 4.3). A decision tree learns from each
//! window's largest deviations, one number per metric, whether something was wrong. Metrics are
//! examined in the order in which the tree splits on them, from its root down.

use crate::Series;
use crate::models::Models;
use linfa::prelude::*;
use linfa_trees::DecisionTree;
use ndarray::{Array1, Array2};

/// Deeper trees fit noise.
const DEEPEST: usize = 7;

/// Returns the metrics by number, the most informative first. Metrics that the tree never uses come
/// last, in their original order. `windows` lists, per window, the largest deviation of each metric
/// and whether something was wrong.
#[must_use]
pub fn order(windows: &[(Vec<f32>, bool)]) -> Vec<usize> {
    let metrics = windows.first().map_or(0, |(of, _)| of.len());
    let mut order = asked(windows, metrics).unwrap_or_default();
    order.extend((0..metrics).filter(|m| !order.contains(m)).collect::<Vec<_>>());
    order
}

/// Sorts the metrics of `models` by how informative they are, using episodes with known faults,
/// each given by its first and last second.
pub fn put_in_order(models: &mut Models, episodes: &[(&Series, Vec<(usize, usize)>)]) {
    let mut windows: Vec<(Vec<f32>, bool)> = Vec::new();
    for (series, faults) in episodes {
        let by_metric = models.deviations(series);
        if by_metric.len() != models.all.len() {
            continue;
        }
        for at in 0..by_metric.first().map_or(0, Vec::len) {
            let second = at * models.stride;
            let deviations = by_metric.iter().map(|m| m[at].map_or(0.0, |c| c.z)).collect();
            windows.push((deviations, faults.iter().any(|(from, until)| (*from..=*until).contains(&second))));
        }
    }
    models.order = order(&windows);
}

fn asked(windows: &[(Vec<f32>, bool)], metrics: usize) -> Option<Vec<usize>> {
    // A single kind of window teaches nothing.
    if windows.iter().all(|(_, wrong)| *wrong) || !windows.iter().any(|(_, wrong)| *wrong) {
        return None;
    }
    let flat = windows.iter().flat_map(|(of, _)| of.iter().map(|z| f64::from(if z.is_finite() { *z } else { 0.0 })));
    let records = Array2::from_shape_vec((windows.len(), metrics), flat.collect()).ok()?;
    let targets: Array1<usize> = windows.iter().map(|(_, wrong)| usize::from(*wrong)).collect();
    // Slightly unequal weights avoid ties between the classes, which would be broken arbitrarily.
    let weights: Array1<f32> = windows.iter().map(|(_, wrong)| if *wrong { 1.001 } else { 1.0 }).collect();
    let names: Vec<String> = (0..metrics).map(|m| m.to_string()).collect();
    let data = Dataset::new(records, targets).with_weights(weights).with_feature_names(names);
    let least = (windows.len() as f32 / 200.0).max(1.0);
    let tree = DecisionTree::params().max_depth(Some(DEEPEST)).min_weight_leaf(least).fit(&data).ok()?;
    let mut order = Vec::new();
    // Level by level.
    for node in tree.iter_nodes().filter(|node| !node.is_leaf()) {
        let (metric, ..) = node.split();
        if !order.contains(&metric) {
            order.push(metric);
        }
    }
    Some(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metric_that_tells_comes_first() {
        // Metric 2 reveals most faults, metric 0 some of the rest, metric 1 none.
        let windows: Vec<(Vec<f32>, bool)> = (0..400u32)
            .map(|i| {
                let chance = |k: u32| ((i * 7919 + k * 104_729) % 97) as f32 / 97.0;
                let (first, third) = (i % 5 == 0, i % 2 == 0);
                let of = vec![
                    chance(1) + if first { 4.0 } else { 0.0 },
                    chance(2),
                    chance(3) + if third { 6.0 } else { 0.0 },
                ];
                (of, first || third)
            })
            .collect();
        assert_eq!(order(&windows), [2, 0, 1]);
        assert_eq!(order(&[]), [] as [usize; 0]);
        assert_eq!(order(&[(vec![1.0, f32::NAN], true)]), [0, 1]);
    }
}
