//! The last quarter of an hour of samples from a job's machines, in bounded memory: seconds ×
//! metrics × machines. Late samples are still stored at their second.

use crate::{Metric, Series};

/// Seconds to keep.
pub const KEPT: usize = 900;

/// The ring buffers of one set of machines. A new set needs new ones.
#[derive(Clone, Debug)]
pub struct Rings {
    metrics: Vec<Metric>,
    roles: Vec<u32>,
    domains: Vec<u32>,
    /// The newest second with a sample.
    newest: Option<u64>,
    /// By second (modulo [`KEPT`]), metric, and machine.
    values: Vec<f32>,
}

impl Rings {
    /// Creates empty rings for machines with these roles and failure domains; `domains` is empty if
    /// they are unknown.
    #[must_use]
    pub fn new(metrics: Vec<Metric>, roles: Vec<u32>, domains: Vec<u32>) -> Rings {
        let values = vec![f32::NAN; KEPT * metrics.len() * roles.len()];
        Rings { metrics, roles, domains, newest: None, values }
    }

    /// Returns the size of all samples in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.values.len() * size_of::<f32>()
    }

    /// Replaces the machines' roles. Ignored if the number of machines differs.
    pub fn set_roles(&mut self, roles: Vec<u32>) {
        if roles.len() == self.roles.len() {
            self.roles = roles;
        }
    }

    fn width(&self) -> usize {
        self.metrics.len() * self.roles.len()
    }

    fn start(&self, second: u64) -> usize {
        (second % KEPT as u64) as usize * self.width()
    }

    /// Stores a machine's samples of one second, by metric. Samples older than the rings and values
    /// that are not finite are dropped.
    pub fn put(&mut self, machine: usize, second: u64, samples: impl Iterator<Item = (usize, f32)>) {
        if machine >= self.roles.len() {
            return;
        }
        let newest = self.newest.unwrap_or(second);
        if second + (KEPT as u64) <= newest {
            return;
        }
        if second > newest || self.newest.is_none() {
            // These slots still contain samples from a quarter of an hour ago.
            let from =
                if self.newest.is_none() { second } else { (newest + 1).max(second.saturating_sub(KEPT as u64 - 1)) };
            for new in from..=second {
                let (at, width) = (self.start(new), self.width());
                self.values[at..at + width].fill(f32::NAN);
            }
            self.newest = Some(second);
        }
        let (at, machines) = (self.start(second), self.roles.len());
        for (metric, value) in samples.filter(|(metric, value)| *metric < self.metrics.len() && value.is_finite()) {
            self.values[at + metric * machines + machine] = value;
        }
    }

    /// Returns one second: for each metric, the samples of all machines. `None` if the second is no
    /// longer kept, or not yet.
    #[must_use]
    pub fn second(&self, second: u64) -> Option<impl Iterator<Item = &[f32]>> {
        let newest = self.newest?;
        (second <= newest && second + KEPT as u64 > newest)
            .then(|| self.values[self.start(second)..][..self.width()].chunks(self.roles.len().max(1)))
    }

    /// Returns up to `seconds` seconds ending with `last`; what is not kept is missing.
    #[must_use]
    pub fn series(&self, last: u64, seconds: usize) -> Series {
        let mut series = Series::new(self.metrics.clone(), self.roles.clone(), seconds.min(KEPT));
        series.domains.clone_from(&self.domains);
        for at in 0..series.seconds() {
            let Some(second) = last.checked_sub((series.seconds() - 1 - at) as u64) else { continue };
            for (metric, row) in self.second(second).into_iter().flatten().enumerate() {
                series.row_mut(metric, at).copy_from_slice(row);
            }
        }
        series
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::by_name;
    use proptest::prelude::*;

    fn rings() -> Rings {
        Rings::new(vec![by_name("cpu").0, by_name("net").0], vec![0, 0, 0], Vec::new())
    }

    #[test]
    fn late_samples_find_their_second_and_old_ones_are_gone() {
        let mut rings = rings();
        rings.put(0, 1000, [(0, 1.0), (1, f32::NAN)].into_iter());
        rings.put(1, 1003, [(0, 2.0)].into_iter());
        rings.put(2, 1001, [(1, 3.0)].into_iter());
        let series = rings.series(1003, 4);
        assert_eq!((series.at(0, 0, 0), series.at(0, 3, 1), series.at(1, 1, 2)), (1.0, 2.0, 3.0));
        assert!(series.at(1, 0, 0).is_nan() && series.at(0, 2, 0).is_nan());
        rings.put(0, 1000 + KEPT as u64, [(0, 4.0)].into_iter());
        assert!(rings.second(1000).is_none());
        assert!(rings.series(1000 + KEPT as u64, KEPT).at(0, 0, 0).is_nan());
        rings.put(0, 50, [(0, 5.0)].into_iter());
        assert_eq!(rings.bytes(), KEPT * 2 * 3 * 4);
    }

    proptest! {
        #[test]
        fn it_holds_what_a_map_of_the_last_seconds_holds(puts in prop::collection::vec((0usize..4, 0u64..3000, 0usize..3, -5.0f32..5.0), 1..200)) {
            let mut rings = rings();
            let mut map = std::collections::BTreeMap::new();
            let mut newest: Option<u64> = None;
            for (machine, second, metric, value) in puts {
                rings.put(machine, second, [(metric, value)].into_iter());
                if machine < 3 {
                    if newest.is_none_or(|n| second + KEPT as u64 > n) && metric < 2 {
                        map.insert((second, metric, machine), value);
                    }
                    newest = newest.max(Some(second));
                }
            }
            if let Some(newest) = newest {
                for second in newest.saturating_sub(KEPT as u64 - 1)..=newest {
                    let rows: Vec<Vec<f32>> = rings.second(second).into_iter().flatten().map(<[f32]>::to_vec).collect();
                    for (metric, row) in rows.iter().enumerate() {
                        for (machine, value) in row.iter().enumerate() {
                            let expected = map.get(&(second, metric, machine)).copied();
                            prop_assert_eq!(expected, Some(*value).filter(|v| v.is_finite()));
                        }
                    }
                }
            }
        }
    }
}
