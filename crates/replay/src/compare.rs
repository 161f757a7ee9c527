//! The same failures under several policies: means and the confidence in their differences.

use super::failures::Failures;
use super::policy::Policy;
use super::run::{Outcome, TooFewNodes, run};
use super::work::Workload;
use std::thread::ScopedJoinHandle;

/// A mean with its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    pub mean: f64,
    /// The lower and upper end of the interval.
    pub ends: (f64, f64),
}

/// One policy over all seeds.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// The policy's name.
    pub policy: String,
    /// One outcome per seed.
    pub outcomes: Vec<Outcome>,
    /// The productive share of the nodes' time.
    pub goodput: Interval,
    /// The achieved value as a share of the ideal.
    pub share: Interval,
    /// The first policy's value divided by this one's, seed by seed; `None` if this one achieved
    /// nothing for some seed.
    pub ratio: Option<Interval>,
}

/// The two-sided 95 % quantiles of Student's t distribution for 1 to 10 degrees of freedom.
const STUDENT: [f64; 10] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228];

impl Interval {
    /// Returns the interval of the mean of these samples.
    #[must_use]
    pub fn of(samples: &[f64]) -> Interval {
        let n = samples.len() as f64;
        let mean = samples.iter().sum::<f64>() / n.max(1.0);
        if samples.len() < 2 {
            return Interval { mean, ends: (mean, mean) };
        }
        let spread = samples.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / (n - 1.0);
        // Beyond the table, 1.96 + 2.5/df is within 0.014 of the quantile.
        let df = samples.len() - 1;
        let t = STUDENT.get(df - 1).copied().unwrap_or(1.96 + 2.5 / df as f64);
        let half = t * libm::sqrt(spread / n);
        Interval { mean, ends: (mean - half, mean + half) }
    }

    /// Clamps the interval of a quantity between 0 and 1.
    fn share(self) -> Interval {
        Interval { ends: (self.ends.0.max(0.0), self.ends.1.min(1.0)), ..self }
    }
}

/// For example `1.242 [1.229, 1.254]`.
impl std::fmt::Display for Interval {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.3} [{:.3}, {:.3}]", self.mean, self.ends.0, self.ends.1)
    }
}

/// A policy under which the jobs cannot run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy {policy}: {source}")]
pub struct CompareError {
    /// The policy's name.
    pub policy: String,
    pub source: TooFewNodes,
}

/// Runs every policy on every list of failures, on `threads` threads. The result does not depend on
/// the number of threads.
///
/// # Errors
/// Those of [`run`], with the policy's name.
pub fn compare(
    all: &[Failures],
    work: &Workload,
    policies: &[Policy],
    threads: usize,
) -> Result<Vec<Compared>, CompareError> {
    let tasks: Vec<(usize, usize)> = (0..policies.len()).flat_map(|p| (0..all.len()).map(move |s| (p, s))).collect();
    let part = tasks.len().div_ceil(threads.max(1)).max(1);
    let one = |(p, s): &(usize, usize)| {
        let policy = &policies[*p];
        run(&all[*s], work, policy).map_err(|source| CompareError { policy: policy.name.clone(), source })
    };
    let outcomes: Vec<Result<Outcome, CompareError>> = std::thread::scope(|scope| {
        let spawned = |part: &'_ [(usize, usize)]| {
            let part = part.to_vec();
            let work = move || part.iter().map(one).collect::<Vec<_>>();
            std::thread::Builder::new().spawn_scoped(scope, work)
        };
        let threads: Vec<_> = tasks.chunks(part).map(|part| (part, spawned(part))).collect();
        let joined = |(part, thread): (&[(usize, usize)], std::io::Result<ScopedJoinHandle<'_, _>>)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|e| std::panic::resume_unwind(e)),
            // If no thread can be started, the current one does the work.
            Err(_) => part.iter().map(one).collect(),
        };
        threads.into_iter().flat_map(joined).collect()
    });
    let mut left = outcomes.into_iter().collect::<Result<Vec<Outcome>, _>>()?.into_iter();
    let groups: Vec<Vec<Outcome>> = policies.iter().map(|_| left.by_ref().take(all.len()).collect()).collect();
    let first: Vec<i128> = groups.first().map(|g| g.iter().map(|o| o.value).collect()).unwrap_or_default();
    let summed = |(policy, outcomes): (&Policy, Vec<Outcome>)| {
        let of =
            |value: &dyn Fn(&Outcome) -> f64| Interval::of(&outcomes.iter().map(value).collect::<Vec<_>>()).share();
        let ratios: Option<Vec<f64>> =
            first.iter().zip(&outcomes).map(|(a, b)| (b.value > 0).then(|| *a as f64 / b.value as f64)).collect();
        Compared {
            policy: policy.name.clone(),
            goodput: of(&Outcome::goodput),
            share: of(&Outcome::share),
            ratio: ratios.map(|all| Interval::of(&all)),
            outcomes,
        }
    };
    Ok(policies.iter().zip(groups).map(summed).collect())
}
