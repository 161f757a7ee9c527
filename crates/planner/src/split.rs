//! Other ways to divide a cluster, for comparison with plans: equal shares, shares by weight,
//! shares by size (Unicron, section 7.5).

use super::problem::Problem;
use super::solve::Plan;

/// Divides `units` in proportion to `shares`, by largest remainders (the first of equals first).
/// Each nonzero share gets at least one unit, if there are enough.
#[must_use]
pub fn by_shares(units: u32, shares: &[u64]) -> Vec<u32> {
    let with = shares.iter().filter(|s| **s > 0).count();
    let total: u128 = shares.iter().map(|s| u128::from(*s)).sum();
    if total == 0 {
        return vec![0; shares.len()];
    }
    let exact = |s: u64| u128::from(s) * u128::from(units);
    let mut given: Vec<u32> = shares.iter().map(|s| u32::try_from(exact(*s) / total).unwrap_or(u32::MAX)).collect();
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by_key(|i| shares.get(*i).map_or(0, |s| u128::MAX - exact(*s) % total));
    let left = units - given.iter().sum::<u32>();
    for at in order.into_iter().take(left as usize) {
        given[at] += 1;
    }
    // A share that would get nothing gets one unit of the largest part.
    let enough = with <= units as usize;
    let poor: Vec<usize> = (0..given.len()).filter(|i| enough && given[*i] == 0 && shares[*i] > 0).collect();
    for poor in poor {
        if let Some(rich) = (0..given.len()).rev().max_by_key(|i| given[*i]) {
            given[rich] -= 1;
            given[poor] += 1;
        }
    }
    given
}

impl Problem {
    /// Returns the value of a plan: the sum of its jobs' gains, in millionths of a unit's peak
    /// during an hour.
    #[must_use]
    pub fn worth(&self, plan: &Plan) -> i64 {
        let horizon = self.horizon();
        let gain = |job: &super::Job| self.gain(job, plan.units.get(&job.id).copied().unwrap_or(0), horizon);
        self.jobs.iter().map(gain).sum()
    }

    /// Returns the plan that gives each job units in proportion to its share.
    #[must_use]
    pub fn shared(&self, share: impl Fn(&super::Job) -> u64) -> Plan {
        let shares: Vec<u64> = self.jobs.iter().map(share).collect();
        Plan::of(&self.jobs, by_shares(self.units, &shares))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_and_nobody_is_forgotten() {
        assert_eq!(by_shares(16, &[1, 1, 1, 1, 1, 1]), [3, 3, 3, 3, 2, 2]);
        assert_eq!(by_shares(16, &[500, 800, 1100, 1400, 1700, 2000]), [1, 2, 2, 3, 4, 4]);
        assert_eq!(by_shares(4, &[1, 1, 1, 97]), [1, 1, 1, 1]);
        assert_eq!(by_shares(2, &[1, 1, 1]), [1, 1, 0], "more jobs than units");
        assert_eq!(by_shares(5, &[0, 0]), [0, 0]);
        for units in 0..40 {
            let shares = [3, 9, 0, 1, 27];
            assert_eq!(by_shares(units, &shares).iter().sum::<u32>(), units);
        }
    }
}
