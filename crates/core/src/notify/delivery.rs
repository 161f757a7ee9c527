//! Decides how long a notice is sent, and when it counts as sent: once every route has accepted it
//! or was given up.

use super::{Notice, Status};
use crate::coordinator::command::Fact;
use std::collections::BTreeMap;
use std::time::Duration;

/// First and longest pause between attempts.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// Attempts to send one notice on one route end after this time.
const PATIENCE: Duration = Duration::from_hours(1);

/// The attempts to send one notice on one route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempts {
    pause: Duration,
}

impl Default for Attempts {
    fn default() -> Self {
        Attempts { pause: PAUSE.0 }
    }
}

impl Attempts {
    /// Returns how long to wait after a failed attempt, `elapsed` after the first attempt began;
    /// `None`: the route is given up.
    pub fn next_pause(&mut self, elapsed: Duration) -> Option<Duration> {
        let pause = self.pause;
        self.pause = (pause * 2).min(PAUSE.1);
        (elapsed < PATIENCE).then_some(pause)
    }
}

/// What became of a notice on one route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The service has accepted it.
    Accepted,
    /// The service refuses it, or has not accepted it for too long.
    GivenUp,
    /// A later notice about the same incident is sent instead.
    Replaced,
}

/// A notice that some routes have not settled yet.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pending {
    job: String,
    run: u64,
    incident: u64,
    status: Status,
    /// Number of routes that have not settled it.
    routes: usize,
    /// Whether it was not replaced on some route.
    sent: bool,
}

/// The notices of all jobs that are being sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deliveries {
    pending: BTreeMap<u64, Pending>,
    last: u64,
}

impl Deliveries {
    /// Records that a notice is being sent on this many routes. Returns its number.
    pub fn sent(&mut self, notice: &Notice, routes: usize) -> u64 {
        self.last += 1;
        if routes > 0 {
            let (job, run) = (notice.job.clone(), notice.run);
            let (incident, status) = (notice.incident, notice.status);
            self.pending.insert(self.last, Pending { job, run, incident, status, routes, sent: false });
        }
        self.last
    }

    /// Records what became of a notice on one route. Once all routes have settled it, returns its
    /// job and the fact to record; a coordinator that reads the fact does not send the notice
    /// again.
    pub fn settled(&mut self, number: u64, fate: Fate) -> Option<(String, Fact)> {
        let pending = self.pending.get_mut(&number)?;
        pending.routes -= 1;
        pending.sent |= fate != Fate::Replaced;
        if pending.routes > 0 {
            return None;
        }
        let Pending { job, run, incident, status, sent, .. } = self.pending.remove(&number)?;
        // A notice that was replaced everywhere was never sent. Its successor will be recorded.
        sent.then_some((job, Fact::Notified { incident, status, run }))
    }

    /// Returns whether every notice is settled.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(status: Status) -> Notice {
        let text = String::new;
        Notice {
            key: text(),
            job: "j".into(),
            run: 7,
            incident: 1,
            status,
            node: text(),
            class: text(),
            whose: text(),
            title: text(),
            lines: Vec::new(),
            opened: 0,
            ended: None,
            over: false,
            spans: Vec::new(),
        }
    }

    #[test]
    fn a_notice_is_recorded_once_every_route_has_settled_it() {
        let mut deliveries = Deliveries::default();
        let number = deliveries.sent(&notice(Status::Firing), 3);
        assert_eq!(deliveries.settled(number, Fate::Accepted), None);
        assert_eq!(deliveries.settled(number, Fate::Replaced), None);
        assert!(!deliveries.is_empty());
        let fact = Fact::Notified { incident: 1, status: Status::Firing, run: 7 };
        assert_eq!(deliveries.settled(number, Fate::GivenUp), Some(("j".to_owned(), fact)));
        assert!(deliveries.is_empty());
    }

    #[test]
    fn a_notice_that_was_never_sent_is_not_recorded() {
        let mut deliveries = Deliveries::default();
        let (first, second) =
            (deliveries.sent(&notice(Status::Firing), 1), deliveries.sent(&notice(Status::Resolved), 1));
        assert_eq!(deliveries.settled(first, Fate::Replaced), None);
        assert!(matches!(
            deliveries.settled(second, Fate::Accepted),
            Some((_, Fact::Notified { status: Status::Resolved, .. }))
        ));
        assert!(deliveries.is_empty());
    }

    #[test]
    fn a_route_is_given_up_after_an_hour() {
        let mut attempts = Attempts::default();
        let (mut elapsed, mut pauses) = (Duration::ZERO, Vec::new());
        while let Some(pause) = attempts.next_pause(elapsed) {
            pauses.push(pause.as_secs());
            elapsed += pause;
        }
        assert_eq!(pauses.get(..8), Some(&[1, 2, 4, 8, 16, 32, 60, 60][..]));
        assert!(elapsed >= Duration::from_hours(1) && elapsed < Duration::from_mins(61), "{elapsed:?}");
    }
}
