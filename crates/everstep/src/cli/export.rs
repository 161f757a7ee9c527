//! `everstep incidents export`: everything known about one incident in one file, for a ticket or
//! for the repair of the machine.

use super::event_log::JobFacts;
use super::{Failure, logs};
use everstep_core::history::Incident;
use everstep_wire::output::IncidentReport;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Seconds before and after the incident from which facts are included.
const AROUND: (f64, f64) = (600.0, 60.0);
/// Bytes from the end of each log that are included.
const LOG_BYTES: usize = 256 << 10;

/// Writes an archive of `about` (as JSON), `explained` (as `everstep explain` prints it), the facts
/// around the incident, and the ends of the logs on this machine, everstep's own included. Only its
/// owner can read it, because logs may contain private data.
pub fn write(to: &Path, facts: &JobFacts, about: &IncidentReport, explained: &[String]) -> Result<(), Failure> {
    let of = &about.incident;
    let failed = |e: std::io::Error| Failure::config(format!("cannot write {}: {e}; give another -o", to.display()));
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to).map_err(failed)?;
    let mut archive = tar::Builder::new(GzEncoder::new(file, Compression::default()));
    let root = PathBuf::from(format!("{}-inc-{}", facts.job, of.number));
    let mut add = |name: &str, bytes: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(of.opened / 1_000_000);
        archive.append_data(&mut header, root.join(name), bytes)
    };
    let text = serde_json::to_string_pretty(about).map_err(std::io::Error::other).map_err(failed)?;
    add("incident.json", format!("{text}\n").as_bytes()).map_err(failed)?;
    add("explain.txt", format!("{}\n", explained.join("\n")).as_bytes()).map_err(failed)?;
    add("facts.jsonl", around(facts, of).as_bytes()).map_err(failed)?;
    for (name, path) in logs::files(&facts.job).into_iter().chain(logs::own(&facts.job)) {
        if let Ok(bytes) = std::fs::read(&path) {
            let end = bytes.get(bytes.len().saturating_sub(LOG_BYTES)..).unwrap_or_default();
            add(&format!("logs/{name}"), end).map_err(failed)?;
        }
    }
    archive.into_inner().and_then(GzEncoder::finish).and_then(|f| f.sync_all()).map_err(failed)
}

fn around(facts: &JobFacts, of: &Incident) -> String {
    let end = of.caught_up.or(of.stepped.map(|(at, _)| at)).unwrap_or(of.opened);
    let (from, to) = (of.opened as f64 / 1e6 - AROUND.0, end as f64 / 1e6 + AROUND.1);
    let near = facts.lines.iter().filter(|l| l["ts"].as_f64().is_some_and(|ts| (from..=to).contains(&ts)));
    near.map(|l| format!("{l}\n")).collect()
}
