//! Plans for everything that may happen next, computed in advance.
//!
//! If a job loses a unit or finishes, the choices of all other jobs stay the same. So the best keys
//! for the jobs before it and for those after it, by units, are computed once for all jobs. Each
//! plan then divides the units in the best way between these two groups and the job.

use super::choice::{Choice, Key, Scale, Width, best_sum, stage};
use super::problem::{Job, Problem};
use super::solve::{Plan, first, in_order, solve, suffixes};
use std::collections::BTreeMap;

/// An event that leads to a new plan.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// A unit of this job fails permanently.
    Lose(String),
    /// An idle unit fails.
    LoseIdle,
    /// This job finishes.
    Finish(String),
    /// A unit joins.
    Join,
}

impl Problem {
    /// Returns the problem after a change.
    #[must_use]
    pub fn after(&self, change: &Change) -> Problem {
        let mut next = self.clone();
        match change {
            Change::Lose(id) => {
                next.units = next.units.saturating_sub(1);
                next.jobs.iter_mut().filter(|j| j.id == *id).for_each(|j| j.hit = true);
            }
            Change::LoseIdle => next.units = next.units.saturating_sub(1),
            Change::Finish(id) => next.jobs.retain(|j| j.id != *id),
            Change::Join => next.units += 1,
        }
        next
    }
}

/// The plans for every possible next change to one problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    of: Problem,
    plans: BTreeMap<Change, Plan>,
}

impl Table {
    /// Computes the plans for each job losing a unit or finishing, for a unit that joins, and for
    /// an idle one that fails.
    #[must_use]
    pub fn new(problem: &Problem) -> Table {
        let mut plans = BTreeMap::new();
        plans.insert(Change::Join, solve(&problem.after(&Change::Join)));
        let fewer = problem.after(&Change::LoseIdle);
        for (of, lose) in [(&fewer, true), (problem, false)] {
            let scale = Scale::of(of);
            match scale.width(lose) {
                Width::Narrow => Sides::<f64>::of(of, scale).plans(lose, &mut plans),
                Width::Usual => Sides::<i64>::of(of, scale).plans(lose, &mut plans),
                Width::Wide => Sides::<i128>::of(of, scale).plans(lose, &mut plans),
            }
        }
        Table { of: problem.clone(), plans }
    }

    /// Returns the plan for a change to exactly this problem; `None` if the table was made for
    /// another one.
    #[must_use]
    pub fn look_up(&self, problem: &Problem, change: &Change) -> Option<&Plan> {
        if self.is_for(problem) { self.plans.get(change) } else { None }
    }

    /// Returns whether the table was made for exactly this problem.
    #[must_use]
    pub fn is_for(&self, problem: &Problem) -> bool {
        self.of == *problem
    }

    /// Returns all plans.
    #[must_use]
    pub fn plans(&self) -> &BTreeMap<Change, Plan> {
        &self.plans
    }
}

/// The best keys for the jobs before each job, and for those after it.
struct Sides<'p, K> {
    jobs: Vec<&'p Job>,
    scale: Scale<'p>,
    units: usize,
    choices: Vec<Vec<Choice<K>>>,
    before: Vec<Before<K>>,
    /// For each job, the best keys for it and all jobs after it, by units.
    after: Vec<Vec<K>>,
}

/// The best keys for the first jobs, by units.
struct Before<K> {
    best: Vec<K>,
    /// Rank of the first of the best plans among those for all numbers of units: equal plans have
    /// equal ranks.
    rank: Vec<u32>,
    /// Units of the last of these jobs in that plan.
    last: Vec<usize>,
}

impl<K: Key> Before<K> {
    fn nobody(units: usize) -> Self {
        Before { best: vec![K::ZERO; units + 1], rank: vec![0; units + 1], last: vec![0; units + 1] }
    }

