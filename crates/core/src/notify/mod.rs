//! Decides what people learn about a job's incidents, and when: once when it is known what was at
//! fault, and once when the incident is over. A person is called only if one is needed: the job has
//! ended, or does not recover.

mod delivery;
mod status;

pub use delivery::{Attempts, Deliveries, Fate};
pub use status::Status;

use crate::coordinator::command::Fact;
use crate::failure::BLAME_WINDOW;
use crate::history::{Entry, Incident, Outcome, incidents, narrative};
use crate::severity::Scope;
use serde::Serialize;
use std::collections::BTreeMap;

/// Time until the fault is known, in microseconds; longer if only consequences were reported.
const KNOWN: u64 = BLAME_WINDOW.as_micros() as u64 + 300_000;
const KNOWN_AT_LAST: u64 = BLAME_WINDOW.as_micros() as u64 + 3_500_000;
/// An incident that is open for this long needs a person, in microseconds.
const PATIENCE: u64 = 600_000_000;

/// One message about one incident. A later message with the same key replaces it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Notice {
    /// Identifies the incident in all messages about it: job, run and number.
    pub key: String,
    /// Name of the job.
    pub job: String,
    /// When the run began, in microseconds since 1970.
    pub run: u64,
    /// Number of the incident within the run.
    pub incident: u64,
    /// State of the incident.
    pub status: Status,
    /// Name of the node at fault.
    pub node: String,
    /// Class of the failure, as in the failure table.
    pub class: String,
    /// What is at fault, for people.
    pub whose: String,
    /// A title of one line.
    pub title: String,
    /// The text of `everstep explain`.
    pub lines: Vec<String>,
    /// When the incident was declared, in microseconds since 1970.
    pub opened: u64,
    /// When it was over, in microseconds since 1970.
    pub ended: Option<u64>,
    /// No further message will follow: the incident is over, or the job is.
    pub over: bool,
    /// The stages so far, as in [`Incident::spans`].
    pub spans: Vec<(&'static str, u64, u64)>,
}

/// The notifications of one job.
#[derive(Clone, Debug, Default)]
pub struct Notifier {
    job: String,
    entries: Vec<Entry>,
    over: bool,
    /// When the run began, in microseconds since 1970.
    run: u64,
    /// Incidents of this run by number, and the latest notice that was sent about each: in this
    /// life of the coordinator, or according to its records.
    sent: BTreeMap<u64, Status>,
}

impl Notifier {
    /// Creates a notifier for a job without history.
    #[must_use]
    pub fn new(job: &str) -> Self {
        Notifier { job: job.into(), ..Notifier::default() }
    }

    /// Takes in a recorded entry about the job.
    pub fn add(&mut self, entry: Entry) {
        match &entry.fact {
            Fact::GenerationStarted { restarts: 0, .. } if self.over || self.entries.is_empty() => {
                *self = Notifier { job: std::mem::take(&mut self.job), run: entry.at, ..Notifier::default() };
            }
            Fact::Ended { .. } => self.over = true,
            // These entries are frequent and irrelevant to incidents.
            Fact::Spent { .. } | Fact::Progress { .. } => return,
            _ => {}
        }
        self.entries.push(entry);
    }

    /// Returns the notices that are due at `now`, in order, each only once. `when` formats a time
    /// for people.
    pub fn due(&mut self, now: u64, when: impl Fn(u64) -> String) -> Vec<Notice> {
        let mut notices = Vec::new();
        for incident in incidents(&self.entries) {
            let Some(status) = status(&incident, now) else { continue };
            let sent = self.sent.get(&incident.number).copied();
            if sent.is_some_and(|sent| sent >= status) {
                continue;
            }
            self.sent.insert(incident.number, status);
            notices.push(self.notice(&incident, status, &when));
        }
        notices
    }

    /// Marks a notice as recorded: every route has settled it. `run` is when its run began; 0: not
    /// recorded.
    pub fn mark_sent(&mut self, run: u64, incident: u64, status: Status) {
        // A route may settle a notice after the job was started again, which numbers its incidents
        // from 1 again.
        if run != 0 && run != self.run {
            return;
        }
        let sent = self.sent.entry(incident).or_insert(status);
        *sent = (*sent).max(status);
    }

    fn notice(&self, of: &Incident, status: Status, when: &impl Fn(u64) -> String) -> Notice {
        let (class, whose) = (of.class(), of.verdict().map_or(Scope::Node, |v| v.scope).label());
        let (job, number, node) = (&self.job, of.number, of.at_fault());
        let title = match status {
            Status::Firing => format!("{job} inc-{number}: {class} on node {node}, recovering"),
            Status::Person => format!("{job} inc-{number}: {class} on node {node}: action required"),
            Status::Resolved => format!("{job} inc-{number}: {class} on node {node}, handled"),
        };
        Notice {
            key: format!("everstep/{job}/{}/{number}", self.run),
            job: job.clone(),
            run: self.run,
            incident: number,
            status,
            node: node.0.clone(),
            class: class.to_owned(),
            whose: whose.to_owned(),
            title,
            lines: narrative(of, job, &when(of.opened)),
            opened: of.opened,
            ended: of.caught_up.or(of.stepped.map(|(at, _)| at)).filter(|_| status == Status::Resolved),
            over: status == Status::Resolved || matches!(of.outcome, Outcome::Ended { .. }),
            spans: of.spans(),
        }
    }
}

