//! Prepares samples for the models (Minder, section 4.1): gaps are filled with the nearest sample
//! in time, and values are scaled to 0 to 1 by the metric's limits.

use crate::Series;
use serde::{Deserialize, Serialize};

/// The usual range of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Lower limit; maps to 0.
    pub low: f32,
    /// Upper limit; maps to 1.
    pub high: f32,
}

impl Limits {
    /// Returns the range of the finite values, without the extreme thousandth on either side, so
    /// that a glitch does not determine it.
    #[must_use]
    pub fn of(values: impl Iterator<Item = f32>) -> Limits {
        let mut all: Vec<f32> = values.filter(|v| v.is_finite()).collect();
        if all.is_empty() {
            return Limits { low: 0.0, high: 1.0 };
        }
        let least = all.len() / 1000;
        let most = all.len() - 1 - least;
        let low = *all.select_nth_unstable_by(least, f32::total_cmp).1;
        let high = *all.select_nth_unstable_by(most, f32::total_cmp).1;
        // A constant metric has no width of its own.
        Limits { low, high: if high > low { high } else { low + low.abs().max(1.0) } }
    }

    /// Scales a value to 0 to 1; values outside the limits are clamped.
    #[inline(always)]
    #[must_use]
    pub fn normal(&self, value: f32) -> f32 {
        ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }
}

/// Returns one metric, normalized and without gaps: second by second, with all machines side by
/// side. A machine without any samples stays NaN.
#[must_use]
pub fn prepared(series: &Series, metric: usize, limits: Limits) -> Vec<f32> {
    let machines = series.machines();
    let mut all: Vec<f32> = series.metric(metric).iter().map(|v| limits.normal(*v)).collect();
    for machine in 0..machines {
        let mut last: Option<usize> = None;
        let mut gap: Option<usize> = None;
        for second in 0..series.seconds() {
            if all[second * machines + machine].is_finite() {
                if let Some(from) = gap.take() {
                    for hole in from..second {
                        let near = last.filter(|l| hole - l <= second - hole).unwrap_or(second);
                        all[hole * machines + machine] = all[near * machines + machine];
                    }
                }
                last = Some(second);
            } else {
                gap.get_or_insert(second);
            }
        }
        if let (Some(from), Some(last)) = (gap, last) {
            for hole in from..series.seconds() {
                all[hole * machines + machine] = all[last * machines + machine];
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Family, Metric, Worse};

    #[test]
    fn gaps_take_the_nearest_sample_and_what_never_came_stays_away() {
        let metric = Metric { name: "m".into(), family: Family::Host, worse: Worse::Either, floor: 0.0 };
        let mut series = Series::new(vec![metric], vec![0, 0], 7);
        for (second, value) in [(1, 2.0), (5, 4.0)] {
            series.row_mut(0, second)[0] = value;
        }
        let limits = Limits { low: 0.0, high: 4.0 };
        let all = prepared(&series, 0, limits);
        let of = |machine: usize| -> Vec<f32> { (0..7).map(|s| all[s * 2 + machine]).collect() };
        assert_eq!(of(0), [0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0]);
        assert!(of(1).iter().all(|v| v.is_nan()));
    }

    #[test]
    fn limits_are_not_decided_by_a_glitch_and_have_a_width() {
        let limits = Limits::of((0..5000).map(|i| if i == 7 { 1e9 } else { i as f32 / 5000.0 }));
        assert!(limits.high < 1.0 && limits.low > 0.0, "{limits:?}");
        let flat = Limits::of([3.0; 10].into_iter());
        assert!(flat.normal(3.0) == 0.0 && flat.normal(f32::INFINITY) == 1.0);
    }
}
