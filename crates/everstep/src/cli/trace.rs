//! `everstep trace`: what a trace of failures is like, and generated ones; and how other commands read one.

use super::{Failure, text};
use clap::{Args, Subcommand};
use everstep_replay::{Failures, Recipe, fit, from_faults, from_lines, generate, to_lines};
use serde_json::json;
use std::path::Path;

#[derive(Args, Clone, Debug)]
pub struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Clone, Debug)]
enum Command {
    /// How often nodes fail, how bursty, which of them, how long repairs take, how many are down at once
    Fit {
        /// A file, or gen:…, as for simulate --trace
        trace: String,
        /// Nodes of the cluster, with those that never fail, where the file does not say it
        #[arg(long)]
        nodes: Option<u32>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Write the failures of gen:… as lines of JSON, on standard output
    Write {
        /// gen:…, or a file of another form
        trace: String,
        /// Nodes of the cluster
        #[arg(long)]
        nodes: Option<u32>,
        /// Another seed, other failures
        #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..1 << 48))]
        seed: u64,
    },
}

fn file(path: &str, nodes: Option<u32>) -> Result<Failures, String> {
    let text = text(Path::new(path)).map_err(|e| e.why)?;
    let found = if text.trim_start().starts_with('[') { from_faults(&text, nodes) } else { from_lines(&text) };
    let mut found = found.map_err(|e| format!("{path}: {e}"))?;
    if found.list.is_empty() && found.nodes == 0 {
        return Err(format!("{path}: the trace is empty"));
    }
    found.nodes = found.nodes.max(nodes.unwrap_or(0));
    Ok(found)
}

/// The failures of each seed; a file has one list only.
pub fn read(spec: &str, nodes: Option<u32>, seeds: std::ops::Range<u64>) -> Result<Vec<Failures>, Failure> {
    let Some(recipe) = spec.strip_prefix("gen:") else {
        return Ok(vec![file(spec, nodes).map_err(Failure::usage)?]);
    };
    let recipe = Recipe::read(recipe, |path| file(path, nodes)).map_err(Failure::usage)?;
    seeds.map(|seed| generate(&recipe, seed).checked()).collect::<Result<_, _>>().map_err(Failure::usage)
}

/// Runs the command.
pub fn run(o: &Options) -> Result<i32, Failure> {
    match &o.command {
        Command::Write { trace, nodes, seed } => {
            let found = read(trace, *nodes, *seed..seed + 1)?;
            print!("{}", found.first().map(to_lines).unwrap_or_default());
        }
        Command::Fit { trace, nodes, json } => {
            let found = read(trace, *nodes, 0..1)?;
            let of = found.first().ok_or_else(|| Failure::usage("the trace is empty"))?;
            let f = fit(of).map_err(Failure::usage)?;
            let days = of.length as f64 / everstep_replay::DAY as f64;
            if *json {
                let said = json!({
                    "version": 1, "nodes": of.nodes, "days": days, "node_failures": f.failures, "others": f.others, "mtbf_days": f.mtbf,
                    "repair_days": {"median": f.repair.0, "mean": f.repair.1, "p99": f.repair.2}, "variation": f.variation, "top_tenth": f.top_tenth,
                    "down": {"mean": f.down.0, "variance": f.down.1, "p99": f.down.2, "poisson_p99": f.poisson},
                });
                println!("{said}");
                return Ok(0);
            }
            println!(
                "{} nodes, {days:.1} days, {} failures of nodes, {:.1} others for each",
                of.nodes, f.failures, f.others
            );
            println!("a node fails every {:.0} days; {:.2} failures per 1,000 node-days", f.mtbf, 1000.0 / f.mtbf);
            println!(
                "repairs: median {:.2} d, mean {:.2} d, 1 of 100 longer than {:.1} d",
                f.repair.0, f.repair.1, f.repair.2
            );
            println!(
                "times between failures vary {:.2} (1: independent); the tenth of nodes that fails most has {:.0} % of them",
                f.variation,
                f.top_tenth * 100.0
            );
            println!(
                "down: mean {:.1}, variance {:.1}; more than {} in 1 of 100 hours (independent: {})",
                f.down.0, f.down.1, f.down.2, f.poisson
            );
            println!(
                "gen:weibull,nodes={},mtbf={:.1}d,others={:.2},repair=lognormal:{:.3}d:{:.3}d,shape={:.2}",
                of.nodes,
                f.mtbf,
                f.others,
                f.repair.0.max(0.001),
                f.repair.1.max(f.repair.0.max(0.001)),
                (1.0 / f.variation.max(0.3)).clamp(0.3, 1.0)
            );
        }
    }
    Ok(0)
}
