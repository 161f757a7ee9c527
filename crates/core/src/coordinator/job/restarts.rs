//! What the latest restart was charged for, and how long the next one waits.

use crate::id::{Incarnation, NodeId};
use crate::time::Time;
use std::time::Duration;

/// First and longest wait between generations that fail before their first step.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// A restart charged to the daily budget, while it is unknown whether the network was the cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charge {
    /// Time at which it was charged.
    pub at: Time,
    /// The node that counted as lost, and the life of its agent.
    pub lost: Option<(NodeId, Incarnation)>,
    /// Whether the first failure only followed from another one, in a generation that had completed
    /// steps.
    pub consequence: bool,
}

/// The latest restarts of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restarts {
    charge: Option<Charge>,
    /// Number of generations in a row that failed before their first step.
    in_a_row: u32,
    /// The next generation waits until then.
    wait_until: Option<Time>,
}

impl Restarts {
    /// Records what a restart was charged for.
    pub(crate) fn charge(&mut self, charge: Charge) {
        self.charge = Some(charge);
    }

    /// Returns the latest charge if it is of this kind, and drops it: it is decided.
    pub(crate) fn take_charge(&mut self, is: impl FnOnce(&Charge) -> bool) -> Option<Charge> {
        self.charge.take_if(|charge| is(charge))
    }

    /// Increases the wait between generations that fail before their first step. There is no wait
    /// if the user has set the number of restarts (`counted`).
    pub(crate) fn failed(&mut self, now: Time, has_lasted: bool, counted: bool) {
        self.in_a_row = if has_lasted { 1 } else { self.in_a_row + 1 };
        let wait = BACK_OFF.0 * 2u32.saturating_pow(self.in_a_row.saturating_sub(2).min(16));
        self.wait_until = (!counted && self.in_a_row >= 2).then(|| now.after(wait.min(BACK_OFF.1)));
    }

    /// Records that a generation works.
    pub(crate) fn worked(&mut self) {
        (self.in_a_row, self.wait_until) = (0, None);
    }

    /// Returns the time until which no world may form.
    #[must_use]
    pub fn held_back(&self, now: Time) -> Option<Time> {
        self.wait_until.filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_that_fail_early_wait_longer_each_time() {
        let mut restarts = Restarts::default();
        let mut waits = Vec::new();
        for _ in 0..9 {
            restarts.failed(Time(0), false, false);
            waits.push(restarts.held_back(Time(0)).map_or(0, |until| until.0));
        }
        assert_eq!(waits, [0, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000]);
        assert_eq!(restarts.held_back(Time(30_000)), None);
        restarts.failed(Time(0), true, false);
        assert_eq!(restarts.held_back(Time(0)), None, "this one lasted");
    }

    #[test]
    fn restarts_that_the_user_counts_do_not_wait() {
        let mut restarts = Restarts::default();
        for _ in 0..5 {
            restarts.failed(Time(0), false, true);
        }
        assert_eq!(restarts.held_back(Time(0)), None);
    }
}
