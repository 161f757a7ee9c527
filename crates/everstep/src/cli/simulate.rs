//! `everstep simulate`: what the same failures cost under several policies.

use super::{Failure, charts, event_log, print_json, text, trace, write};
use clap::Args;
use everstep_core::coordinator::wording::counted;
use everstep_core::history::{Span, lines, records};
use everstep_planner::Mode;
use everstep_planner::file::read as situation;
use everstep_replay::papers::unicron;
use everstep_replay::{
    Cause, Compared, Failures, HOUR, Interval, Job, Outcome, Policy, Workload, compare, history, recorded,
};
use everstep_wire::output::{self, Accounts, FIRST, PolicyResult, Simulated};
use std::path::{Path, PathBuf};

#[derive(Args, Clone, Debug)]
pub struct SimulateOptions {
    /// Failures: a file (JSON lines, or a list of fault_start and fault_end), gen:trace-a,
    /// gen:trace-b, gen:poisson,nodes=512,days=90,mtbf=260d,repair=4h..20h, gen:weibull,… or
    /// gen:bootstrap,file=…
    #[arg(long, value_name = "FILE|gen:…", required_unless_present = "from_incidents")]
    trace: Option<String>,
    /// Incident records, as written by --export, to replay instead of a trace and to compare with
    /// what really happened; without FILE, those of the job with the most incidents on this machine
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "", conflicts_with = "trace")]
    from_incidents: Option<String>,
    /// Write the history of the first seed under the first policy as incident records
    #[arg(long, value_name = "FILE")]
    export: Option<PathBuf>,
    /// Policies, separated by commas; the first is the baseline: everstep, unicron, wait, elastic,
    /// spares:N, gemini, oobleck, varuna, bamboo, or .toml files
    #[arg(long, default_value = "everstep,wait,elastic,spares:1")]
    policies: String,
    /// Number of seeds, each with its own list of failures
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    seeds: u64,
    /// First seed
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..1 << 48))]
    seed: u64,
    /// Number of nodes in the cluster, if the trace's file does not state it
    #[arg(long)]
    nodes: Option<u32>,
    /// The cluster that the jobs share, as for everstep plan; without it, one job on all nodes
    /// (trace-a and trace-b: Unicron's case 5)
    #[arg(long, value_name = "FILE", requires = "jobs")]
    cluster: Option<PathBuf>,
    /// The jobs, as for everstep plan
    #[arg(long, value_name = "FILE", requires = "cluster")]
    jobs: Option<PathBuf>,
    /// Write an HTML page with charts
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn policy(name: &str) -> Result<Policy, Failure> {
    if !name.ends_with(".toml") {
        return Policy::named(name).map_err(Failure::usage);
    }
    Policy::read(&text(Path::new(name))?).map_err(|e| Failure::usage(format!("{name}: {e}")))
}

/// Parses a list of policies, separated by commas.
pub fn policies(list: &str) -> Result<Vec<Policy>, Failure> {
    list.split(',').map(str::trim).map(policy).collect()
}

/// Returns the incident records of the job on this machine that has the most.
fn own_records() -> Result<String, Failure> {
    let read = |t: event_log::JobFacts| records(&t.entries());
    let longest = event_log::read(None).into_iter().map(read).max_by_key(|(_, r)| r.len());
    let (span, found) = longest.unwrap_or((Span::new(0, 0.0), Vec::new()));
    if found.is_empty() {
        return Err(event_log::none_of(None));
    }
    Ok(lines(&span, &found))
}

/// Returns the failures, and the policies to try. For incident records, the first policy repeats
/// what was done then.
fn asked(o: &SimulateOptions) -> Result<(Vec<Failures>, Vec<Policy>), Failure> {
    let policies = policies(&o.policies)?;
    let Some(from) = &o.from_incidents else {
        let trace = o.trace.as_deref().unwrap_or_default();
        return Ok((trace::read(trace, o.nodes, o.seed..o.seed.saturating_add(o.seeds))?, policies));
    };
    let records = match from.as_str() {
        "" => own_records()?,
        path => text(Path::new(path))?,
    };
    let (failures, then) = recorded(&records).map_err(Failure::usage)?;
    Ok((vec![failures], [then].into_iter().chain(policies).collect()))
}

fn workload(o: &SimulateOptions, nodes: u32) -> Result<Workload, Failure> {
    let Some((cluster, jobs)) = o.cluster.as_ref().zip(o.jobs.as_ref()) else {
        return match o.trace.as_deref().is_some_and(|t| t.starts_with("gen:trace-")) {
            true => unicron::case(5).map_err(Failure::usage),
            false => Ok(Workload::alone(nodes)),
        };
    };
    let found = situation(&text(cluster)?, &text(jobs)?, Mode::Floor).map_err(Failure::usage)?;
    if found.problem.units != nodes {
        return Err(Failure::usage(format!(
            "the trace has {nodes} nodes, and the cluster file {}",
            found.problem.units
        )));
    }
    let job = |j: everstep_planner::Job| Job { id: j.id, weight: j.weight, min: j.min, achieved: j.achieved };
    Ok(Workload { jobs: found.problem.jobs.into_iter().map(job).collect() })
}

