//! Decides when a coordinator that is no longer needed ends.

use crate::time::Time;
use std::time::Duration;

/// An idle coordinator ends after this time.
const IDLE: Duration = Duration::from_secs(2);
/// The same time while notices are still to be sent: the end of a job is what users most need to
/// learn. Most services that fail are back within this time. A later coordinator of the same store
/// sends the remaining ones.
const NOTICES: Duration = Duration::from_mins(10);
/// A coordinator that no agent has ever joined ends after this time.
const UNUSED: Duration = Duration::from_mins(1);

/// What keeps a coordinator running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// An agent is connected, or a job is not over.
    pub job: bool,
    /// Notices are still to be sent.
    pub notices: bool,
}

/// Tracks for how long a coordinator has not been needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdleExit {
    needed: Time,
    used: bool,
}

impl IdleExit {
    /// Returns the state of a coordinator that starts now.
    #[must_use]
    pub fn new(now: Time) -> Self {
        IdleExit { needed: now, used: false }
    }

    /// Records that an agent has connected.
    pub fn used(&mut self) {
        self.used = true;
    }

    /// Returns whether the coordinator may end.
    pub fn is_over(&mut self, now: Time, needs: Needs) -> bool {
        if needs.job {
            self.needed = now;
        }
        let wait = match (self.used, needs.notices) {
            (false, _) => UNUSED,
            (true, true) => NOTICES,
            (true, false) => IDLE,
        };
        now.since(self.needed) > wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the second at which a coordinator ends that was needed for the first `job` seconds
    /// and has notices to send for the first `notices` seconds.
    fn ends(used: bool, job: u64, notices: u64) -> Option<u64> {
        let mut idle_exit = IdleExit::new(Time(0));
        if used {
            idle_exit.used();
        }
        (0..1000).find(|s| idle_exit.is_over(Time(s * 1000), Needs { job: *s < job, notices: *s < notices }))
    }

    #[test]
    fn it_ends_soon_after_the_last_job_and_waits_longer_for_notices() {
        assert_eq!(ends(true, 10, 0), Some(12));
        assert_eq!(ends(true, 10, 30), Some(30));
        assert_eq!(ends(true, 10, 1000), Some(610));
        assert_eq!(ends(true, 1000, 0), None);
    }

    #[test]
    fn it_waits_a_minute_for_its_first_agent() {
        assert_eq!(ends(false, 0, 0), Some(61));
    }
}
