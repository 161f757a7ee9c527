//! `everstep explain` and `everstep incidents`: what happened, why, what was lost, what was done, whether it worked, what next.

use super::{Failure, facts};
use chrono::DateTime;
use clap::{Args, Subcommand};
use everstep_core::history::{Incident, Outcome, incidents, tell};
use serde_json::json;

#[derive(Args, Clone, Debug)]
pub struct Explain {
    /// Which one (inc-3, or 3); without it, the latest
    incident: Option<String>,
    /// Of this job; without it, of the job that wrote last
    #[arg(long)]
    job: Option<String>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Clone, Debug)]
pub struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Clone, Debug)]
enum Command {
    /// All incidents of a job's latest run, a line each
    Ls {
        /// The job; without it, all jobs whose records are on this machine
        job: Option<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// One of them: the same as everstep explain
    Show(Explain),
}

/// A job's incidents.
struct Of {
    job: String,
    latest: f64,
    incidents: Vec<Incident>,
}

fn all(job: Option<&str>) -> Result<Vec<Of>, Failure> {
    let told = facts::told(job);
    if told.is_empty() {
        return Err(facts::none_of(job));
    }
    let of = |t: &facts::Told| Of { job: t.job.clone(), latest: t.latest(), incidents: incidents(&t.entries()) };
    Ok(told.iter().map(of).collect())
}

/// Time of day, UTC.
fn when(micros: u64) -> String {
    let at = i64::try_from(micros).ok().and_then(DateTime::from_timestamp_micros);
    at.map_or("?".into(), |at| at.format("%Y-%m-%d %H:%M:%SZ").to_string())
}

fn as_json(job: &str, of: &Incident) -> serde_json::Value {
    json!({"job": job, "incident": of, "opened": when(of.opened), "lasted_us": of.lasted(), "rank_seconds": of.rank_seconds()})
}

/// Prints one incident.
pub fn explain(o: &Explain) -> Result<i32, Failure> {
    let mut of = all(o.job.as_deref())?;
    of.sort_by(|a, b| a.latest.total_cmp(&b.latest));
    // Of the job that wrote last, of those that have had one.
    let chosen = of.iter().rposition(|of| !of.incidents.is_empty()).unwrap_or(of.len() - 1);
    let Of { job, incidents, .. } = of.swap_remove(chosen);
    let number = match &o.incident {
        None => None,
        Some(name) => {
            let number = name.trim_start_matches("inc-").parse::<u64>();
            Some(number.map_err(|_| Failure::usage(format!("{name} is no incident: give inc-3, or 3")))?)
        }
    };
    let found = incidents.iter().rfind(|i| number.is_none_or(|n| i.number == n));
    let Some(found) = found else {
        return match number {
            Some(n) => Err(Failure {
                code: 1,
                why: format!("job {job} has no incident {n} in its latest run; everstep incidents ls {job}"),
            }),
            None => {
                println!("job {job} has had no incident");
                Ok(0)
            }
        };
    };
    if o.json {
        println!("{}", as_json(&job, found));
    } else {
        tell(found, &job, &when(found.opened)).iter().for_each(|line| println!("{line}"));
    }
    Ok(0)
}

/// Lists incidents, or prints one.
pub fn run(o: &Options) -> Result<i32, Failure> {
    let (job, json) = match &o.command {
        Command::Show(one) => return explain(one),
        Command::Ls { job, json } => (job, *json),
    };
    let of = all(job.as_deref())?;
    if json {
        let rows: Vec<_> = of.iter().flat_map(|of| of.incidents.iter().map(|i| as_json(&of.job, i))).collect();
        println!("{}", json!({"version": 1, "incidents": rows}));
        return Ok(0);
    }
    for of in &of {
        if of.incidents.is_empty() {
            println!("{}  no incident", of.job);
        }
        for i in &of.incidents {
            let outcome = match (&i.outcome, i.lasted()) {
                (Outcome::Recovered, Some(lasted)) => format!("recovered in {:.1} s", lasted as f64 / 1e6),
                (Outcome::Recovered, None) => "recovered".into(),
                (Outcome::Open, _) => "open".into(),
                (Outcome::Overtaken { by }, _) => format!("overtaken by inc-{by}"),
                (Outcome::Ended { code, .. }, _) => format!("ended the job ({code})"),
            };
            println!("{}  inc-{:<4} {}  {outcome:<20} {}", of.job, i.number, when(i.opened), i.what());
        }
    }
    Ok(0)
}
