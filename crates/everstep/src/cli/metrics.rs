//! `everstep metrics`: what Prometheus reads from a job's coordinator, and how to configure it.

use super::{Failure, runtime, status};
use clap::Args;

#[derive(Args, Clone, Debug)]
pub struct MetricsOptions {
    /// Job; optional if only one runs here
    job: Option<String>,
    /// Print a scrape configuration instead (for scrape_configs of Prometheus)
    #[arg(long)]
    config: bool,
    /// Print alerting rules instead (for rule_files of Prometheus)
    #[arg(long, conflicts_with_all = ["config", "job"])]
    alerts: bool,
}

const ALERTS: &str = include_str!("alerts.yml");

/// Prints the metrics, or a configuration.
pub fn run(o: &MetricsOptions) -> Result<i32, Failure> {
    if o.alerts {
        print!("{ALERTS}");
        return Ok(0);
    }
    let runtime = runtime()?;
    let job = status::one(&runtime, o.job.as_deref())?;
    if o.config {
        let (endpoint, token) = (&job.coordinator.endpoint, job.token_file.0.display());
        println!("- job_name: everstep\n  authorization: {{ type: Bearer, credentials_file: \"{token}\" }}");
        println!("  static_configs: [ {{ targets: [ \"{endpoint}\" ] }} ]");
        return Ok(0);
    }
    let page = status::ask_coordinator(&runtime, &job, "/metrics", None::<&()>)?;
    print!("{}", String::from_utf8_lossy(&page));
    Ok(0)
}
