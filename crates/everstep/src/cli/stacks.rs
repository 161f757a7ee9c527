//! `everstep stacks`: the stacks of a running job's ranks, grouped, the outlier first.

use super::{Failure, event_log, print_json, runtime, status};
use clap::Args;
use everstep_core::coordinator::command::Fact;
use everstep_core::stacks::{Stack, group};
use everstep_wire::output::{FIRST, Stacks};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Nodes that do not answer within this time count as silent.
const ANSWER: Duration = Duration::from_secs(3);

#[derive(Args, Clone, Debug)]
pub struct StacksOptions {
    /// Job; optional if only one runs here
    job: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn answers(job: &str, after: f64) -> BTreeMap<u32, Stack> {
    let mut stacks = BTreeMap::new();
    for entry in event_log::read(Some(job)).iter().flat_map(|facts| facts.entries_since(after)) {
        if let Fact::Stacks { stacks: of, .. } = entry.fact {
            stacks.extend(of);
        }
    }
    stacks
}

/// Requests stacks, waits for the answers, and prints them.
pub fn run(o: &StacksOptions) -> Result<i32, Failure> {
    let runtime = runtime()?;
    let running = status::one(&runtime, o.job.as_deref())?;
    let (job, ranks) = (running.status.job.0.clone(), running.status.workers.len());
    let after = event_log::read(Some(&job)).iter().map(event_log::JobFacts::latest).fold(0.0, f64::max) + 0.000_5;
    status::ask_coordinator(&runtime, &running, &format!("/v1/jobs/{job}/stacks"), Some(&()))?;
    let began = Instant::now();
    let mut stacks = BTreeMap::new();
    while stacks.len() < ranks.max(1) && began.elapsed() < ANSWER {
        std::thread::sleep(Duration::from_millis(50));
        stacks = answers(&job, after);
    }
    let groups = group(&stacks);
    if o.json {
        let code = i32::from(groups.is_empty());
        print_json(&Stacks { version: FIRST, job, groups })?;
        return Ok(code);
    }
    for of in &groups {
        println!("{}", of.describe());
        of.stack.iter().for_each(|frame| println!("    {frame}"));
    }
    Ok(i32::from(groups.is_empty()))
}
