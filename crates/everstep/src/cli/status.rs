//! `everstep status`: the state of all jobs of this user.

use super::{Failure, event_log, print_json, runtime};
use crate::agent::agent_file::AgentFile;
use crate::coordinator::EndpointFile;
use crate::{lock, paths};
use clap::Args;
use everstep_core::coordinator::command::Reason;
use everstep_core::exit_code::ExitCode;
use everstep_wire::client::{ask, ask_with};
use everstep_wire::output::{CoordinatorAddress, CoordinatorStatus, FIRST, Phase, RunningJob, Status};
use everstep_wire::private::{Directory, Root};
use everstep_wire::raw::Raw;
use everstep_wire::token::Token;
use serde::Serialize;
use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

#[derive(Args, Clone, Debug)]
pub struct StatusOptions {
    /// Show only this job
    job: Option<String>,
    /// Repeat every second until interrupted
    #[arg(long)]
    watch: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

async fn coordinator_status(store: &Path) -> Option<(EndpointFile, CoordinatorStatus)> {
    let about = EndpointFile::read(store)?;
    let token = Token::read(about.token_file.as_ref()).ok()?;
    let answer = ask(&about.endpoint, "GET", "/v1/status", &token).await.ok()?;
    Some((about, serde_json::from_slice(&answer).ok()?))
}

/// Returns the jobs of all coordinators that answer.
pub async fn jobs(only: Option<&str>) -> Vec<RunningJob> {
    let mut all = Vec::new();
    for store in event_log::stores(None) {
        let Some((about, answer)) = coordinator_status(&store).await else { continue };
        let CoordinatorStatus { endpoint, pid, epoch, jobs, .. } = answer;
        for status in jobs.into_iter().filter(|job| only.is_none_or(|name| job.job.0 == name)) {
            let coordinator = CoordinatorAddress { endpoint: endpoint.clone(), pid, epoch };
            let (token_file, store) = (about.token_file.clone(), Raw::from(&store));
            all.push(RunningJob { status, coordinator, token_file, store });
        }
    }
    all
}

/// A job with an agent on this machine, and a coordinator that does not answer here.
struct Remote {
    job: String,
    /// Host of the coordinator; `None` if it should run here.
    host: Option<String>,
}

impl Remote {
    /// Explains why there is nothing to show, and what to do.
    fn explain(&self) -> String {
        let Remote { job, host } = self;
        match host {
            Some(host) => format!("job {job} runs here, but its coordinator runs on {host}; run this command there"),
            None => format!("job {job} runs here, but its coordinator does not answer; try again in a few seconds"),
        }
    }
}

/// Returns the jobs with an agent on this machine that are not among `shown`.
fn remote(only: Option<&str>, shown: &[RunningJob]) -> Vec<Remote> {
    let names = only.map_or_else(event_log::jobs, |job| vec![job.to_owned()]);
    let hidden = names.into_iter().filter(|name| shown.iter().all(|job| job.status.job.0 != *name));
    let found = hidden.filter_map(|job| {
        let directory = Directory::existing(&paths::job(&job), Root::Named).ok()?;
        let runs = |agent: &AgentFile| {
            agent.node.as_ref().is_some_and(|node| !lock::is_free(&directory, &format!("node-{node}.lock")))
        };
        let agent = event_log::agents(&job).into_iter().find(runs)?;
        // Port 0 stands for a coordinator that this agent starts itself.
        let (host, port) = agent.endpoint.as_ref()?.rsplit_once(':')?;
        Some(Remote { job, host: (port != "0").then(|| host.to_owned()) })
    });
    found.collect()
}

/// Returns the job with this name, or the only one that runs here.
pub fn one(runtime: &tokio::runtime::Runtime, only: Option<&str>) -> Result<RunningJob, Failure> {
    let mut jobs = runtime.block_on(jobs(only));
    match jobs.len() {
        0 => {
            let which = only.map_or("no job is running here".into(), |j| format!("job {j} is not running here"));
            let nothing = || format!("{which}; run this command on the machine where the job's coordinator runs");
            let why = remote(only, &[]).first().map_or_else(nothing, Remote::explain);
            Err(Failure::new(ExitCode::Unavailable, why))
        }
        1 => Ok(jobs.remove(0)),
        n => {
            let names: Vec<&str> = jobs.iter().map(|j| j.status.job.0.as_str()).collect();
            Err(Failure::usage(format!("{n} jobs are running here; specify one of them: {}", names.join(", "))))
        }
    }
}

/// Sends a request to the coordinator of a job returned by [`one`]: POST if there is a body, else
/// GET.
pub fn ask_coordinator<T: Serialize>(
    runtime: &tokio::runtime::Runtime,
    job: &RunningJob,
    path: &str,
    post: Option<&T>,
) -> Result<Vec<u8>, Failure> {
    let (name, endpoint) = (&job.status.job, &job.coordinator.endpoint);
    let answer = runtime.block_on(async {
        let token = Token::read(job.token_file.as_ref()).ok()?;
        match post {
            Some(body) => ask_with(endpoint, "POST", path, &token, body).await.ok(),
            None => ask(endpoint, "GET", path, &token).await.ok(),
        }
    });
    answer.ok_or_else(|| Failure::new(ExitCode::Unavailable, format!("the coordinator of job {name} does not answer")))
}

fn show(job: &RunningJob) {
    let RunningJob { status: of, coordinator, .. } = job;
    let replicated = of.replicated_step.map_or_else(String::new, |step| format!("  replicated step {step}"));
    // After the end, the agents write the last step, and the coordinator does not hear of it.
    let durable = match of.phase {
        Phase::Over => String::new(),
        _ => format!("  durable step {}", known(of.durable_step)),
    };
    println!(
        "{}  {}  generation {}  {} ranks  restarts {}/{}{replicated}{durable}",
        of.job,
        of.phase.name(),
        of.generation,
        of.world_size,
        of.restarts,
        of.max_restarts,
    );
    if of.phase != Phase::Training || of.reason != Reason::Training {
        println!("  why      {}", of.why);
    }
    println!("  coordinator {} pid {} epoch {}", coordinator.endpoint, coordinator.pid, coordinator.epoch);
    for node in &of.nodes {
        let state = match (&node.excluded, node.attached) {
            (_, false) => "disconnected".to_owned(),
            (Some(class), true) => format!("excluded: {class}"),
            (None, true) => "attached".to_owned(),
        };
        println!("  node {:<12} {:<16} {state}", node.node.0, node.host);
    }
    for (ranks, state) in [(&of.slow, "slow"), (&of.sub_healthy, "slightly slow")] {
        for (rank, percent) in ranks {
            let times = *percent as f64 / 100.0;
            println!("  {state:<13} rank {rank}: its own work takes {times:.1} times as long as the other ranks'");
        }
    }
    for w in &of.workers {
        // After a restart, a step that is only counted since then is not the training's step.
        let since = if of.restarts > 0 && w.counted { "+" } else { "" };
        println!(
            "  rank {:<4} pid {:<8} step {:<8} {:>6} ms  in memory {:<8} {}{}",
            w.rank,
            w.pid,
            format!("{since}{}", known(w.step)),
            known(w.step_ms),
            known(w.sealed),
            w.doing,
            if w.warm { ", restarts warm" } else { "" },
        );
    }
}

fn known(value: Option<impl Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |v| v.to_string())
}

/// Prints the status, once or repeatedly.
pub fn run(o: &StatusOptions) -> Result<i32, Failure> {
    let runtime = runtime()?;
    loop {
        let jobs = runtime.block_on(jobs(o.job.as_deref()));
        if o.json {
            print_json(&Status { version: FIRST, jobs: jobs.clone() })?;
        } else {
            let remote = remote(o.job.as_deref(), &jobs);
            match &o.job {
                _ if !remote.is_empty() => remote.iter().for_each(|job| eprintln!("{}", job.explain())),
                _ if !jobs.is_empty() => {}
                Some(job) if event_log::agents(job).is_empty() => {
                    eprintln!("everstep: no job {job} has run on this machine; everstep status lists those that run");
                }
                Some(job) => {
                    eprintln!("everstep: job {job} is not running here; everstep logs {job} shows what it wrote");
                }
                None => eprintln!("everstep: no job is running here; start one with everstep run SCRIPT"),
            }
            jobs.iter().for_each(show);
        }
        if !o.watch {
            let missing = jobs.is_empty() && o.job.is_some();
            return Ok(if missing { ExitCode::Unavailable } else { ExitCode::Done }.number());
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}
