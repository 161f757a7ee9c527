//! Connects the coordinator's records with the routes: keeps track of the jobs, and of the notices
//! already sent.

use super::{routes::Route, start};
use chrono::DateTime;
use everstep_core::history::Entry;
use everstep_core::notify::{Notice, Notifier, Status};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc;

/// The notices of all jobs of a coordinator.
#[derive(Default)]
pub struct Desk {
    jobs: BTreeMap<String, Notifier>,
    routes: Vec<mpsc::UnboundedSender<Notice>>,
    under_way: Arc<AtomicUsize>,
}

/// Formats a time, UTC.
pub fn when(micros: u64) -> String {
    let at = i64::try_from(micros).ok().and_then(DateTime::from_timestamp_micros);
    at.map_or("?".into(), |at| at.format("%Y-%m-%d %H:%M:%SZ").to_string())
}

impl Desk {
    /// Continues where an earlier life of the coordinator ended, from its records.
    pub fn open(routes: Vec<Route>, records: &Path) -> Self {
        let under_way = Arc::<AtomicUsize>::default();
        let mut desk = Desk { jobs: BTreeMap::new(), routes: start(routes, &under_way), under_way };
        if !desk.routes.is_empty() {
            let text = std::fs::read_to_string(records).unwrap_or_default();
            text.lines().filter_map(|l| serde_json::from_str(l).ok()).for_each(|line| desk.heard(&line));
        }
        desk
    }

    /// Returns true if a notice has not arrived yet.
    pub fn busy(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) > 0
    }

    /// Takes in a recorded line.
    pub fn heard(&mut self, line: &Value) {
        let (Some(job), Some(ts)) = (line["job"].as_str(), line["ts"].as_f64()) else { return };
        if self.routes.is_empty() {
            return;
        }
        let notifier = self.jobs.entry(job.into()).or_insert_with(|| Notifier::new(job));
        if let Some(said) = line["fact"].get("Notified") {
            let status = serde_json::from_value::<Status>(said["status"].clone());
            if let (Some(incident), Ok(status)) = (said["incident"].as_u64(), status) {
                notifier.was_told(incident, status);
            }
        } else if let Some(entry) = Entry::read(ts, &line["fact"]) {
            notifier.heard(entry);
        }
    }

    /// Sends the notices that are due at `now`. Returns the job and the fact to record for each.
    pub fn say(&mut self, now: u64) -> Vec<(String, Value)> {
        let notices: Vec<Notice> = self.jobs.values_mut().flat_map(|n| n.due(now, when)).collect();
        let mut said = Vec::new();
        for notice in notices {
            for route in &self.routes {
                self.under_way.fetch_add(1, Ordering::Relaxed);
                let _ = route.send(notice.clone());
            }
            said.push((notice.job, json!({"Notified": {"incident": notice.incident, "status": notice.status}})));
        }
        said
    }
}
