//! `everstep metrics`: what Prometheus reads of a job's coordinator, and how to tell it to.

use super::{Failure, runtime, status};
use clap::Args;

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The job; not needed when only one runs here
    job: Option<String>,
    /// Print what to put under scrape_configs of Prometheus instead
    #[arg(long)]
    config: bool,
    /// Print alerting rules for it instead (rule_files of Prometheus)
    #[arg(long, conflicts_with_all = ["config", "job"])]
    alerts: bool,
}

const ALERTS: &str = include_str!("alerts.yml");

/// Prints the page, or the configuration.
pub fn run(o: &Options) -> Result<i32, Failure> {
    if o.alerts {
        print!("{ALERTS}");
        return Ok(0);
    }
    let runtime = runtime()?;
    let job = status::one(&runtime, o.job.as_deref())?;
    if o.config {
        let (endpoint, token) = (&job["coordinator"]["endpoint"], &job["token_file"]);
        println!("- job_name: everstep\n  authorization: {{ type: Bearer, credentials_file: {token} }}");
        println!("  static_configs: [ {{ targets: [ {endpoint} ] }} ]");
        return Ok(0);
    }
    let page = status::ask_coordinator(&runtime, &job, "/metrics", None)?;
    print!("{}", String::from_utf8_lossy(&page));
    Ok(0)
}
