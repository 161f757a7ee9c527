//! `plans JOBS UNITS MOST SEED`: measures the CPU milliseconds of one plan and of the plans for
//! everything that may happen next, and the CPU microseconds of a lookup. Prints a JSON object.
//! Jobs can use up to MOST units; their throughput has dips.

use everstep_planner::{Change, Job, Mode, Move, Problem, Rates, Table, solve};
use everstep_rng::Rng;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

fn cpu() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// Returns the median CPU time of five runs, in seconds, and the last result.
fn timed<T>(mut work: impl FnMut() -> T) -> (f64, T) {
    let mut took = Vec::new();
    let mut result = work();
    for _ in 0..5 {
        let began = cpu();
        result = work();
        took.push(cpu() - began);
    }
    took.sort_by(f64::total_cmp);
    (took[2], result)
}

fn job(rng: &mut Rng, number: u64, units: u32, share: u32, most: u32) -> Job {
    let most = u32::try_from(rng.range(4, u64::from(most))).unwrap_or(0).min(units);
    let efficiency = 300_000 + rng.range(0, 300_000) as i64;
    // Throughput per unit falls with the number of units. Odd numbers do not divide the batch, and
    // some others fit badly.
    let achieved = (0..=i64::from(most)).map(|k| {
        let usual = k * efficiency * 1000 / (1000 + k);
        let dip = if k % 2 == 1 { 880 + rng.range(0, 40) as i64 } else { 960 + rng.range(0, 40) as i64 };
        usual * dip / 1000
    });
    let achieved = achieved.collect();
    let seconds = |s: u64| Duration::from_secs(s);
    Job {
        id: format!("job-{number:03}"),
        weight: 500 + 250 * rng.range(0, 7) as u32,
        min: 1 + rng.range(0, 4) as u32,
        current: share.min(most),
        hit: false,
        achieved,
        moves: Move { regroup: seconds(20), state: seconds(10), lost: seconds(40) },
    }
}

/// Computes equation 5 directly, with every number of units for every job. Returns the CPU time.
fn dense(problem: &Problem) -> f64 {
    let (horizon, units) = (problem.horizon(), problem.units as usize);
    let work = || {
        let mut best = vec![0i64; units + 1];
        for job in &problem.jobs {
            let gains: Vec<i64> = (0..=problem.units).map(|k| problem.gain(job, k, horizon)).collect();
            best = (0..=units).map(|j| (0..=j).map(|k| best[j - k] + gains[k]).max().unwrap_or(0)).collect();
        }
        best
    };
    timed(work).0
}

fn main() -> Result<(), &'static str> {
    let numbers: Vec<u32> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let &[jobs, units, most, seed] = numbers.as_slice() else {
        return Err("usage: plans JOBS UNITS MOST SEED");
    };
    let mut rng = Rng::new(u64::from(seed));
    let jobs: Vec<Job> = (0..jobs).map(|n| job(&mut rng, n.into(), units, units / jobs, most)).collect();
    let rates =
        Rates { unit_mtbf: Some(Duration::from_hours(6240)), at_least: Duration::from_secs(700), ..Rates::default() };
    let problem = Problem { units, jobs, mode: Mode::Floor, rates };
    let (plan, first) = timed(|| solve(&problem));
    let mut said = serde_json::json!({"plan_ms": plan * 1e3, "used": first.used()});
    if units <= 2000 {
        said["dense_ms"] = (dense(&problem) * 1e3).into();
        let (all, table) = timed(|| Table::new(&problem));
        let changes: Vec<&Change> = table.plans().keys().collect();
        let (look, right) = timed(|| changes.iter().filter(|c| table.look_up(&problem, c).is_some()).count());
        let bytes: usize = table.plans().values().map(|p| p.units.len() * 4).sum();
        said["table_ms"] = (all * 1e3).into();
        said["lookup_us"] = (look * 1e6 / changes.len() as f64).into();
        said["plans"] = right.into();
        said["table_kib"] = (bytes / 1024).into();
    }
    println!("{said}");
    Ok(())
}
