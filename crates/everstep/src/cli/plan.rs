//! `everstep plan`: how to divide the nodes of a cluster among its jobs, and why.

use super::{Failure, print_json, text, throughput};
use clap::{Args, Subcommand};
use everstep_core::coordinator::wording::counted;
use everstep_planner::file::{Situation, read};
use everstep_planner::{Assignment, Done, Limit, Mode, Plan, Problem, Reason, assign, reasons, solve};
use everstep_wire::output::{self, FIRST, Moved, OtherPlan, PlannedJob};
use std::path::{Path, PathBuf};

#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct PlanOptions {
    #[command(subcommand)]
    what: Option<What>,
    /// The cluster: nodes, GPUs per node, their peak, and how often nodes fail (TOML; example in
    /// docs/guide/planning.md)
    #[arg(long, value_name = "FILE", required = true)]
    cluster: Option<PathBuf>,
    /// The jobs: minimum, weight, current nodes, and what each achieves on different numbers of
    /// nodes (TOML)
    #[arg(long, value_name = "FILE", required = true)]
    jobs: Option<PathBuf>,
    /// Event to plan for: lose:NODE, join:COUNT, finish:JOB or launch:FILE; may be repeated
    #[arg(long, value_name = "EVENT")]
    event: Vec<String>,
    /// Objective: floor (running jobs keep their minimum), paper (Unicron as published) or fair
    /// (more for small jobs)
    #[arg(long, default_value = "floor", value_parser = ["floor", "paper", "fair"])]
    mode: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand, Clone, Debug)]
enum What {
    /// Estimate what a model achieves on a number of GPUs, and the best layout
    Throughput(throughput::ThroughputOptions),
}

/// Computes a plan and prints it.
pub fn run(o: &PlanOptions) -> Result<i32, Failure> {
    if let Some(What::Throughput(options)) = &o.what {
        return throughput::run(options);
    }
    let mode = match o.mode.as_str() {
        "paper" => Mode::Paper,
        "fair" => Mode::Fair,
        _ => Mode::Floor,
    };
    let file = |path: &Option<PathBuf>| text(path.as_deref().unwrap_or(Path::new("")));
    let mut now = read(&file(&o.cluster)?, &file(&o.jobs)?, mode).map_err(Failure::usage)?;
    for event in &o.event {
        now = match event.strip_prefix("launch:") {
            Some(file) => now.launched(&text(Path::new(file))?).map_err(Failure::usage)?,
            None => now.after(event).map_err(Failure::usage)?,
        };
    }
    let plan = solve(&now.problem);
    let (nodes, why) = (assign(&now.nodes, &plan), reasons(&now.problem, &plan));
    if o.json {
        print_json(&document(&now, &plan, &nodes, &why))?;
    } else {
        print(&now, &plan, &nodes, &why);
    }
    Ok(0)
}

/// Returns what a coordinator of several jobs needs to know about them; `None` without the two
/// files.
pub fn known(cluster: Option<&Path>, jobs: Option<&Path>) -> Result<Option<Problem>, Failure> {
    let Some((cluster, jobs)) = cluster.zip(jobs) else { return Ok(None) };
    let found = read(&text(cluster)?, &text(jobs)?, Mode::Floor).map_err(Failure::usage)?;
    Ok(Some(found.problem))
}

/// Returns other ways to divide the same nodes.
fn others(now: &Situation) -> Vec<(&'static str, Plan)> {
    let problem = &now.problem;
    let current = problem.jobs.iter().map(|j| (j.id.clone(), j.current)).collect();
    let size = |job: &everstep_planner::Job| now.parameters.get(&job.id).copied().unwrap_or(0);
    let mut all = vec![
        ("as it is", Plan { units: current }),
        ("equal shares", problem.shared(|_| 1)),
        ("by weight", problem.shared(|j| j.weight.into())),
    ];
    if problem.jobs.iter().all(|j| size(j) > 0) {
        all.push(("by size", problem.shared(size)));
    }
    // The current division may need more nodes than are left.
    all.retain(|(_, plan)| plan.used() <= problem.units);
    all
}

