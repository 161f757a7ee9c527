//! `everstep approve`: approves a job's request about a machine (`--policy advise`).

use super::{Failure, runtime, status};
use clap::Args;
use serde_json::{Value, json};

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Number of the request; without it, the requests are listed
    request: Option<u64>,
    /// Job; optional if only one runs here
    #[arg(long)]
    job: Option<String>,
}

/// Approves a request, or lists the requests.
pub fn run(o: &Options) -> Result<i32, Failure> {
    let runtime = runtime()?;
    let job = status::one(&runtime, o.job.as_deref())?;
    let name = job["job"].as_str().unwrap_or_default();
    let Some(request) = o.request else {
        for of in job["requests"].as_array().into_iter().flatten() {
            println!("{}  {}  {}", of["id"], of["stage"].as_str().unwrap_or("?"), of["what"].as_str().unwrap_or("?"));
        }
        return Ok(0);
    };
    let path = format!("/v1/jobs/{name}/approve");
    let answer = status::ask_coordinator(&runtime, &job, &path, Some(&json!({"request": request})))?;
    let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
    match (answer["approved"].as_str(), answer["why"].as_str()) {
        (Some(what), _) => println!("{what}"),
        (None, why) => return Err(Failure { code: 1, why: why.unwrap_or("the coordinator does not answer").into() }),
    }
    Ok(0)
}
