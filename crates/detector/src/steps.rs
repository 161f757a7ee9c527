//! Who computes longer than its peers, step by step. How long a step takes says nothing of that: all wait for the slowest. What a worker itself
//! computes does, against others of its role (one pipeline stage is longer than another by design).

use crate::center::median_of;
use std::collections::BTreeMap;

/// Standard deviations of the peers,
const FAR: f32 = 6.0;
/// and so many times their median: what is slower than that counts.
const SLOWER: f32 = 1.1;
/// Peers that are all alike still differ by so much.
const ALIKE: f32 = 0.01;
/// Steps in a row: one long sequence is no slow machine.
const STEPS: u32 = 2;

/// A worker that is slow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slow {
    /// Which.
    pub worker: usize,
    /// How many times as long as its peers' median.
    pub times: f32,
}

/// Watches the computing times of a job's workers.
#[derive(Clone, Debug)]
pub struct Stragglers {
    roles: Vec<Vec<usize>>,
    /// By worker: steps in a row in which it was slow.
    row: Vec<u32>,
    scratch: Vec<i32>,
}

impl Stragglers {
    /// Of workers with these roles.
    #[must_use]
    pub fn new(roles: &[u32]) -> Stragglers {
        let mut by_role: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        roles.iter().enumerate().for_each(|(worker, role)| by_role.entry(*role).or_default().push(worker));
        Stragglers { roles: by_role.into_values().collect(), row: vec![0; roles.len()], scratch: Vec::new() }
    }

    /// A step is complete: seconds that each worker has computed, without what it waited; not a number where that is not known. Those that are
    /// slow, and were in the step before.
    pub fn step(&mut self, computed: &[f32]) -> Vec<Slow> {
        let mut slow = Vec::new();
        for workers in &self.roles {
            let of = |w: &usize| computed.get(*w).copied().unwrap_or(f32::NAN);
            // Two peers do not say which of them is slow.
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
        // A longer stage is no slow stage, and who told nothing is not judged.
        assert_eq!(watch.step(&[f32::NAN; 8]), []);
    }
}