/// Returns the state to report for an incident, or `None` if it is too early.
fn status(of: &Incident, now: u64) -> Option<Status> {
    let follows = of.verdict().is_some_and(|v| v.follows);
    let known = of.blamed.is_some() || now >= of.opened + if follows { KNOWN_AT_LAST } else { KNOWN };
    match &of.outcome {
        Outcome::Ended { code, .. } if *code != 0 && *code < 128 => Some(Status::Person),
        // The person who ended the job knows why.
        Outcome::Ended { .. } | Outcome::Superseded { .. } => Some(Status::Resolved),
        // For `GoesOn`, the job's position is unknown, but it trains.
        Outcome::Recovered | Outcome::GoesOn => known.then_some(Status::Resolved),
        Outcome::Repeating if of.cut_off => Some(Status::Resolved),
        Outcome::Repeating => known.then_some(Status::Firing),
        Outcome::Open if now >= of.opened + PATIENCE => Some(Status::Person),
        Outcome::Open => known.then_some(Status::Firing),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordinator::command::Action;
    use crate::id::{Generation, NodeId, Step};

    fn at(seconds: u64, fact: Fact) -> Entry {
        Entry { at: seconds * 1_000_000, fact }
    }

    fn started(generation: u64, restarts: u32) -> Fact {
        Fact::GenerationStarted { generation: Generation(generation), world_size: 2, restarts }
    }

    fn lost(incident: u64, generation: u64) -> Fact {
        let (node, action) = (NodeId("1".into()), Action::Reconfigure);
        Fact::IncidentOpened { incident, generation: Generation(generation), node, failure: None, action }
    }

    fn due(n: &mut Notifier, seconds: u64) -> Vec<(u64, Status)> {
        n.due(seconds * 1_000_000, |_| String::new()).into_iter().map(|n| (n.incident, n.status)).collect()
    }

    #[test]
    fn each_incident_once_and_again_when_it_is_over() {
        let mut n = Notifier::new("j");
        n.add(at(1, started(1, 0)));
        n.add(at(10, lost(1, 1)));
        assert_eq!(due(&mut n, 11), []);
        assert_eq!(due(&mut n, 13), [(1, Status::Firing)]);
        assert_eq!(due(&mut n, 14), []);
        n.add(at(15, started(2, 1)));
        n.add(at(
            16,
            Fact::FirstStep {
                generation: Generation(2),
                step: Step(9),
                incident: Some(1),
                from: Some(Step(8)),
                had: Some(Step(8)),
            },
        ));
        assert_eq!(due(&mut n, 17), [(1, Status::Resolved)]);
        assert_eq!(due(&mut n, 5000), []);
    }

    #[test]
    fn a_person_is_called_when_one_is_needed() {
        let mut n = Notifier::new("j");
        n.add(at(1, started(1, 0)));
        n.add(at(10, lost(1, 1)));
        assert_eq!(due(&mut n, 20), [(1, Status::Firing)]);
        assert_eq!(due(&mut n, 611), [(1, Status::Person)]);
        n.add(at(700, lost(2, 1)));
        n.add(at(701, Fact::Ended { code: 1, why: "no restart left".into() }));
        assert_eq!(due(&mut n, 702), [(1, Status::Resolved), (2, Status::Person)]);
        // The first incident of the next run is a new one.
        n.add(at(800, started(7, 0)));
        n.add(at(801, lost(1, 7)));
        assert_eq!(due(&mut n, 810), [(1, Status::Firing)]);
    }

    #[test]
    fn what_an_earlier_life_has_said_is_not_said_again() {
        let mut n = Notifier::new("j");
        n.add(at(1, started(1, 0)));
        n.add(at(10, lost(1, 1)));
        n.mark_sent(1_000_000, 1, Status::Firing);
        assert_eq!(due(&mut n, 20), []);
    }

    #[test]
    fn what_was_said_about_an_earlier_run_is_not_taken_for_this_one() {
        let mut n = Notifier::new("j");
        n.add(at(1, started(1, 0)));
        n.add(at(10, lost(1, 1)));
        n.add(at(11, Fact::Ended { code: 1, why: "no restart left".into() }));
        n.add(at(20, started(2, 0)));
        n.add(at(30, lost(1, 2)));
        // A route accepts the notice about the first run now.
        n.mark_sent(1_000_000, 1, Status::Person);
        assert_eq!(due(&mut n, 40), [(1, Status::Firing)]);
    }
}
