//! Unicron's table 3 with figure 10c, the order of figure 9, and figure 11 with the ablation that
//! the paper lacks.

use super::{Origin, PaperError, Row};
use crate::{Compared, Interval, Job, OnLoss, Policy, Recipe, Workload, compare, generate};
use everstep_planner::throughput::{Calibration, Hardware, Transformer, best};
use everstep_planner::{self as planner, Mode, Move, Plan, Problem, Rates, solve};
use std::collections::BTreeMap;
use std::sync::Arc;

/// 16 nodes of 8 A800.
const NODES: u32 = 16;
/// Table 3: sizes and weights of six tasks.
const CASES: [([&str; 6], [u32; 6]); 5] = [
    (["7b"; 6], [1000; 6]),
    (["1.3b", "1.3b", "1.3b", "7b", "7b", "13b"], [1000; 6]),
    (["7b"; 6], [500, 800, 1100, 1400, 1700, 2000]),
    (["1.3b", "1.3b", "1.3b", "7b", "7b", "13b"], [500, 800, 1100, 1400, 1700, 2000]),
    (["1.3b", "1.3b", "1.3b", "7b", "7b", "13b"], [2000, 1700, 1400, 1100, 800, 500]),
];

/// Returns what a model achieves on 0 to 16 nodes, in millionths of a node's peak. The paper
/// publishes no measurements, so the numbers come from the throughput model.
fn achieved(model: &str) -> Result<Arc<[i64]>, PaperError> {
    let (model, on) = (Transformer::named(&format!("gpt3-{model}"))?, Hardware::named("a800")?);
    let node = on.peak() * on.gpus_per_node as f64;
    let at = |nodes: u64| {
        let found = best(&model, nodes * on.gpus_per_node, &on, &Calibration::default());
        found.map_or(0, |b| (b.achieved / node * 1e6).round() as i64)
    };
    Ok((0..=u64::from(NODES)).map(at).collect())
}

/// Returns one of the cases of table 3, numbered from 1.
///
/// # Errors
/// If there is no such case.
pub fn case(number: usize) -> Result<Workload, PaperError> {
    let (sizes, weights) = number.checked_sub(1).and_then(|n| CASES.get(n)).ok_or(PaperError::UnknownCase)?;
    let mut known: BTreeMap<&str, Arc<[i64]>> = BTreeMap::new();
    let mut jobs = Vec::new();
    for (at, (size, weight)) in sizes.iter().zip(weights).enumerate() {
        if !known.contains_key(size) {
            known.insert(size, achieved(size)?);
        }
        let achieved = known.get(size).cloned().unwrap_or_default();
        jobs.push(Job { id: format!("task{}-{size}", at + 1), weight: *weight, min: 1, achieved });
    }
    Ok(Workload { jobs })
}

/// One way to split the nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Way {
    /// Ours, or one of the paper's three.
    pub name: &'static str,
    /// The number of nodes by task.
    pub nodes: Vec<u32>,
    /// The weighted achieved aggregate FLOP/s, in PFLOP/s.
    pub waf: f64,
}

/// Returns the ways to split the nodes in a case of table 3 in this mode, ours first.
///
/// # Errors
/// Those of [`case`].
pub fn ways(number: usize, mode: Mode) -> Result<Vec<Way>, PaperError> {
    let work = case(number)?;
    let jobs = work.jobs.iter().map(|j| j.to_plan(Move::default())).collect();
    let problem = Problem { units: NODES, jobs, mode, rates: Rates::default() };
    let size = |j: &planner::Job| match j.id.rsplit('-').next() {
        Some("1.3b") => 13,
        Some("7b") => 70,
        _ => 130,
    };
    let on = Hardware::named("a800")?;
    let peak = on.peak() * on.gpus_per_node as f64 / 1e15;
    let way = |name, plan: Plan| {
        let nodes: Vec<u32> = work.jobs.iter().map(|j| plan.units.get(&j.id).copied().unwrap_or(0)).collect();
        let waf: i128 = work.jobs.iter().zip(&nodes).map(|(j, n)| j.worth(*n as usize)).sum();
        Way { name, nodes, waf: waf as f64 / 1e6 * peak }
    };
    Ok(vec![
        way("ours", solve(&problem)),
        way("equally", problem.shared(|_| 1)),
        way("weighted", problem.shared(|j| j.weight.into())),
        way("sized", problem.shared(size)),
    ])
}

/// The policy, the system, and by what factor Unicron outperforms it on trace-a and trace-b
/// according to the paper.
const FIGURE_11: [(&str, &str, f64, f64); 4] = [
    ("wait", "Megatron", 1.2, 1.9),
    ("bamboo", "Bamboo", 4.6, 4.8),
    ("oobleck", "Oobleck", 3.7, 3.8),
    ("varuna", "Varuna", 4.8, 5.8),
];

fn ratio(of: &Compared) -> Result<Interval, PaperError> {
    of.ratio.ok_or_else(|| PaperError::NothingAchieved { policy: of.policy.clone() })
}

