//! Connects the coordinator's records with the routes: keeps track of the jobs, and of the notices
//! already sent.

use super::{routes::Route, start};
use chrono::DateTime;
use everstep_core::coordinator::command::Fact;
use everstep_core::history::{Entry, LogLine};
use everstep_core::notify::{Notice, Notifier};
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
            text.lines().filter_map(|l| serde_json::from_str(l).ok()).for_each(|line| desk.heard(line));
        }
        desk
    }

    /// Returns true if a notice has not arrived yet.
    pub fn busy(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) > 0
    }

    /// Takes in a recorded line.
    pub fn heard(&mut self, line: LogLine) {
        if self.routes.is_empty() {
            return;
        }
        let notifier = self.jobs.entry(line.job.0.clone()).or_insert_with(|| Notifier::new(&line.job.0));
        match line.fact {
            Fact::Notified { incident, status } => notifier.was_told(incident, status),
            _ => notifier.heard(Entry::from(line)),
        }
    }

    /// Sends the notices that are due at `now`. Returns the job and the fact to record for each.
    pub fn say(&mut self, now: u64) -> Vec<(String, Fact)> {
        let notices: Vec<Notice> = self.jobs.values_mut().flat_map(|n| n.due(now, when)).collect();
        let mut said = Vec::new();
        for notice in notices {
            for route in &self.routes {
                self.under_way.fetch_add(1, Ordering::Relaxed);
                let _ = route.send(notice.clone());
            }
            said.push((notice.job, Fact::Notified { incident: notice.incident, status: notice.status }));
        }
        said
    }
}
