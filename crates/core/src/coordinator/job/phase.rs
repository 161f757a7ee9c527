//! What a job is doing, with all that matters only meanwhile.

use crate::id::NodeId;
use crate::message::{ExitReason, Stop};
use crate::time::Time;
use std::collections::BTreeSet;

/// What a job is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It waits for nodes, for fenced workers to be gone, or for others to join.
    Forming {
        /// Time at which this phase began.
        since: Time,
        /// When the last node joined; `None`: the nodes are known, so the job does not wait for
        /// others.
        last_join: Option<Time>,
    },
    /// Workers run.
    Training {
        /// Nodes whose workers are all over.
        finished: BTreeSet<NodeId>,
        /// After a coordinator restart: until when nodes may come back.
        reattach_until: Option<Time>,
    },
    /// The job was asked to stop: workers have received the signal and may finish.
    Stopping {
        /// Nodes whose workers are gone.
        done: BTreeSet<NodeId>,
        /// When the job stops waiting for the others.
        deadline: Time,
        /// Signal of the stop, and the step at which ranks stop.
        stop: Stop,
    },
    /// The job is over.
    Over {
        /// Exit code of the job.
        code: i32,
        /// Cause of the end, for people.
        why: String,
    },
}

impl Phase {
    /// Returns the end of a job that was asked to stop.
    #[must_use]
    pub fn stopped_by(stop: Stop) -> Self {
        let ExitReason { code, why } = stop.end();
        Phase::Over { code, why }
    }

    /// Returns the phase of a job whose world forms again from nodes that are known.
    #[must_use]
    pub fn forming(now: Time) -> Self {
        Phase::Forming { since: now, last_join: None }
    }

    /// Returns the phase of a job whose world begins to train.
    #[must_use]
    pub fn training() -> Self {
        Phase::Training { finished: BTreeSet::new(), reattach_until: None }
    }

    /// Returns whether workers run and no node is expected to come back.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        matches!(self, Phase::Training { reattach_until: None, .. })
    }

    /// Returns whether workers run.
    #[must_use]
    pub fn is_training(&self) -> bool {
        matches!(self, Phase::Training { .. })
    }

    /// Returns whether the job is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self, Phase::Over { .. })
    }
}