    fn and(&self, choices: &[Choice<K>]) -> Self {
        let best = stage(&self.best, choices);
        let mut plans = vec![(u32::MAX, 0); best.len()];
        for choice in choices {
            let all = plans.iter_mut().zip(&best).skip(choice.units);
            for ((plan, best), (rest, rank)) in all.zip(self.best.iter().zip(&self.rank)) {
                if *rest + choice.key == *best && (*rank, choice.units) < *plan {
                    *plan = (*rank, choice.units);
                }
            }
        }
        let mut order = plans.clone();
        order.sort_unstable();
        order.dedup();
        let rank = |plan| u32::try_from(order.binary_search(plan).unwrap_or(0)).unwrap_or(u32::MAX);
        Before { rank: plans.iter().map(rank).collect(), last: plans.iter().map(|(_, units)| *units).collect(), best }
    }
}

impl<'p, K: Key> Sides<'p, K> {
    fn of(problem: &'p Problem, scale: Scale<'p>) -> Self {
        let (jobs, units) = (in_order(problem), problem.units as usize);
        let choices: Vec<Vec<Choice<K>>> = jobs.iter().map(|job| scale.choices(job)).collect();
        let mut before = vec![Before::nobody(units)];
        for of_job in &choices {
            let next = before.last().map(|b: &Before<K>| b.and(of_job));
            before.extend(next);
        }
        let after = suffixes(&choices, units);
        Sides { jobs, scale, units, choices, before, after }
    }

    fn plans(&self, lose: bool, plans: &mut BTreeMap<Change, Plan>) {
        if lose {
            let units = first(&self.after, &self.choices, self.units);
            plans.insert(Change::LoseIdle, Plan::of(self.jobs.iter().copied(), units));
        }
        for (at, job) in self.jobs.iter().enumerate() {
            if lose && job.current == 0 {
                continue;
            }
            let hit = Job { hit: true, ..(*job).clone() };
            let own = if lose { self.scale.choices(&hit) } else { vec![Choice { units: 0, key: K::ZERO }] };
            let mut plan = self.around(at, &own);
            let change = if lose { Change::Lose(job.id.clone()) } else { Change::Finish(job.id.clone()) };
            if !lose {
                plan.units.remove(&job.id);
            }
            plans.insert(change, plan);
        }
    }

    /// Returns the first of the best plans in which the job at `at` has these choices.
    fn around(&self, at: usize, own: &[Choice<K>]) -> Plan {
        let (Some(before), Some(after)) = (self.before.get(at), self.after.get(at + 1)) else { return Plan::default() };
        // The other jobs share the remaining units: each number of units for the jobs before faces
        // the matching number for the jobs after.
        let behind: Vec<K> = after.iter().rev().copied().collect();
        let facing = |c: &Choice<K>| {
            let left = (self.units + 1).saturating_sub(c.units);
            (before.best.get(..left).unwrap_or_default(), behind.get(c.units..).unwrap_or_default())
        };
        let bests: Vec<K> = own.iter().map(|c| best_sum(facing(c).0, facing(c).1) + c.key).collect();
        let best = bests.iter().fold(K::NONE + K::NONE, |best, this| best.or(*this));
        let mut found: Option<(u32, usize, usize)> = None;
        for (choice, _) in own.iter().zip(bests).filter(|(_, b)| *b == best) {
            let (front, back) = facing(choice);
            for (first, _) in front.iter().zip(back).enumerate().filter(|(_, (a, b))| **a + **b + choice.key == best) {
                let rank = before.rank.get(first).copied().unwrap_or(u32::MAX);
                let this = (rank, choice.units, first);
                found = Some(found.map_or(this, |f| f.min(this)));
            }
        }
        let Some((_, own, first)) = found else { return Plan::default() };
        self.read(at, own, first)
    }

    fn read(&self, at: usize, own: usize, in_front: usize) -> Plan {
        let mut given = vec![0u32; self.jobs.len()];
        let small = |units: usize| u32::try_from(units).unwrap_or(u32::MAX);
        let mut left = in_front;
        for (job, before) in self.before.iter().enumerate().take(at + 1).skip(1).rev() {
            let units = before.last.get(left).copied().unwrap_or(0);
            given[job - 1] = small(units);
            left -= units;
        }
        given[at] = small(own);
        let behind = self.units - own - in_front;
        let rest = first(&self.after[at + 1..], &self.choices[at + 1..], behind);
        for (to, units) in given.iter_mut().skip(at + 1).zip(rest) {
            *to = units;
        }
        Plan::of(self.jobs.iter().copied(), given)
    }
}