/// Converts millionths to node-peak-hours.
fn hours(micro: i64) -> f64 {
    micro as f64 / 1e6
}

fn what(of: &Reason) -> String {
    let (from, to) = of.units;
    match (of.done, of.limit) {
        (Done::Kept, _) if of.transition.is_zero() => "stays as it is".into(),
        (Done::Kept, _) => "keeps the same number of nodes".into(),
        (Done::Started, _) => "starts".into(),
        (Done::Grown, _) => format!("gets {} more", to - from),
        (Done::Shrunk, _) => format!("gives up {}", from - to),
        (Done::Stopped, Some(Limit::Lacks { needs })) => {
            format!("is stopped: fewer than its minimum of {needs} are available")
        }
        (Done::Stopped, _) => "is stopped: other jobs make better use of the nodes".into(),
        (Done::Waits, Some(Limit::Lacks { needs })) => {
            format!("waits: fewer than its minimum of {needs} are available")
        }
        (Done::Waits, _) => "waits: other jobs make better use of the nodes".into(),
    }
}

fn print(now: &Situation, plan: &Plan, nodes: &Assignment, why: &[Reason]) {
    let problem = &now.problem;
    let lasts = problem.horizon().as_secs_f64() / 3600.0;
    println!(
        "{} of {} nodes for {}; expected to hold for {lasts:.1} h",
        plan.used(),
        problem.units,
        counted(why.len() as u64, "job")
    );
    println!("  {:<20} {:>12} {:>10} {:>10} {:>10}  ", "job", "nodes", "resumes in", "one more", "one less");
    for of in why {
        let margin = |m: Option<i64>| m.map_or("-".into(), |m| format!("{:+.2}", hours(m)));
        let moves = format!("{} -> {}", of.units.0, of.units.1);
        let after = format!("{:.0} s", of.transition.as_secs_f64());
        println!(
            "  {:<20} {moves:>12} {after:>10} {:>10} {:>10}  {}",
            of.job,
            margin(of.margin.0),
            margin(of.margin.1),
            what(of)
        );
    }
    for (id, from, to) in &nodes.moved {
        let name = |job: &Option<String>| job.clone().unwrap_or_else(|| "no job".into());
        println!("  {id}: from {} to {}", name(from), name(to));
    }
    let worth = problem.worth(plan);
    println!("worth {:.2} node-peak-hours", hours(worth));
    for (name, other) in others(now) {
        let other = problem.worth(&other);
        println!("  {name}: {:.2} ({:+.2})", hours(other), hours(other - worth));
    }
}

fn document(now: &Situation, plan: &Plan, nodes: &Assignment, why: &[Reason]) -> output::Plan {
    let problem = &now.problem;
    let job = |r: &Reason| PlannedJob {
        job: r.job.clone(),
        before: r.units.0,
        nodes: r.units.1,
        what: what(r),
        transition_s: r.transition.as_secs_f64(),
        gain: hours(r.gain),
        one_more: r.margin.0.map(hours),
        one_less: r.margin.1.map(hours),
        named: nodes.units.get(&r.job).cloned(),
    };
    let moved = |(node, from, to): &(String, Option<String>, Option<String>)| Moved {
        node: node.clone(),
        from: from.clone(),
        to: to.clone(),
    };
    let other = |(name, plan): (&str, Plan)| {
        let worth = hours(problem.worth(&plan));
        (name.to_owned(), OtherPlan { nodes: plan.units, worth })
    };
    output::Plan {
        version: FIRST,
        nodes: problem.units,
        used: plan.used(),
        horizon_s: problem.horizon().as_secs_f64(),
        worth: hours(problem.worth(plan)),
        jobs: why.iter().map(job).collect(),
        moved: nodes.moved.iter().map(moved).collect(),
        others: others(now).into_iter().map(other).collect(),
    }
}
