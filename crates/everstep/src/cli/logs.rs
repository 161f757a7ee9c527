//! `everstep logs`: what the workers of a job wrote on this machine.

use super::Failure;
use crate::agent::streams::STACKS_FILE;
use crate::places;
use clap::Args;
use everstep_core::coordinator::incident::describe_as;
use everstep_core::id::NodeId;
use everstep_core::message::{Cause, Failure as CoreFailure};
use everstep_core::severity::{Table, Verdict};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The job; without it the latest one
    job: Option<String>,
    /// Only this rank on its node
    #[arg(long)]
    rank: Option<u32>,
    /// What failed first, and the end of what that worker wrote
    #[arg(long)]
    first_cause: bool,
}

fn modified(path: &Path) -> SystemTime {
    std::fs::metadata(path).and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}

fn entries(path: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(path).into_iter().flatten().flatten().map(|e| e.path()).collect();
    found.sort();
    found
}

fn latest_job() -> Option<String> {
    let jobs = entries(&places::state().join("jobs"));
    jobs.into_iter().max_by_key(|p| modified(p)).and_then(|p| p.file_name()?.to_str().map(str::to_owned))
}

/// What the agents of a job on this machine wrote down about it.
fn agents(job: &str) -> Vec<serde_json::Value> {
    let files = entries(&places::job(job)).into_iter().filter(|p| p.extension().is_some_and(|e| e == "json"));
    files.filter_map(|p| serde_json::from_slice(&std::fs::read(p).ok()?).ok()).collect()
}

/// Where the logs of a node's workers are: what the user asked for, and what is kept anyway.
fn roots(agent: &serde_json::Value) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        ["logs", "kept"].iter().filter_map(|k| agent[*k].as_str().map(PathBuf::from)).collect();
    found.dedup();
    found
}

fn first_cause(job: &str, agents: &[serde_json::Value]) -> Option<()> {
    let store = agents.first()?["store"].as_str()?;
    let events = std::fs::read_to_string(crate::coordinator::events_file(Path::new(store))).ok()?;
    let facts: Vec<serde_json::Value> = events.lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
    let incident = facts.iter().rev().find(|f| f["job"] == job && f["fact"]["IncidentOpened"].is_object())?;
    let opened = &incident["fact"]["IncidentOpened"];
    // Whose failure it was may be known since.
    let mut blamed = facts.iter().rev().filter(|f| f["job"] == job).map(|f| &f["fact"]["Blamed"]);
    let told = blamed.find(|b| b["incident"] == opened["incident"]).unwrap_or(opened);
    let node = told["node"].as_str()?;
    let failure: Option<CoreFailure> = serde_json::from_value(told["failure"].clone()).ok();
    let verdict = serde_json::from_value(told["verdict"].clone()).ok();
    let verdict: Option<Verdict> = verdict.or_else(|| Some(failure.as_ref()?.verdict.clone()));
    let lost = || Table::built_in().named("node-lost");
    println!("{}", describe_as(&NodeId(node.into()), failure.as_ref(), &verdict.unwrap_or_else(lost)));
    println!("incident {}, generation {}, at {}", opened["incident"], opened["generation"], incident["ts"]);
    let failure = failure?;
    let roots = roots(agents.iter().find(|a| a["node"] == node)?);
    let restarts = facts.iter().rev().find_map(|f| {
        Some(&f["fact"]["GenerationStarted"]).filter(|g| g["generation"] == opened["generation"])?["restarts"].as_u64()
    });
    let worker = format!("attempt_{}/{}", restarts.unwrap_or(0), failure.local_rank);
    let found = |name: &str| roots.iter().map(|r| r.join(&worker).join(name)).find(|p| p.is_file());
    // A hang is explained by where it hangs, everything else by what was said last.
    let hung = matches!(failure.cause, Cause::Hung { .. });
    let stacks = found(STACKS_FILE).filter(|p| hung && std::fs::metadata(p).is_ok_and(|m| m.len() > 0));
    let (path, first, count) = match &stacks {
        Some(path) => (path.clone(), "stacks of its threads", 40),
        None => (found("stderr.log")?, "last lines", 8),
    };
    let text = std::fs::read_to_string(&path).ok()?;
    let lines: Vec<&str> = text.lines().collect();
    println!("{first}, {}:", path.display());
    for line in &lines[lines.len().saturating_sub(count)..] {
        println!("  {line}");
    }
    Some(())
}

/// Prints logs.
pub fn run(o: &Options) -> Result<i32, Failure> {
    let job =
        o.job.clone().or_else(latest_job).ok_or_else(|| Failure { code: 1, why: "no job has run here yet".into() })?;
    let agents = agents(&job);
    if agents.is_empty() {
        return Err(Failure {
            code: 1,
            why: format!("no logs of job {job} on this machine; everstep logs without a name shows the latest job"),
        });
    }
    if o.first_cause {
        if first_cause(&job, &agents).is_none() {
            eprintln!("nothing more is known of a failure of job {job} on this machine");
        }
        return Ok(0);
    }
    for agent in &agents {
        for attempt in roots(agent).iter().flat_map(|r| entries(r)) {
            for worker in entries(&attempt) {
                let local = worker.file_name().and_then(|n| n.to_str()).unwrap_or("?").to_owned();
                if o.rank.is_some_and(|r| r.to_string() != local) {
                    continue;
                }
                for stream in ["stdout.log", "stderr.log"] {
                    let text = std::fs::read_to_string(worker.join(stream)).unwrap_or_default();
                    let attempt = attempt.file_name().and_then(|n| n.to_str()).unwrap_or("?");
                    for line in text.lines() {
                        println!(
                            "[node {} {attempt} local rank {local} {}] {line}",
                            agent["node"].as_str().unwrap_or("?"),
                            stream.trim_end_matches(".log")
                        );
                    }
                }
            }
        }
    }
    Ok(0)
}