/// By name, the share of the planner's speeds that a system achieves.
pub type Fitted = Vec<(String, f64)>;

fn on_trace(recipe: &Recipe, seeds: u64, policies: &[Policy], threads: usize) -> Result<Vec<Compared>, PaperError> {
    let all: Vec<_> = (0..seeds).map(|seed| generate(recipe, seed)).collect();
    Ok(compare(&all, &case(5)?, policies, threads)?)
}

/// Returns the eight ratios of figure 11 and the fitted efficiencies. The efficiency of each older
/// code base is fitted to trace-a, and trace-b is predicted with it. Megatron is predicted on both.
///
/// # Errors
/// Those of the simulator.
pub fn figure_11(seeds: u64, threads: usize) -> Result<(Vec<Row>, Fitted), PaperError> {
    let mut policies = vec![Policy::named("unicron")?];
    for (name, ..) in FIGURE_11 {
        policies.push(Policy { efficiency: 1_000_000, ..Policy::named(name)? });
    }
    let plain = on_trace(&Recipe::TraceA, seeds, &policies, threads)?;
    let mut fitted = Vec::new();
    for ((name, _, paper, _), (policy, of)) in FIGURE_11.iter().zip(policies.iter_mut().zip(&plain).skip(1)) {
        if *name != "wait" {
            policy.efficiency = (ratio(of)?.mean / paper * 1e6).round() as u32;
            fitted.push(((*name).to_owned(), f64::from(policy.efficiency) / 1e6));
        }
    }
    let (a, b) =
        (on_trace(&Recipe::TraceA, seeds, &policies, threads)?, on_trace(&Recipe::TraceB, seeds, &policies, threads)?);
    let mut rows = Vec::new();
    for (trace, found, second) in [("trace-a", &a, false), ("trace-b", &b, true)] {
        for ((name, called, first, other), of) in FIGURE_11.iter().zip(found.iter().skip(1)) {
            let paper = if second { *other } else { *first };
            let origin = if *name == "wait" || second { Origin::Predicted } else { Origin::Fitted };
            let Interval { mean: ours, ends: (low, high) } = ratio(of)?;
            let assumed = format!("mean of {seeds} seeds, 95 % [{low:.3}, {high:.3}]");
            rows.push(Row { what: format!("figure 11, {trace}: Unicron by {called}"), paper, ours, origin, assumed });
        }
    }
    Ok((rows, fitted))
}

/// Returns what each part of Unicron contributes, from waiting to planning, on both traces. Spares
/// and ordinary elastic training are added for comparison.
///
/// # Errors
/// Those of the simulator.
pub fn ablation(seeds: u64, threads: usize) -> Result<Vec<(&'static str, [f64; 2])>, PaperError> {
    let (wait, elastic, unicron) = (Policy::named("wait")?, Policy::named("elastic")?, Policy::named("unicron")?);
    let shrink = Policy { on_loss: OnLoss::Shrink, ..wait.clone() };
    let faster = Policy {
        detect: unicron.detect,
        restart: [7 * 60 * 1_000_000; 3],
        regroup: 7 * 60 * 1_000_000,
        ..shrink.clone()
    };
    let moved = Policy { on_loss: OnLoss::Shrink, ..unicron.clone() };
    let spares = Policy { spares: 1, ..wait.clone() };
    let two = Policy { spares: 2, ..wait.clone() };
    let names = [
        "everything (Unicron)",
        "waits for repairs (Megatron)",
        "+ elasticity: goes on with fewer nodes",
        "+ detection and restart: seconds to notice, 7 min to restart",
        "+ transition: 60 s, nothing lost",
        "elastic as with torchrun",
        "waits, with 1 spare",
        "waits, with 2 spares",
    ];
    let policies = [unicron, wait, shrink, faster, moved, elastic, spares, two];
    let (a, b) =
        (on_trace(&Recipe::TraceA, seeds, &policies, threads)?, on_trace(&Recipe::TraceB, seeds, &policies, threads)?);
    names.into_iter().zip(a.iter().zip(&b)).map(|(name, (a, b))| Ok((name, [ratio(a)?.mean, ratio(b)?.mean]))).collect()
}

/// Returns the seconds from a node's failure to new work by policy, for the order of figure 9 (its
/// bars are published without numbers).
///
/// # Errors
/// If a policy is missing.
pub fn figure_9() -> Result<Vec<(String, f64)>, PaperError> {
    let mut found = Vec::new();
    for name in ["everstep", "unicron", "bamboo", "oobleck", "wait", "varuna"] {
        let policy = Policy::named(name)?;
        // On average, half an interval is lost: that of copies if there are any.
        let interval = if policy.copies > 0 { policy.copy_interval } else { policy.interval };
        found.push((name.to_owned(), (policy.detect[0] + policy.restart[0] + interval / 2) as f64 / 1e6));
    }
    Ok(found)
}
