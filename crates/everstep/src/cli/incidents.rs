//! `everstep incidents`: the incidents of jobs, one of them as a file, and the nodes that failed.

use super::explain::{Explain, explain, explained};
use super::{Failure, event_log, print_json};
use crate::notify::when;
use clap::{Args, Subcommand};
use everstep_core::coordinator::command::Fact;
use everstep_core::exit_code::ExitCode;
use everstep_core::history::{Incident, Outcome, incidents, lemons, notes};
use everstep_wire::output::{FIRST, IncidentList, IncidentReport, JobNodes, NodeFailures};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Which incident a command is about.
#[derive(Args, Clone, Debug)]
pub struct Which {
    /// Incident, inc-3 or 3 [default: the latest]
    incident: Option<String>,
    /// Job of the incident [default: the latest job that had one]
    #[arg(long)]
    job: Option<String>,
}

#[derive(Args, Clone, Debug)]
pub struct IncidentsOptions {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Clone, Debug)]
enum Command {
    /// List the incidents of a job's latest run, one per line
    Ls {
        /// Job [default: all jobs with records on this machine]
        job: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show one incident, like everstep explain
    Show(Explain),
    /// Write everything known about an incident to one file: facts, explanation, log tails
    Export {
        #[command(flatten)]
        which: Which,
        /// Output file [default: JOB-inc-N.tar.gz]
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Record whether a finding was right; incidents ls summarizes these verdicts as the detector's
    /// precision
    Note {
        #[command(flatten)]
        which: Which,
        /// Whether the finding was right or wrong
        #[arg(long, value_parser = ["right", "wrong"])]
        verdict: String,
        /// Comment to record
        #[arg(long, default_value = "", hide_default_value = true)]
        text: String,
    },
    /// List the nodes that failed, the worst first, over all runs
    Nodes {
        /// Job [default: all jobs with records on this machine]
        job: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// A job's incidents, and other notes on its latest run.
struct Of {
    facts: event_log::JobFacts,
    incidents: Vec<Incident>,
    notes: Vec<String>,
}

/// What a command about one incident works on; `None`: the job has had none.
pub struct One {
    pub facts: event_log::JobFacts,
    pub incident: Option<Incident>,
    pub notes: Vec<String>,
}

fn all(job: Option<&str>) -> Result<Vec<Of>, Failure> {
    let facts = event_log::read(job);
    if facts.is_empty() {
        return Err(event_log::none_of(job));
    }
    let of = |facts: event_log::JobFacts| {
        let entries = facts.entries();
        Of { incidents: incidents(&entries), notes: notes(&entries), facts }
    };
    Ok(facts.into_iter().map(of).collect())
}

pub fn report(job: &str, of: &Incident) -> IncidentReport {
    let (lasted_us, rank_seconds) = (of.lasted(), of.rank_seconds());
    IncidentReport { job: job.to_owned(), incident: of.clone(), opened: when(of.opened), lasted_us, rank_seconds }
}

/// Returns a job's facts and the chosen incident. Without a choice, that is the latest one, unless
/// `or_notes`: then a later job with notes comes before it.
pub fn one(o: &Which, or_notes: bool) -> Result<One, Failure> {
    let mut of = all(o.job.as_deref())?;
    let or_notes = or_notes && o.incident.is_none();
    // Records may go on for a while after a job's last incident. A note has no time of its own.
    let when = |of: &Of| match of.incidents.last() {
        Some(last) if !or_notes || of.notes.is_empty() => last.opened as f64 / 1e6,
        _ => of.facts.latest(),
    };
    of.sort_by(|a, b| when(a).total_cmp(&when(b)));
    // The latest job about which there is something to tell, else the latest of all.
    let telling = |of: &Of| !of.incidents.is_empty() || (or_notes && !of.notes.is_empty());
    let chosen = of.iter().rposition(telling).unwrap_or(of.len() - 1);
    let Of { facts, mut incidents, notes } = of.swap_remove(chosen);
    let Some(name) = &o.incident else { return Ok(One { facts, incident: incidents.pop(), notes }) };
    let number = name.trim_start_matches("inc-").parse::<u64>();
    let number = number
        .map_err(|_| Failure::usage(format!("{name} is not the number of an incident; write it like inc-3 or 3")))?;
    let found = incidents.into_iter().rfind(|i| i.number == number);
    let why = format!("job {0} has no incident {number} in its latest run; everstep incidents ls {0}", facts.job);
    let found = found.ok_or_else(|| Failure::new(ExitCode::Failed, why))?;
    Ok(One { facts, incident: Some(found), notes })
}

fn export(which: &Which, output: Option<&Path>) -> Result<i32, Failure> {
    let One { facts, incident: found, .. } = one(which, false)?;
    let none = || Failure::new(ExitCode::Failed, format!("job {} has had no incident", facts.job));
    let found = found.ok_or_else(none)?;
    let name = format!("{}-inc-{}.tar.gz", facts.job.replace('/', "-"), found.number);
    let to = output.map_or_else(|| PathBuf::from(name), Path::to_path_buf);
    super::export::write(&to, &facts, &report(&facts.job, &found), &explained(&facts.job, &found))?;
    println!("{}", to.display());
    Ok(0)
}

fn note(which: &Which, right: bool, text: &str) -> Result<i32, Failure> {
    let One { facts, incident: found, .. } = one(which, false)?;
    let found =
        found.ok_or_else(|| Failure::new(ExitCode::Failed, format!("job {} has had no incident", facts.job)))?;
    event_log::write(&facts, Fact::Noted { incident: found.number, right, note: text.to_owned() })?;
    let verdict = if right { "right" } else { "wrong" };
    println!("recorded: the finding of inc-{} of job {} was {verdict}", found.number, facts.job);
    Ok(0)
}

/// Summarizes how many of the detector's findings users call right.
fn precision(of: &[Incident]) -> Option<String> {
    let named: Vec<&Incident> = of.iter().filter(|i| i.finding.is_some()).collect();
    let noted = |right: bool| named.iter().filter(|i| i.noted.as_ref().is_some_and(|n| n.0 == right)).count();
    let (right, wrong) = (noted(true), noted(false));
    (!named.is_empty())
        .then(|| format!("{} reported by the detector: {right} confirmed, {wrong} false alarms", named.len()))
}

fn nodes(job: Option<&str>, as_json: bool) -> Result<i32, Failure> {
    let all = all(job)?;
    let ranked: Vec<_> = all.iter().map(|of| (&of.facts.job, lemons(&of.facts.entries()))).collect();
    if as_json {
        let jobs = ranked.into_iter().map(|(job, nodes)| JobNodes { job: job.clone(), nodes }).collect();
        print_json(&NodeFailures { version: FIRST, jobs })?;
        return Ok(0);
    }
    for (job, nodes) in ranked {
        if nodes.is_empty() {
            println!("{job}  no node failures");
        }
        for of in nodes {
            let counted = |of: &BTreeMap<String, u32>| {
                of.iter().map(|(what, n)| format!("{what} {n}")).collect::<Vec<_>>().join(", ")
            };
            let devices =
                if of.devices.is_empty() { String::new() } else { format!("  devices {}", counted(&of.devices)) };
            println!(
                "{job}  node {:<8} {} failures, {} caused by the machine  {}{devices}  {:.0} rank-s  latest {}",
                of.node,
                of.failures,
                of.of_machine,
                counted(&of.classes),
                of.rank_seconds,
                when(of.latest)
            );
        }
    }
    Ok(0)
}

/// Lists incidents, or prints one.
pub fn run(o: &IncidentsOptions) -> Result<i32, Failure> {
    let (job, json) = match &o.command {
        Command::Show(one) => return explain(one),
        Command::Note { which, verdict, text } => return note(which, verdict == "right", text),
        Command::Export { which, output } => return export(which, output.as_deref()),
        Command::Nodes { job, json } => return nodes(job.as_deref(), *json),
        Command::Ls { job, json } => (job, *json),
    };
    let of = all(job.as_deref())?;
    if json {
        let reports = of.iter().flat_map(|of| of.incidents.iter().map(|i| report(&of.facts.job, i)));
        print_json(&IncidentList { version: FIRST, incidents: reports.collect() })?;
        return Ok(0);
    }
    for of in &of {
        if of.incidents.is_empty() {
            println!("{}  no incident", of.facts.job);
        }
        for i in &of.incidents {
            let outcome = match (&i.outcome, i.lasted()) {
                (Outcome::Recovered, Some(lasted)) => format!("recovered in {:.1} s", lasted as f64 / 1e6),
                (Outcome::Recovered, None) => "recovered".into(),
                (Outcome::Repeating, _) if i.cut_off => "not recovered".into(),
                (Outcome::Repeating, _) => "repeating steps".into(),
                (Outcome::GoesOn, Some(lasted)) => format!("running again, {:.1} s", lasted as f64 / 1e6),
                (Outcome::GoesOn, None) => "running again".into(),
                (Outcome::Open, _) => match &i.noted {
                    Some((true, _)) => "confirmed".into(),
                    Some((false, _)) => "false alarm".into(),
                    None => "open".into(),
                },
                (Outcome::Superseded { by }, _) => format!("superseded by inc-{by}"),
                (Outcome::Ended { code, .. }, _) => format!("ended the job ({code})"),
            };
            println!("{}  inc-{:<4} {}  {outcome:<20} {}", of.facts.job, i.number, when(i.opened), i.what());
        }
        precision(&of.incidents).iter().for_each(|line| println!("{}  {line}", of.facts.job));
    }
    Ok(0)
}
