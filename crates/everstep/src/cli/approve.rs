//! `everstep approve`: approves a job's request about a machine (`--policy advise`).

use super::{Failure, runtime, status};
use clap::Args;
use everstep_core::exit_code::ExitCode;
use everstep_wire::output::{Approval, Approved};

const UNREADABLE: &str = "cannot read the coordinator's answer; use the same everstep version on all nodes";

#[derive(Args, Clone, Debug)]
pub struct ApproveOptions {
    /// Number of the request; without it, the requests are listed
    request: Option<u64>,
    /// Job; optional if only one runs here
    #[arg(long)]
    job: Option<String>,
}

/// Approves a request, or lists the requests.
pub fn run(o: &ApproveOptions) -> Result<i32, Failure> {
    let runtime = runtime()?;
    let job = status::one(&runtime, o.job.as_deref())?;
    let name = &job.status.job;
    let Some(request) = o.request else {
        if job.status.requests.is_empty() {
            eprintln!("job {name} has no requests");
        }
        for of in &job.status.requests {
            println!("{}  {}  {}", of.id, of.stage, of.what);
        }
        return Ok(0);
    };
    let path = format!("/v1/jobs/{name}/approve");
    let answer = status::ask_coordinator(&runtime, &job, &path, Some(&Approval { request }))?;
    match serde_json::from_slice(&answer) {
        Ok(Approved::Approved(what)) => println!("{what}"),
        Ok(Approved::Why(why)) => return Err(Failure::new(ExitCode::Failed, why)),
        Err(_) => return Err(Failure::new(ExitCode::Failed, UNREADABLE)),
    }
    Ok(0)
}
