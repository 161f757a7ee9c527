//! `everstep size`: what it takes to reach a goal.

use super::{Failure, print_json, simulate, trace};
use clap::Args;
use everstep_core::coordinator::wording::counted;
use everstep_replay::{DAY, Failures, Policy, Range, Tried, fit, poisson, size, spares, spoken};
use everstep_wire::output::{self, FIRST, Sized, SizedForAvailability, SizedForGoodput};

#[derive(Args, Clone, Debug)]
pub struct SizeOptions {
    /// Goal: goodput=0.95 (productive share of all nodes' time, spares included) or available=0.99
    /// (share of time in which no more nodes are down than there are spares)
    #[arg(long, value_name = "GOAL")]
    slo: String,
    /// Failures, as for everstep simulate
    #[arg(long, value_name = "FILE|gen:…")]
    trace: String,
    /// Number of nodes in the cluster, if the trace's file does not state it
    #[arg(long)]
    nodes: Option<u32>,
    /// Number of seeds, each with its own list of failures
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    seeds: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(o: &SizeOptions) -> Result<i32, Failure> {
    let goal =
        o.slo.split_once('=').and_then(|(k, v)| Some((k, v.parse::<f64>().ok().filter(|v| *v > 0.0 && *v < 1.0)?)));
    let Some((kind @ ("goodput" | "available"), goal)) = goal else {
        return Err(Failure::usage(format!(
            "--slo {}: give goodput=0.95 or available=0.99, a share between 0 and 1",
            o.slo
        )));
    };
    if o.seeds == 0 {
        return Err(Failure::usage("--seeds 0: give at least 1"));
    }
    let spec = match o.nodes {
        Some(nodes) if o.trace.starts_with("gen:poisson") || o.trace.starts_with("gen:weibull") => {
            format!("{},nodes={nodes}", o.trace)
        }
        _ => o.trace.clone(),
    };
    let all = trace::read(&spec, o.nodes, 0..o.seeds)?;
    let first = all.first().ok_or_else(|| Failure::usage("the trace is empty"))?;
    if kind == "available" { available(o, first, goal) } else { goodput(o, &all, goal) }
}

fn available(o: &SizeOptions, of: &Failures, goal: f64) -> Result<i32, Failure> {
    let found = spares(of, goal, 0.95, of.length, 14 * DAY, 200);
    let independent = poisson(fit(of).map_err(Failure::usage)?.down.0, goal);
    if o.json {
        let (goal, nodes) = (o.slo.clone(), of.nodes);
        let found =
            SizedForAvailability { version: FIRST, goal, nodes, spares: found, spares_if_independent: independent };
        print_json(&Sized::Available(found))?;
    } else {
        println!(
            "{} for {} nodes: at most that many nodes are down {} % of the time, in 95 of 100 resampled traces",
            counted(found, "spare"),
            of.nodes,
            goal * 100.0
        );
        println!("if failures were independent, {independent} would be enough");
    }
    Ok(0)
}

fn goodput(o: &SizeOptions, all: &[Failures], goal: f64) -> Result<i32, Failure> {
    let base = Policy::named("everstep").map_err(Failure::usage)?;
    let nodes = all.first().map_or(0, |f| f.nodes);
    let found = size(all, &base, &Range::usual(nodes), goal, simulate::threads()).map_err(Failure::usage)?;
    if o.json {
        let one = |t: &Tried| output::Tried {
            spares: t.knobs.spares,
            copies: t.knobs.copies,
            interval_s: t.knobs.interval as f64 / 1e6,
            detect_s: t.knobs.detect as f64 / 1e6,
            goodput: t.goodput.mean,
            low: t.goodput.ends.0,
            high: t.goodput.ends.1,
        };
        let without = found.without.iter().map(|(name, tried)| ((*name).to_owned(), one(tried))).collect();
        let (goal, reached, best) = (o.slo.clone(), found.reached, one(&found.best));
        print_json(&Sized::Goodput(SizedForGoodput { version: FIRST, goal, nodes, reached, best, without }))?;
        return Ok(i32::from(!reached));
    }
    let k = &found.best.knobs;
    let text = if found.reached { "reached with" } else { "not reached by anything tried; best with" };
    println!(
        "goodput {} on {nodes} nodes is {text} {} spares, {} copies in memory, a checkpoint every {}, failures \
         detected within {}: {:.2} % [{:.2}, {:.2}]",
        goal,
        k.spares,
        k.copies,
        spoken(k.interval),
        spoken(k.detect),
        found.best.goodput.mean * 100.0,
        found.best.goodput.ends.0 * 100.0,
        found.best.goodput.ends.1 * 100.0
    );
    let mut without = found.without.clone();
    without.sort_by(|a, b| a.1.goodput.mean.total_cmp(&b.1.goodput.mean));
    for (name, tried) in without {
        let loss = (found.best.goodput.mean - tried.goodput.mean) * 100.0;
        println!("  {name:<10} {loss:+.2} points: {:.2} % without", tried.goodput.mean * 100.0);
    }
    Ok(i32::from(!found.reached))
}
