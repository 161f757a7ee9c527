//! When a job has something to do although nothing happens.

use super::job::{Job, Phase};
use crate::time::Time;
use std::time::Duration;

/// What a job may wait for: a closed list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timer {
    /// A node that lost its connection counts as lost.
    Reconnect,
    /// Too few nodes have joined, and the job gives up.
    JoinTimeout,
    /// The workers of an old world have ended by themselves, although no agent can confirm it.
    OldWorld,
    /// No node has joined for a while: the world forms with the nodes that are attached.
    LastCall,
    /// A node that does not end its workers is not waited for.
    Fence,
    /// A generation may form after others that failed early.
    BackOff,
    /// A node that must come back after a restart of the coordinator counts as lost.
    Reattach,
    /// The world may change its size, or an attempt is given up.
    Growth,
    /// A job that was asked to stop is over.
    Stop,
    /// The first cause of an incident is settled.
    Blame,
    /// A round of a node check is over.
    Check,
    /// Crashes that may have come after the last step count as failures.
    LateCrash,
    /// A request about a machine is made again.
    Request,
    /// Machines are requested for nodes that are missing.
    Missing,
    /// The record is written again.
    StoreRetry,
}

impl Job {
    /// Returns what the job waits for, and until when, as of `ticked`.
    fn timers(&self, ticked: Time) -> Vec<(Timer, Time)> {
        let ladder = self.record.spec.ladder();
        let mut all = Vec::new();
        let mut add = |timer: Timer, at: Option<Time>| all.extend(at.map(|at| (timer, at)));
        match &self.phase {
            Phase::Forming { since, last_join } => {
                add(Timer::JoinTimeout, Some(since.after(Duration::from_millis(self.record.spec.join_timeout_ms))));
                add(Timer::OldWorld, Some(since.after(ladder.orphan + ladder.silence * 2)));
                add(Timer::LastCall, last_join.map(|at| at.after(ladder.last_call)));
                add(Timer::BackOff, self.restarts.held_back(ticked));
            }
            Phase::Training { reattach_until, .. } => {
                add(Timer::Reattach, *reattach_until);
                add(Timer::Growth, self.growth_deadline());
            }
            Phase::Stopping { deadline, .. } => add(Timer::Stop, Some(*deadline)),
            Phase::Over { .. } => {}
        }
        add(Timer::Blame, self.evidence.until());
        add(Timer::Check, self.checks.until());
        add(Timer::LateCrash, self.ending.until());
        add(Timer::Missing, self.provisioning.missing_until());
        add(Timer::StoreRetry, self.write.retry_at());
        all.extend(self.nodes.lost_until(&ladder).map(|at| (Timer::Reconnect, at)));
        all.extend(self.record.machines.requests_due().map(|at| (Timer::Request, at)));
        if matches!(self.phase, Phase::Forming { .. }) {
            all.extend(self.nodes.fenced_until().map(|at| (Timer::Fence, at)));
        }
        all
    }

    /// Returns what is due next, and when. What was due when the job last `ticked` is done.
    #[must_use]
    pub fn next_timeout(&self, ticked: Time) -> Option<(Timer, Time)> {
        self.timers(ticked).into_iter().filter(|(_, at)| *at > ticked).min_by_key(|(timer, at)| (*at, *timer))
    }
}
