//! Detects which connections of the coordinator have been silent for too long, and which are due a
//! ping.
//!
//! Time in which the coordinator's own process was suspended does not count as silence of a peer.
//! It shows as a late [`KeepAlive::check`]. Nor does it count for any deadline of a job: see
//! [`WakingClock`].

use crate::id::Session;
use crate::time::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// How often to call [`KeepAlive::check`].
pub const CHECK_EVERY: Duration = Duration::from_millis(25);
/// A check that is late by more than this was suspended.
const SUSPENDED: Duration = CHECK_EVERY.saturating_mul(2);
/// The silence that ends a connection whose agent has not introduced itself, and the time between
/// its pings.
const UNKNOWN: (Duration, Duration) = (Duration::from_secs(2), Duration::from_millis(250));

/// A clock that stands still while the process that reads it is suspended, so that no deadline
/// passes then. Read it at least every [`CHECK_EVERY`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WakingClock {
    read: Time,
    suspended: Duration,
}

impl WakingClock {
    /// Returns a clock that shows `now`.
    #[must_use]
    pub fn new(now: Time) -> Self {
        WakingClock { read: now, suspended: Duration::ZERO }
    }

    /// Returns the time without that in which the process was suspended.
    pub fn read(&mut self, now: Time) -> Time {
        self.suspended += now.since(self.read).saturating_sub(SUSPENDED);
        self.read = self.read.max(now);
        Time(self.read.0.saturating_sub(u64::try_from(self.suspended.as_millis()).unwrap_or(u64::MAX)))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Link {
    last_received: Time,
    pinged: Time,
    silence: Duration,
    ping: Duration,
    introduced: bool,
}

/// What to do about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Send a ping on this connection.
    Ping(Session),
    /// Close the connection: it has been silent for too long.
    Close(Session),
}

/// When each connection last received something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    links: BTreeMap<Session, Link>,
    checked: Time,
}

impl KeepAlive {
    /// Returns a state without connections.
    #[must_use]
    pub fn new(now: Time) -> Self {
        KeepAlive { links: BTreeMap::new(), checked: now }
    }

    /// Records that a connection was opened.
    pub fn opened(&mut self, now: Time, session: Session) {
        let (silence, ping) = UNKNOWN;
        self.links.insert(session, Link { last_received: now, pinged: now, silence, ping, introduced: false });
    }

    /// Records the introduction of the agent at the other end. Its job sets the silence that ends
    /// the connection, and the time between pings.
    pub fn introduced(&mut self, session: Session, silence: Duration, ping: Duration) {
        if let Some(link) = self.links.get_mut(&session) {
            *link = Link { silence, ping, introduced: true, ..*link };
        }
    }

    /// Records that a connection was closed.
    pub fn closed(&mut self, session: Session) {
        self.links.remove(&session);
    }

    /// Records that a line has arrived. Returns whether it came so late that packets are being lost
    /// on the way: after at least half of the silence that ends the connection.
    pub fn received(&mut self, now: Time, session: Session) -> bool {
        let suspended = now.since(self.checked).saturating_sub(SUSPENDED);
        let Some(link) = self.links.get_mut(&session) else { return false };
        let gap = now.since(link.last_received).saturating_sub(suspended);
        link.last_received = now;
        link.introduced && gap >= link.silence / 2
    }

    /// Returns how long a connection has been silent.
    #[must_use]
    pub fn silence(&self, now: Time, session: Session) -> Option<Duration> {
        self.links.get(&session).map(|link| now.since(link.last_received))
    }

