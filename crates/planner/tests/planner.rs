//! Compares the planner with all possible plans on small problems, and with itself on large ones.
#![allow(clippy::unwrap_used)]

use everstep_planner::{Change, Done, Job, Limit, Mode, Move, Plan, Problem, Rates, Table, reasons, solve};
use proptest::prelude::*;
use std::time::Duration;

/// The value of a plan by definition: admitted jobs, gain, unchanged jobs, idle units. Ties then go
/// to the fewest units for the first job by id, and so on.
type Worth = (i64, i64, i64, i64);

fn worth(problem: &Problem, jobs: &[&Job], units: &[u32]) -> Worth {
    let horizon = problem.horizon();
    let mut all = (0, 0, 0, i64::from(problem.units));
    for (job, k) in jobs.iter().zip(units) {
        let runs = job.current > 0 || job.hit;
        if problem.mode != Mode::Paper && *k >= job.min {
            all.0 += i64::from(job.weight) + if runs { 1 << 30 } else { 0 };
        }
        all.1 += problem.gain(job, *k, horizon);
        all.2 += i64::from(*k == job.current);
        all.3 -= i64::from(*k);
    }
    all
}

/// Returns the best of all plans, found by enumeration.
fn by_force(problem: &Problem) -> Plan {
    let mut jobs: Vec<&Job> = problem.jobs.iter().collect();
    jobs.sort_by(|a, b| a.id.cmp(&b.id));
    let mut best: Option<(Worth, Vec<u32>)> = None;
    let mut units = vec![0; jobs.len()];
    loop {
        if units.iter().sum::<u32>() <= problem.units {
            let this = worth(problem, &jobs, &units);
            // Plans come in ascending order, so the first of equals stays.
            if best.as_ref().is_none_or(|(best, _)| this > *best) {
                best = Some((this, units.clone()));
            }
        }
        // The next plan, as in counting: the last job is the lowest digit.
        let Some(at) = (0..jobs.len()).rev().find(|i| units[*i] < jobs[*i].most().min(problem.units)) else { break };
        units[at] += 1;
        units[at + 1..].fill(0);
    }
    let (_, units) = best.unwrap_or_default();
    Plan { units: jobs.iter().map(|j| j.id.clone()).zip(units).collect() }
}

fn jobs(most: usize, units: u32) -> impl Strategy<Value = Vec<Job>> {
    // From nodes to whole clusters: sums of 40 to 60 bits.
    let size = prop::sample::select(vec![1i64, 1, 10_000, 1_000_000]);
    size.prop_flat_map(move |size| jobs_of(most, units, size))
}

fn jobs_of(most: usize, units: u32, size: i64) -> impl Strategy<Value = Vec<Job>> {
    let seconds = |s: u64| Duration::from_secs(s);
    // Few distinct values, so that there are dips and ties.
    let achieved = prop::collection::vec(0i64..6, 1..=units as usize + 2).prop_map(move |mut a| {
        a[0] = 0;
        a.into_iter().map(|v| v * 250_000 * size).collect::<std::sync::Arc<[i64]>>()
    });
    let job = (
        achieved,
        prop::sample::select(vec![500u32, 1000, 1000, 2000]),
        0..4u32,
        0..=4u32,
        prop::bool::weighted(0.2),
        (0..3u64, 0..3u64, 0..3u64),
    );
    let job = job.prop_map(move |(achieved, weight, min, current, hit, (regroup, state, lost))| {
        let moves = Move { regroup: seconds(regroup * 600), state: seconds(state * 60), lost: seconds(lost * 900) };
        Job { id: String::new(), weight, min, current, hit: hit && current > 0, achieved, moves }
    });
    prop::collection::vec(job, 0..=most).prop_shuffle().prop_map(|mut jobs| {
        // Ids in another order than the jobs.
        let n = jobs.len();
        jobs.iter_mut()
            .enumerate()
            .for_each(|(i, j)| j.id = format!("j{}", (i * 7 + 3) % n.max(1) + if n % 7 == 0 { i * 10 } else { 0 }));
        jobs
    })
}

fn problems(most: usize, units: u32) -> impl Strategy<Value = Problem> {
    let mode = prop::sample::select(vec![Mode::Floor, Mode::Paper, Mode::Fair]);
    (0..=units, mode, prop::option::of(1..200u64)).prop_flat_map(move |(units, mode, mtbf)| {
        let rates = Rates {
            unit_mtbf: mtbf.map(|h| Duration::from_secs(h * 3600)),
            at_least: Duration::from_mins(30),
            ..Rates::default()
        };
        jobs(most, units).prop_map(move |jobs| Problem { units, jobs, mode, rates: rates.clone() })
    })
}

fn changes(problem: &Problem) -> Vec<Change> {
    let lose = problem.jobs.iter().filter(|j| j.current > 0).map(|j| Change::Lose(j.id.clone()));
    let finish = problem.jobs.iter().map(|j| Change::Finish(j.id.clone()));
    lose.chain(finish).chain([Change::Join, Change::LoseIdle]).collect()
}

