//! Finds the best plan with a dynamic program over jobs and units (Unicron, equation 5), on the
//! useful choices only.

use super::choice::{Choice, Key, Scale, Width, stage};
use super::problem::{Job, Problem};
use std::collections::BTreeMap;

/// The number of units for each job. Remaining units are idle, ready to replace a failed one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Units by job id.
    pub units: BTreeMap<String, u32>,
}

impl Plan {
    /// Creates a plan from the units of each job, in the order of the jobs.
    pub(super) fn of<'j>(jobs: impl IntoIterator<Item = &'j Job>, units: Vec<u32>) -> Plan {
        Plan { units: jobs.into_iter().zip(units).map(|(job, units)| (job.id.clone(), units)).collect() }
    }

    /// Returns the number of units in use.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.units.values().sum()
    }
}

/// Returns the jobs in the order that breaks ties.
pub(super) fn in_order(problem: &Problem) -> Vec<&Job> {
    let mut jobs: Vec<&Job> = problem.jobs.iter().collect();
    jobs.sort_by(|a, b| a.id.cmp(&b.id));
    jobs
}

/// Returns the best plan. Ties are broken by the fewest changed jobs, then the most idle units,
/// then the fewest units for the first job by id, and so on.
///
/// Idempotent if no job is hit: with the plan's units as current units, the result is the same
/// plan.
#[must_use]
pub fn solve(problem: &Problem) -> Plan {
    let scale = Scale::of(problem);
    match scale.width(false) {
        Width::Narrow => solve_with::<f64>(problem, &scale),
        Width::Usual => solve_with::<i64>(problem, &scale),
        Width::Wide => solve_with::<i128>(problem, &scale),
    }
}

fn solve_with<K: Key>(problem: &Problem, scale: &Scale<'_>) -> Plan {
    let jobs = in_order(problem);
    let choices: Vec<Vec<Choice<K>>> = jobs.iter().map(|job| scale.choices(job)).collect();
    let best = suffixes(&choices, problem.units as usize);
    let units = first(&best, &choices, problem.units as usize);
    Plan::of(jobs, units)
}

/// Returns, for each job and number of units, the best key of that job and all after it; one more
/// entry for no job.
pub(super) fn suffixes<K: Key>(choices: &[Vec<Choice<K>>], units: usize) -> Vec<Vec<K>> {
    let mut best = vec![vec![K::ZERO; units + 1]];
    for of_job in choices.iter().rev() {
        let next = best.last().map(|rest| stage(rest, of_job)).unwrap_or_default();
        best.push(next);
    }
    best.reverse();
    best
}

/// Returns the first of the best plans for all these jobs: the fewest units for the first job, then
/// for the second, and so on.
pub(super) fn first<K: Key>(best: &[Vec<K>], choices: &[Vec<Choice<K>>], units: usize) -> Vec<u32> {
    let mut left = units;
    let mut plan = Vec::with_capacity(choices.len());
    for ((of_job, here), rest) in choices.iter().zip(best).zip(best.iter().skip(1)) {
        let reaches = |c: &&Choice<K>| {
            let rest = left.checked_sub(c.units).and_then(|left| rest.get(left));
            here.get(left).zip(rest).is_some_and(|(all, rest)| *rest + c.key == *all)
        };
        let given = of_job.iter().find(reaches).map_or(0, |c| c.units);
        left -= given;
        plan.push(u32::try_from(given).unwrap_or(u32::MAX));
    }
    plan
}