    /// Returns what to do now. A connection to close is forgotten.
    pub fn check(&mut self, now: Time) -> Vec<Due> {
        let suspended = now.since(self.checked).saturating_sub(SUSPENDED);
        self.checked = now;
        let mut due = Vec::new();
        self.links.retain(|session, link| {
            link.last_received = link.last_received.after(suspended).min(now);
            let silent = now.since(link.last_received) > link.silence;
            if silent {
                due.push(Due::Close(*session));
            } else if now.since(link.pinged) >= link.ping {
                link.pinged = now;
                due.push(Due::Ping(*session));
            }
            !silent
        });
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const A: Session = Session(1);
    const B: Session = Session(2);

    /// Runs checks from `from` to `to`, in milliseconds, and returns the closed connections.
    fn run(alive: &mut KeepAlive, from: u64, to: u64) -> Vec<Session> {
        let checks = (from..to).step_by(CHECK_EVERY.as_millis() as usize);
        let due = checks.flat_map(|at| alive.check(Time(at))).collect::<Vec<_>>();
        due.into_iter().filter_map(|d| if let Due::Close(s) = d { Some(s) } else { None }).collect()
    }

    #[test]
    fn only_the_silent_connection_is_closed_and_only_once() {
        let mut alive = KeepAlive::new(Time(0));
        alive.opened(Time(0), A);
        alive.opened(Time(0), B);
        assert!(run(&mut alive, 25, 1500).is_empty());
        assert!(!alive.received(Time(1500), A), "an agent that is not introduced is not late");
        assert_eq!(run(&mut alive, 1500, 3400), [B]);
        assert_eq!(run(&mut alive, 3400, 6000), [A]);
    }

    #[test]
    fn each_connection_is_pinged_at_its_own_pace() {
        let mut alive = KeepAlive::new(Time(0));
        for (session, ping) in [(A, 100), (B, 400)] {
            alive.opened(Time(0), session);
            alive.introduced(session, Duration::from_secs(9), Duration::from_millis(ping));
        }
        let due: Vec<Due> = (0..2001).step_by(25).flat_map(|at| alive.check(Time(at))).collect();
        let pings = |of| due.iter().filter(|d| **d == Due::Ping(of)).count();
        assert_eq!((pings(A), pings(B)), (20, 5));
    }

    #[test]
    fn a_late_line_shows_packet_loss_and_a_suspended_coordinator_does_not() {
        let mut alive = KeepAlive::new(Time(0));
        alive.opened(Time(0), A);
        alive.introduced(A, Duration::from_secs(2), Duration::from_millis(250));
        assert!(run(&mut alive, 25, 1200).is_empty());
        assert!(alive.received(Time(1200), A));
        assert!(run(&mut alive, 1200, 1300).is_empty());
        assert!(!alive.received(Time(13_000), A), "nothing was checked for 11.7 s");
        assert!(alive.check(Time(13_001)).iter().all(|d| matches!(d, Due::Ping(_))));
    }

    #[test]
    fn a_waking_clock_leaves_out_only_the_time_in_which_nobody_read_it() {
        let mut clock = WakingClock::new(Time(1000));
        assert_eq!([1025, 1075, 1074].map(|now| clock.read(Time(now))), [Time(1025), Time(1075), Time(1075)]);
        assert_eq!(clock.read(Time(9075)), Time(1125), "suspended for 8 s, of which 50 ms may have been usual");
        assert_eq!(clock.read(Time(9100)), Time(1150));
    }

    proptest! {
        /// Checks that a connection that receives often enough while the coordinator runs is never
        /// closed, however often and long the coordinator is suspended.
        #[test]
        fn a_suspended_coordinator_closes_nobody(pauses in prop::collection::vec((1u64..40, 0u64..60_000), 1..40)) {
            let mut alive = KeepAlive::new(Time(0));
            alive.opened(Time(0), A);
            let mut now = 0;
            for (checks, pause) in pauses {
                for _ in 0..checks {
                    now += 25;
                    prop_assert!(!alive.check(Time(now)).contains(&Due::Close(A)));
                }
                alive.received(Time(now), A);
                now += pause;
            }
        }

        /// Checks that a silent agent is closed after its silence in time that the coordinator ran.
        #[test]
        fn a_silent_agent_is_closed_in_time(late in prop::collection::vec(0u64..50, 400)) {
            let mut alive = KeepAlive::new(Time(0));
            alive.opened(Time(0), A);
            let mut now = 0;
            let closed = late.iter().find_map(|late| {
                now += 25 + late;
                alive.check(Time(now)).contains(&Due::Close(A)).then_some(now)
            });
            // Each check may be excused for its lateness beyond twice the usual time.
            let excused: u64 = late.iter().map(|l| l.saturating_sub(25)).sum();
            prop_assert!(closed.is_some_and(|at| (2000..=2100 + excused).contains(&at)), "{closed:?}");
        }
    }
}
