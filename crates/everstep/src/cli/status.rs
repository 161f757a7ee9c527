//! `everstep status`: the state of all jobs of this user.

use super::{Failure, facts, runtime};
use clap::Args;
use everstep_wire::client::{ask, tell};
use everstep_wire::token::Token;
use std::path::Path;
use std::time::Duration;

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Show only this job
    job: Option<String>,
    /// Repeat every second until interrupted
    #[arg(long)]
    watch: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

async fn coordinator_status(store: &Path) -> Option<serde_json::Value> {
    let about: serde_json::Value =
        serde_json::from_slice(&std::fs::read(crate::coordinator::endpoint_file(store)).ok()?).ok()?;
    let token = Token::read(&crate::places::path_in(&about["token_file"])?).ok()?;
    let answer = ask(about["endpoint"].as_str()?, "GET", "/v1/status", &token).await.ok()?;
    let mut status: serde_json::Value = serde_json::from_slice(&answer).ok()?;
    status["token_file"] = about["token_file"].clone();
    Some(status)
}

/// Returns the jobs of all coordinators that answer.
pub async fn jobs(only: Option<&str>) -> Vec<serde_json::Value> {
    let mut all = Vec::new();
    for store in facts::stores(None) {
        let Some(status) = coordinator_status(&store).await else { continue };
        for job in status["jobs"].as_array().into_iter().flatten() {
            if only.is_none_or(|name| job["job"] == name) {
                let mut job = job.clone();
                job["coordinator"] =
                    serde_json::json!({"endpoint": status["endpoint"], "pid": status["pid"], "epoch": status["epoch"]});
                job["token_file"] = status["token_file"].clone();
                job["store"] = store.display().to_string().into();
                all.push(job);
            }
        }
    }
    all
}

/// Returns the job with this name, or the only one that runs here.
pub fn one(runtime: &tokio::runtime::Runtime, only: Option<&str>) -> Result<serde_json::Value, Failure> {
    let mut jobs = runtime.block_on(jobs(only));
    match jobs.len() {
        0 => {
            let which = only.map_or("no job is running here".into(), |j| format!("job {j} is not running here"));
            Err(Failure { code: 69, why: format!("{which}; run this where its coordinator runs") })
        }
        1 => Ok(jobs.remove(0)),
        n => {
            let names: Vec<&str> = jobs.iter().filter_map(|j| j["job"].as_str()).collect();
            Err(Failure::usage(format!("{n} jobs run here; say which: {}", names.join(", "))))
        }
    }
}

/// Sends a request to the coordinator of a job returned by [`one`]: POST if there is a body, else
/// GET.
pub fn ask_coordinator(
    runtime: &tokio::runtime::Runtime,
    job: &serde_json::Value,
    path: &str,
    post: Option<&serde_json::Value>,
) -> Result<Vec<u8>, Failure> {
    let name = job["job"].as_str().unwrap_or_default();
    let answer = runtime.block_on(async {
        let endpoint = job["coordinator"]["endpoint"].as_str()?;
        let token = Token::read(&crate::places::path_in(&job["token_file"])?).ok()?;
        match post {
            Some(body) => tell(endpoint, "POST", path, &token, body).await.ok(),
            None => ask(endpoint, "GET", path, &token).await.ok(),
        }
    });
    answer.ok_or_else(|| Failure { code: 69, why: format!("the coordinator of job {name} does not answer") })
}

fn show(job: &serde_json::Value) {
    let number = |v: &serde_json::Value| v.as_u64().map_or("-".to_owned(), |n| n.to_string());
    println!(
        "{}  {}  generation {}  {} ranks  restarts {}/{}{}  durable step {}",
        job["job"].as_str().unwrap_or("?"),
        job["phase"].as_str().unwrap_or("?"),
        number(&job["generation"]),
        number(&job["world_size"]),
        number(&job["restarts"]),
        number(&job["max_restarts"]),
        job["replicated_step"].as_u64().map_or_else(String::new, |step| format!("  replicated step {step}")),
        number(&job["durable_step"]),
    );
    if job["phase"] != "training" || !job["reason"].is_string() {
        println!("  why      {}", job["why"].as_str().unwrap_or("?"));
    }
    println!(
        "  coordinator {} pid {} epoch {}",
        job["coordinator"]["endpoint"].as_str().unwrap_or("?"),
        job["coordinator"]["pid"],
        job["coordinator"]["epoch"]
    );
    for node in job["nodes"].as_array().into_iter().flatten() {
        let state = match (node["left_out"].as_str(), node["attached"] == true) {
            (_, false) => "lost a moment ago".to_owned(),
            (Some(class), true) => format!("left out: {class}"),
            (None, true) => "attached".to_owned(),
        };
        println!(
            "  node {:<12} {:<16} {state}",
            node["node"].as_str().unwrap_or("?"),
            node["host"].as_str().unwrap_or("?")
        );
    }
    for (key, state) in [("slow", "slow    "), ("sub_healthy", "sub-healthy")] {
        for (rank, percent) in job[key].as_object().into_iter().flatten() {
            println!("  {state} rank {rank}: its own work takes {percent} % of the other ranks'");
        }
    }
    let restarted = job["restarts"].as_u64() > Some(0);
    for w in job["workers"].as_array().into_iter().flatten() {
        println!(
            "  rank {:<4} pid {:<8} step {:<8} {:>6} ms  in memory {:<8} {}{}",
            number(&w["rank"]),
            number(&w["pid"]),
            // After a restart, a step that is only counted since then is not the training's step.
            if restarted && w["counted"] == true { format!("+{}", number(&w["step"])) } else { number(&w["step"]) },
            number(&w["step_ms"]),
            number(&w["sealed"]),
            w["doing"].as_str().unwrap_or("?"),
            if w["warm"] == true { ", restarts warm" } else { "" },
        );
    }
}

/// Prints the status, once or repeatedly.
pub fn run(o: &Options) -> Result<i32, Failure> {
    let runtime = runtime()?;
    loop {
        let jobs = runtime.block_on(jobs(o.job.as_deref()));
        if o.json {
            println!("{}", serde_json::json!({"version": 1, "jobs": jobs}));
        } else if jobs.is_empty() {
            match &o.job {
                Some(job) => eprintln!("job {job} is not running here; everstep logs {job} shows what it wrote"),
                None => eprintln!("no job is running here; start one with everstep run SCRIPT"),
            }
        }
        if !o.json {
            jobs.iter().for_each(show);
        }
        if !o.watch {
            return Ok(if jobs.is_empty() && o.job.is_some() { 69 } else { 0 });
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}
