//! `everstep stacks`: the stacks of a running job's ranks, grouped, the outlier first.

use super::{Failure, facts, runtime, status};
use clap::Args;
use everstep_core::history::{Entry, What};
use everstep_core::stacks::{Stack, group};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Nodes that do not answer within this time count as silent.
const ANSWER: Duration = Duration::from_secs(3);

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Job; optional if only one runs here
    job: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn answers(job: &str, after: f64) -> BTreeMap<u32, Stack> {
    let told = facts::told(Some(job));
    let lines = told.iter().flat_map(|t| &t.lines).filter(|l| l["ts"].as_f64().is_some_and(|ts| ts >= after));
    let entries = lines.filter_map(|l| Entry::read(l["ts"].as_f64()?, &l["fact"]));
    let mut stacks = BTreeMap::new();
    for entry in entries {
        if let What::Stacks { stacks: of, .. } = entry.what {
            stacks.extend(of);
        }
    }
    stacks
}

/// Requests stacks, waits for the answers, and prints them.
pub fn run(o: &Options) -> Result<i32, Failure> {
    let runtime = runtime()?;
    let running = status::one(&runtime, o.job.as_deref())?;
    let job = running["job"].as_str().unwrap_or_default().to_owned();
    let ranks = running["workers"].as_array().map_or(0, Vec::len);
    let after = facts::told(Some(&job)).iter().map(facts::Told::latest).fold(0.0, f64::max) + 0.000_5;
    status::ask_coordinator(&runtime, &running, &format!("/v1/jobs/{job}/stacks"), Some(&json!(null)))?;
    let began = Instant::now();
    let mut stacks = BTreeMap::new();
    while stacks.len() < ranks.max(1) && began.elapsed() < ANSWER {
        std::thread::sleep(Duration::from_millis(50));
        stacks = answers(&job, after);
    }
    let groups = group(&stacks);
    if o.json {
        println!("{}", json!({"version": 1, "job": job, "groups": groups}));
        return Ok(0);
    }
    for of in &groups {
        println!("{}", of.tell());
        of.stack.iter().for_each(|frame| println!("    {frame}"));
    }
    Ok(i32::from(groups.is_empty()))
}