/// Returns the number of problems to try, which `PROPTEST_CASES` overrides.
fn cases() -> u32 {
    match ProptestConfig::default().cases {
        256 => 4000,
        asked => asked,
    }
}

#[test]
fn the_best_of_all_plans_and_the_first_of_equals() {
    let count = std::cell::Cell::new([0u32; 3]);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(cases()));
    runner
        .run(&problems(5, 10), |problem| {
            let plan = solve(&problem);
            prop_assert_eq!(&plan, &by_force(&problem));
            let mut seen = count.get();
            seen[problem.mode as usize] += 1;
            count.set(seen);
            let mut other = problem.clone();
            other.jobs.reverse();
            prop_assert_eq!(&solve(&other), &plan, "whatever the order of the jobs");
            // Solving again after the plan is carried out gives the same plan, unless a job was hit
            // and stopped for that: restarting it may be worthwhile.
            let mut next = problem.clone();
            next.jobs.iter_mut().for_each(|job| job.current = plan.units[&job.id]);
            if problem.jobs.iter().all(|j| !j.hit) {
                prop_assert_eq!(&solve(&next), &plan, "idempotent");
            }
            Ok(())
        })
        .unwrap();
    let [floor, paper, fair] = count.get();
    println!(
        "planner: {floor} problems with floor, {paper} with paper, {fair} with fair: equal to the best of all plans"
    );
}

#[test]
fn the_table_has_the_plans_that_would_be_made() {
    let count = std::cell::Cell::new(0);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(cases() / 4));
    runner
        .run(&problems(8, 24), |problem| {
            let table = Table::new(&problem);
            for change in changes(&problem) {
                prop_assert_eq!(
                    table.look_up(&problem, &change),
                    Some(&solve(&problem.after(&change))),
                    "{:?}",
                    change
                );
                count.set(count.get() + 1);
            }
            let mut other = problem.clone();
            other.units += 1;
            prop_assert_eq!(table.look_up(&other, &Change::Join), None, "of another problem");
            Ok(())
        })
        .unwrap();
    println!("planner: {} plans in tables, each as it would be made", count.get());
}

/// A job as a person would describe it.
fn job(id: &str, min: u32, current: u32, achieved: &[i64]) -> Job {
    let moves = Move { regroup: Duration::from_mins(1), ..Move::default() };
    let achieved = achieved.iter().map(|v| v * 1000).collect();
    Job { id: id.into(), weight: 1000, min, current, hit: false, achieved, moves }
}

#[test]
fn a_node_less_is_taken_where_it_costs_least() {
    // Odd numbers of nodes do not divide the batch of `odd`.
    let jobs = vec![job("even", 1, 4, &[0, 500, 1000, 1500, 2000]), job("odd", 1, 4, &[0, 500, 1000, 1050, 2000])];
    let mut problem = Problem { units: 7, jobs, mode: Mode::Floor, rates: Rates::default() };
    problem.jobs[1].hit = true;
    let plan = solve(&problem);
    assert_eq!((plan.units["even"], plan.units["odd"]), (3, 4));
    let why = reasons(&problem, &plan);
    assert_eq!((why[0].done, why[0].units), (Done::Shrunk, (4, 3)));
    assert_eq!((why[1].done, why[1].limit), (Done::Kept, Some(Limit::Most)));
    assert!(why[1].transition > Duration::ZERO, "it was hit");
    // Per day, one node fewer costs `even` half a node's peak, and `odd` almost a whole one.
    assert_eq!(why[0].margin.1.map(|m| m / 1_000_000), Some(-11));
    assert_eq!(why[1].margin.1.map(|m| m / 1_000_000), Some(-22));
}

#[test]
fn who_runs_keeps_its_minimum_and_who_does_not_fit_waits() {
    let line = |n: i64, each: i64| (0..=n).map(|k| k * each).collect::<Vec<_>>();
    let jobs =
        vec![job("big", 1, 4, &line(8, 900)), job("small", 2, 2, &line(8, 100)), job("new", 4, 0, &line(8, 800))];
    let mut problem = Problem { units: 6, jobs, mode: Mode::Floor, rates: Rates::default() };
    let plan = solve(&problem);
    assert_eq!((plan.units["big"], plan.units["small"], plan.units["new"]), (4, 2, 0));
    let new = reasons(&problem, &plan).into_iter().find(|r| r.job == "new").unwrap();
    assert_eq!((new.done, new.limit), (Done::Waits, Some(Limit::Lacks { needs: 4 })));
    problem.mode = Mode::Paper;
    let starved = solve(&problem);
    assert_eq!((starved.units["big"], starved.units["small"]), (6, 0), "as the paper has it");
    assert!(problem.worth(&starved) > problem.worth(&plan));
    problem.mode = Mode::Floor;
    problem.units = 7;
    let fits = solve(&problem);
    assert_eq!((fits.units["big"], fits.units["small"], fits.units["new"]), (1, 2, 4), "all have their minimum");
}