/// Runs the simulations and prints the comparison.
pub fn run(o: &SimulateOptions) -> Result<i32, Failure> {
    if !(1..=100_000).contains(&o.seeds) {
        return Err(Failure::usage(format!("--seeds {}: give 1 to 100000", o.seeds)));
    }
    let (all, policies) = asked(o)?;
    let first = all.first().ok_or_else(|| Failure::usage("the trace is empty"))?;
    let (nodes, days) = (first.nodes, first.length as f64 / (24 * HOUR) as f64);
    let work = workload(o, nodes)?;
    let found = compare(&all, &work, &policies, threads()).map_err(Failure::usage)?;
    let name = o.trace.as_deref().unwrap_or("records of incidents");
    if let (Some(path), Some(policy)) = (&o.export, policies.first()) {
        let (_, lines) = history(first, &work, policy).map_err(Failure::usage)?;
        write(path, &lines)?;
    }
    if let Some(path) = &o.html {
        let page = charts::comparison(&found, &format!("{nodes} nodes, {days:.0} days, {} seeds: {name}", all.len()));
        write(path, &page)?;
    }
    if o.json {
        print_json(&document(&found, o, name, nodes, days))?;
    } else {
        print(&found, all.len(), nodes, days);
    }
    Ok(0)
}

/// Returns the number of processors.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Returns the mean share of all nodes' time, by account.
pub fn shares(of: &Compared) -> Vec<(&'static str, f64)> {
    let sum: u128 = of.outcomes.iter().map(|o| u128::from(o.ledger.sum())).sum();
    let share = |value: &dyn Fn(&everstep_replay::TimeLedger) -> u64| {
        of.outcomes.iter().map(|o| u128::from(value(&o.ledger))).sum::<u128>() as f64 / sum.max(1) as f64
    };
    let mut found = vec![("productive", share(&|b| b.productive)), ("discarded", share(&|b| b.discarded))];
    found.extend(Cause::ALL.into_iter().map(|c| (c.name(), share(&|b| b.blocked[c as usize]))));
    found.push(("unavailable", share(&|b| b.unavailable)));
    found
}

/// Formats what the first policy achieved, divided by what this one did.
pub fn by_it(of: &Compared) -> String {
    of.ratio.map_or_else(|| "no progress".into(), |r| r.to_string())
}

fn print(found: &[Compared], seeds: usize, nodes: u32, days: f64) {
    let seeds = counted(seeds as u64, "seed");
    println!("{nodes} nodes, {days:.1} days, {seeds}; mean [95 % confidence interval]");
    let first = found.first().map_or("", |f| f.policy.as_str());
    println!("  {:<12} {:>8} {:>17} {:>8} {:>22}", "policy", "goodput", "", "of ideal", format!("{first} / policy"));
    for of in found {
        let g = of.goodput;
        println!(
            "  {:<12} {:>6.2} % [{:>6.2}, {:>6.2}] {:>6.2} % {:>22}",
            of.policy,
            g.mean * 100.0,
            g.ends.0 * 100.0,
            g.ends.1 * 100.0,
            of.share.mean * 100.0,
            by_it(of)
        );
    }
    println!("where the nodes' time went, in %");
    for of in found {
        let parts = shares(of).into_iter().map(|(name, share)| format!("{name} {:.2}", share * 100.0));
        println!("  {:<12} {}", of.policy, parts.collect::<Vec<_>>().join("  "));
    }
}

fn document(found: &[Compared], o: &SimulateOptions, name: &str, nodes: u32, days: f64) -> Simulated {
    let interval = |i: &Interval| output::Interval { mean: i.mean, low: i.ends.0, high: i.ends.1 };
    let accounts = |x: &Outcome| Accounts {
        productive: x.ledger.productive,
        blocked: Cause::ALL.iter().map(|c| (c.name().to_owned(), x.ledger.blocked[*c as usize])).collect(),
        discarded: x.ledger.discarded,
        unavailable: x.ledger.unavailable,
        value: x.value.to_string(),
        stopped: x.stopped,
        changes: x.changes,
        copies_lost: x.copies_lost,
    };
    let policy = |of: &Compared| PolicyResult {
        policy: of.policy.clone(),
        goodput: interval(&of.goodput),
        of_ideal: interval(&of.share),
        first_by_it: of.ratio.as_ref().map(interval),
        shares: shares(of).into_iter().map(|(name, share)| (name.to_owned(), share)).collect(),
        seeds: of.outcomes.iter().map(accounts).collect(),
    };
    Simulated {
        version: FIRST,
        trace: name.to_owned(),
        nodes,
        days,
        seeds: (o.seed, o.seed + o.seeds),
        unit: "node-microseconds",
        policies: found.iter().map(policy).collect(),
    }
}
