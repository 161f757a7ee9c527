//! Finds workers that compute longer than their peers, step by step. The length of a step does not
//! reveal them, because all workers wait for the slowest. A worker's own computing time does,
//! compared with others of its role (pipeline stages differ in length by design). This is for
//! recorded traces; a running job is watched by `everstep_core::slow`.

use crate::quantiles::median_of;
use std::collections::BTreeMap;

/// Standard deviations by which a slow worker exceeds the median of its peers.
const FAR: f32 = 6.0;
/// Factor by which it exceeds that median; a slow worker exceeds both.
const SLOWER: f32 = 1.1;
/// Lower bound on the spread, as a share of the median: even identical peers differ a little.
const ALIKE: f32 = 0.01;
/// Consecutive slow steps: one long sequence does not make a slow machine.
const STEPS: u32 = 2;

/// A slow worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slow {
    /// Index of the worker.
    pub worker: usize,
    /// Its computing time as a multiple of its peers' median.
    pub times: f32,
}

/// Watches the computing times of a job's workers.
#[derive(Clone, Debug)]
pub struct Stragglers {
    roles: Vec<Vec<usize>>,
    /// By worker: the number of consecutive slow steps.
    row: Vec<u32>,
    scratch: Vec<i32>,
}

impl Stragglers {
    /// Creates a detector for workers with these roles.
    #[must_use]
    pub fn new(roles: &[u32]) -> Stragglers {
        let mut by_role: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        roles.iter().enumerate().for_each(|(worker, role)| by_role.entry(*role).or_default().push(worker));
        Stragglers { roles: by_role.into_values().collect(), row: vec![0; roles.len()], scratch: Vec::new() }
    }

    /// Adds a completed step and returns the workers that are slow and also were in the previous
    /// step. `computed` contains each worker's seconds without waiting; NaN if unknown.
    pub fn step(&mut self, computed: &[f32]) -> Vec<Slow> {
        let mut slow = Vec::new();
        for workers in &self.roles {
            let of = |w: &usize| computed.get(*w).copied().unwrap_or(f32::NAN);
            // With two peers, it cannot be decided which one is slow.
            let Some(middle) = median_of(workers.iter().map(of), &mut self.scratch).filter(|_| workers.len() > 2)
            else {
                continue;
            };
            let apart = median_of(workers.iter().map(|w| (of(w) - middle).abs()), &mut self.scratch).unwrap_or(0.0);
            let spread = (1.4826 * apart).max(ALIKE * middle);
            for w in workers {
                let far = of(w) > SLOWER * middle && (of(w) - middle) / spread > FAR;
                let Some(row) = self.row.get_mut(*w) else { continue };
                *row = if far { *row + 1 } else { 0 };
                if *row >= STEPS {
                    slow.push(Slow { worker: *w, times: of(w) / middle });
                }
            }
        }
        slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_long_step_is_nothing_and_two_are_somebody() {
        let mut watch = Stragglers::new(&[0, 0, 0, 0, 1, 1, 1, 1]);
        let usual = [1.0, 1.01, 0.99, 1.0, 2.0, 2.0, 2.01, 1.99];
        let slow = [1.0, 1.6, 0.99, 1.0, 2.0, 2.0, 2.01, 1.99];
        assert_eq!(watch.step(&usual), []);
        assert_eq!(watch.step(&slow), []);
        assert_eq!(watch.step(&usual), []);
        assert_eq!(watch.step(&slow), []);
        let found = watch.step(&slow);
        assert_eq!(found.iter().map(|s| s.worker).collect::<Vec<_>>(), [1]);
        assert!((found[0].times - 1.6).abs() < 0.02);
        // A longer stage is not a slow one, and workers without a time are not judged.
        assert_eq!(watch.step(&[f32::NAN; 8]), []);
    }
}
