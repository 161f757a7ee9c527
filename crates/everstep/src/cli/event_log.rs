//! What coordinators recorded about jobs, on this machine.

use super::Failure;
use crate::agent::agent_file::AgentFile;
use crate::{events_file, paths};
use everstep_core::coordinator::command::Fact;
use everstep_core::exit_code::ExitCode;
use everstep_core::history::{Entry, LogLine};
use everstep_core::id::JobId;
use serde::Deserialize;
use serde_json::Value;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

/// One job's facts, in order.
pub struct JobFacts {
    pub job: String,
    /// The lines as written, including those of other versions (see [`LogLine`]).
    pub lines: Vec<Value>,
}

impl JobFacts {
    /// Returns the lines that this version understands.
    pub fn entries(&self) -> Vec<Entry> {
        self.entries_since(f64::MIN)
    }

    /// Returns those from this time on, in seconds since 1970. Earlier lines are not parsed.
    pub fn entries_since(&self, seconds: f64) -> Vec<Entry> {
        let later = self.lines.iter().filter(|l| l["ts"].as_f64().is_some_and(|ts| ts >= seconds));
        later.filter_map(|l| LogLine::deserialize(l).ok()).map(Entry::from).collect()
    }

    /// Returns when the latest line was written, in seconds since 1970.
    pub fn latest(&self) -> f64 {
        self.lines.last().and_then(|l| l["ts"].as_f64()).unwrap_or(0.0)
    }
}

/// Returns the facts of one job, or of all, from the stores that this user's jobs have written to.
pub fn read(job: Option<&str>) -> Vec<JobFacts> {
    let all = stores(job).into_iter().flat_map(|s| of_store(&s));
    all.filter(|t| job.is_none_or(|j| j == t.job)).collect()
}

/// Records a user's statement about a job, in the file of its coordinator.
pub fn write(of: &JobFacts, fact: Fact) -> Result<(), Failure> {
    let here = stores(Some(&of.job)).into_iter().find(|s| of_store(s).iter().any(|t| t.job == of.job));
    let path = here.map(|s| events_file::path(&s)).ok_or_else(|| none_of(Some(&of.job)))?;
    let now = paths::unix_millis() as f64 / 1000.0;
    let line = LogLine { ts: now.max(of.latest()), job: JobId(of.job.clone()), fact };
    let line = serde_json::to_string(&line).map_err(|e| Failure::config(e.to_string()))?;
    // In a single write, because a coordinator may be writing, too.
    let written =
        OpenOptions::new().append(true).open(&path).and_then(|mut f| f.write_all(format!("{line}\n").as_bytes()));
    written.map_err(|e| Failure::config(format!("cannot write {}: {e}", path.display())))
}

/// Returns the error for missing records: of a job, or of any job.
pub fn none_of(job: Option<&str>) -> Failure {
    let what = job.map_or("any job".to_owned(), |j| format!("job {j}"));
    Failure::new(ExitCode::Failed, format!("no records of {what} on this machine; they are where its coordinator ran"))
}

/// Returns the paths in a directory, in order; none if it cannot be read.
pub fn paths_in(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|e| e.path()).collect();
    found.sort();
    found
}

/// Returns the names of the jobs that have had an agent on this machine.
pub fn jobs() -> Vec<String> {
    let name = |job: PathBuf| job.file_name()?.to_str().map(str::to_owned);
    paths_in(&paths::state().join("jobs")).into_iter().filter_map(name).collect()
}

/// Returns what the agents of a job on this machine recorded about themselves.
pub fn agents(job: &str) -> Vec<AgentFile> {
    let files = paths_in(&paths::job(job)).into_iter().filter(|p| p.extension().is_some_and(|e| e == "json"));
    files.filter_map(|p| AgentFile::read(&p)).collect()
}

/// Returns the directories of the stores that this user's jobs have written to on this machine.
pub fn stores(job: Option<&str>) -> Vec<PathBuf> {
    let names = job.map_or_else(jobs, |job| vec![job.to_owned()]);
    let agents = names.iter().flat_map(|job| agents(job));
    let mut found: Vec<PathBuf> = agents.filter_map(|agent| agent.store).map(|store| store.0.into()).collect();
    found.sort();
    found.dedup();
    found
}

fn of_store(store: &Path) -> Vec<JobFacts> {
    let file = events_file::path(store);
    let text = events_file::read(&file).unwrap_or_else(|e| {
        crate::say_warning!("cannot read {}: {e}", file.display());
        String::new()
    });
    let mut found: Vec<JobFacts> = Vec::new();
    for line in text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok()) {
        let Some(job) = line["job"].as_str().map(str::to_owned) else { continue };
        match found.iter_mut().find(|t| t.job == job) {
            Some(facts) => facts.lines.push(line),
            None => found.push(JobFacts { job, lines: vec![line] }),
        }
    }
    found
}
