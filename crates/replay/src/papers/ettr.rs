//! The share of time that trains: closed forms next to the simulator.

use super::{PaperError, Row};
use crate::{DAY, Failures, OnLoss, Policy, Recipe, Renewal, Repair, SECOND, Workload, compare, generate};

/// Returns the exact share for exponential failures: e^(−l·u)·l·Δ·q/(1−q) with q = e^(−l(Δ+w)).
/// `rate` is per second of the whole job; times are in seconds.
#[must_use]
pub fn closed(rate: f64, restart: f64, interval: f64, write: f64) -> f64 {
    let q = libm::exp(-rate * (interval + write));
    libm::exp(-rate * restart) * rate * interval * q / (1.0 - q)
}

/// Compares the closed form with the simulation for several intervals, restart times and stalls, on
/// 2,048 nodes with 6.5 failures per 1,000 node-days.
///
/// # Errors
/// Those of the simulator.
pub fn rows(seeds: u64, threads: usize) -> Result<Vec<Row>, PaperError> {
    let (nodes, mtbf) = (2048u32, (DAY as f64 / 6.5e-3) as u64);
    let renewal = Renewal {
        nodes,
        length: 60 * DAY,
        mtbf,
        shape: 1.0,
        others: 0.0,
        repair: Repair::Between(1, 1),
        burst: 0.0,
        domain: 1,
        lemons: (0.0, 1.0),
    };
    let mut all: Vec<Failures> = (0..seeds).map(|seed| generate(&Recipe::Renewal(renewal.clone()), seed)).collect();
    // Every failure is one of a process, so that nothing waits for a repair.
    all.iter_mut().flat_map(|f| &mut f.list).for_each(|f| (f.kind, f.repair) = (crate::Kind::Process, 0));
    let work = Workload::alone(nodes);
    let mut rows = Vec::new();
    for (interval, restart, write) in
        [(5, 5, 0), (10, 5, 0), (30, 5, 0), (60, 5, 0), (30, 15, 30), (60, 1, 60), (180, 10, 481)]
    {
        let (interval, restart, write) = (interval * 60, restart * 60, write);
        let policy = Policy {
            name: "closed".into(),
            on_loss: OnLoss::Wait,
            detect: [0; 3],
            restart: [restart * SECOND; 3],
            interval: interval * SECOND,
            write: write * SECOND,
            copies: 0,
            copy_interval: 0,
            ..Policy::named("wait")?
        };
        let found = compare(&all, &work, &[policy], threads)?;
        let rate = f64::from(nodes) / (mtbf as f64 / SECOND as f64);
        let exact = closed(rate, restart as f64, interval as f64, write as f64);
        let what = format!("checkpoint every {} min ({write} s stall), restart {} min", interval / 60, restart / 60);
        rows.push(Row::predicted(what, exact, found[0].goodput.mean, "exponential failures, also while restarting"));
    }
    Ok(rows)
}
