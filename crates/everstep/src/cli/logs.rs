//! `everstep logs`: what the workers of a job wrote on this machine.

use super::event_log::paths_in;
use super::{Failure, event_log};
use crate::agent::agent_file::AgentFile;
use crate::agent::streams::STACKS_FILE;
use crate::notify::when;
use crate::paths;
use clap::Args;
use everstep_core::coordinator::command::Fact;
use everstep_core::exit_code::ExitCode;
use everstep_core::history::incidents;
use everstep_core::message::Cause;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Number of lines that `--first-cause` prints: enough for most tracebacks.
const SHOWN: usize = 40;

#[derive(Args, Clone, Debug)]
pub struct LogsOptions {
    /// Job [default: the latest]
    job: Option<String>,
    /// Print only the worker with this rank on its node (LOCAL_RANK)
    #[arg(long, alias = "rank", value_name = "R")]
    local_rank: Option<u32>,
    /// Print what failed first, and the end of that worker's output
    #[arg(long)]
    first_cause: bool,
}

fn modified(path: &Path) -> SystemTime {
    std::fs::metadata(path).and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}

fn latest_job() -> Option<String> {
    event_log::jobs().into_iter().max_by_key(|job| modified(&paths::job(job)))
}

/// Returns where the logs of a node's workers are: the user's directory for the streams of
/// --redirects and --tee, and everstep's own for all others.
fn roots(agent: &AgentFile) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        [&agent.logs, &agent.kept].into_iter().flatten().map(|p| p.0.clone().into()).collect();
    found.dedup();
    found
}

/// Returns the logs of all workers of a job on this machine: a distinct name and the path of each.
pub fn files(job: &str) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for agent in event_log::agents(job) {
        let node = agent.node.as_deref().unwrap_or("unknown");
        for root in roots(&agent) {
            for file in
                paths_in(&root).iter().flat_map(|a| paths_in(a)).flat_map(|w| paths_in(&w)).filter(|f| f.is_file())
            {
                let name = file.strip_prefix(&root).map(|p| p.display().to_string());
                found.extend(name.ok().map(|name| (format!("node-{node}/{name}"), file.clone())));
            }
        }
    }
    found
}

/// Returns the logs that everstep itself keeps of a job on this machine: a distinct name and the
/// path of each.
pub fn own(job: &str) -> Vec<(String, PathBuf)> {
    let mut found = std::collections::BTreeMap::new();
    for agent in event_log::agents(job) {
        let of_agent = agent.node.as_deref().map(|node| paths::agent_log(job, node));
        let of_coordinator = agent.store.as_ref().map(|store| paths::coordinator_log(store.as_ref()));
        for log in of_agent.into_iter().chain(of_coordinator) {
            for path in [crate::log::before(&log), log].into_iter().filter(|p| p.is_file()) {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                found.insert(name, path);
            }
        }
    }
    found.into_iter().collect()
}

fn first_cause(job: &str, agents: &[AgentFile]) -> Option<()> {
    let facts = event_log::read(Some(job)).into_iter().next()?;
    let all = facts.entries();
    let Some(incident) = incidents(&all).pop() else {
        println!("no process of job {job} has failed in its latest run");
        return Some(());
    };
    println!("{}", incident.what());
    println!("inc-{}, generation {}, at {}", incident.number, incident.generation, when(incident.opened));
    let failure = incident.blamed.as_ref().map_or(incident.failure.as_ref(), |b| b.failure.as_ref())?;
    let node = &incident.at_fault().0;
    let roots = roots(agents.iter().find(|a| a.node.as_ref() == Some(node))?);
    let restarts = all.iter().rev().find_map(|e| match &e.fact {
        Fact::GenerationStarted { generation, restarts, .. } if generation.0 == incident.generation => Some(*restarts),
        _ => None,
    });
    let worker = format!("attempt_{}/{}", restarts.unwrap_or(0), failure.local_rank);
    let found = |name: &str| roots.iter().map(|r| r.join(&worker).join(name)).find(|p| p.is_file());
    // The stacks explain a hang. Its last output explains any other failure.
    let hung = matches!(failure.cause, Cause::Hung { .. });
    let written = |name: &str| found(name).filter(|p| std::fs::metadata(p).is_ok_and(|m| m.len() > 0));
    let stacks = if hung { written(STACKS_FILE) } else { None };
    // A process that was killed has often written nothing to standard error.
    let output = || written("stderr.log").or_else(|| written("stdout.log"));
    let shown = stacks.map(|path| (path, "thread stacks in")).or_else(|| Some((output()?, "last lines of")));
    let Some((path, what)) = shown else {
        found("stderr.log")?;
        println!("its process had printed nothing");
        return Some(());
    };
    let text = String::from_utf8_lossy(&std::fs::read(&path).ok()?).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    println!("{what} {}:", path.display());
    for line in &lines[lines.len().saturating_sub(SHOWN)..] {
        println!("  {line}");
    }
    Some(())
}

/// Prints logs.
pub fn run(o: &LogsOptions) -> Result<i32, Failure> {
    let job =
        o.job.clone().or_else(latest_job).ok_or_else(|| Failure::new(ExitCode::Failed, "no job has run here yet"))?;
    let agents = event_log::agents(&job);
    if agents.is_empty() {
        return Err(Failure::new(
            ExitCode::Failed,
            format!("no logs of job {job} on this machine; everstep logs without a name shows the latest job"),
        ));
    }
    if o.first_cause {
        if first_cause(&job, &agents).is_none() {
            eprintln!(
                "this machine has no more details about a failure of job {job}; on the machine of the node that \
                 failed, run everstep logs {job}"
            );
        }
        return Ok(0);
    }
    for agent in &agents {
        for attempt in roots(agent).iter().flat_map(|r| paths_in(r)) {
            for worker in paths_in(&attempt) {
                let local = worker.file_name().and_then(|n| n.to_str()).unwrap_or("?").to_owned();
                if o.local_rank.is_some_and(|r| r.to_string() != local) {
                    continue;
                }
                for stream in ["stdout.log", "stderr.log"] {
                    let text = std::fs::read_to_string(worker.join(stream)).unwrap_or_default();
                    let attempt = attempt.file_name().and_then(|n| n.to_str()).unwrap_or("?");
                    for line in text.lines() {
                        println!(
                            "[node {} {attempt} local rank {local} {}] {line}",
                            agent.node.as_deref().unwrap_or("?"),
                            stream.trim_end_matches(".log")
                        );
                    }
                }
            }
        }
    }
    Ok(0)
}
