//! The job's spec, and the one place where all timeouts are derived from `--detect-timeout`.

use crate::id::JobId;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The number of restarts a job may use before it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestartBudget {
    /// `--max-restarts N` was given: exactly N restarts for the whole job.
    Exactly(u32),
    /// `--max-restarts` was not given. A worker's failure before the first optimizer step ends the
    /// job, as under torchrun. Later failures, and the loss of a node at any time, restart the job
    /// at most this often within 24 hours.
    PerDayAfterFirstStep(u32),
}

/// Restarts allowed within 24 hours when `--max-restarts` is not given.
pub const RESTARTS_PER_DAY: u32 = 10;

/// How far everstep goes with remedies for machines (`--policy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Policy {
    /// Report what would be done.
    #[default]
    Observe,
    /// Ask a person for approval before a remedy.
    Advise,
    /// Carry out the remedy.
    Act,
}

/// When nodes are checked (see [`crate::node_check`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckWhen {
    /// After failures without an explanation.
    #[default]
    OnTrouble,
    /// Also before the first start.
    First,
    /// Only check the nodes; the job ends after that.
    Only,
    /// Never.
    Never,
}

/// What a job needs, and its timeouts. All nodes of a job must present the same spec.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Name of the job.
    pub job: JobId,
    /// Minimum number of nodes in a world (`--nnodes MIN:MAX`).
    pub nodes_min: u32,
    /// Maximum number of nodes in a world.
    pub nodes_max: u32,
    /// The number of nodes in a world is a multiple of this (`--node-unit`).
    pub node_unit: u32,
    /// Nodes beyond the maximum that are kept ready (`--spares`).
    #[serde(default)]
    pub spares: u32,
    /// Restart budget of the whole job.
    pub restarts: RestartBudget,
    /// The base of all timeouts, in milliseconds (`--detect-timeout`).
    pub detect_timeout_ms: u64,
    /// How long a world that lacks nodes waits for them before the job asks to be requeued, in
    /// milliseconds (`--join-timeout`).
    pub join_timeout_ms: u64,
    /// How far remedies go.
    #[serde(default)]
    pub policy: Policy,
    /// When the nodes are checked.
    #[serde(default)]
    pub check: CheckWhen,
}

/// Why a spec is invalid; the message says how to fix it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// MIN is larger than MAX.
    #[error("--nnodes {min}:{max} asks for at least {min} but at most {max} nodes; write it as --nnodes {max}:{min}")]
    Inverted {
        /// The MIN given.
        min: u32,
        /// The MAX given.
        max: u32,
    },
    /// MIN is zero.
    #[error("--nnodes 0 leaves nothing to run on; use --nnodes 1 or more")]
    NoNodes,
    /// `--node-unit` is zero or larger than MAX.
    #[error("--node-unit {unit} does not fit into --nnodes {max}; use a unit of at most {max}")]
    Unit {
        /// The unit given.
        unit: u32,
        /// The MAX given.
        max: u32,
    },
    /// `--detect-timeout` is too short to distinguish a failure from noise.
    #[error("--detect-timeout {0} ms is too short to tell a failure from a scheduling delay; use 200 ms or more")]
    Timeout(u64),
}

impl JobSpec {
    /// Checks everything that can be checked before a port is opened.
    ///
    /// # Errors
    /// Returns the first [`SpecError`] found; its message is written for the user.
    pub fn validate(&self) -> Result<(), SpecError> {
        if self.nodes_min > self.nodes_max {
            return Err(SpecError::Inverted { min: self.nodes_min, max: self.nodes_max });
        }
        if self.nodes_min == 0 {
            return Err(SpecError::NoNodes);
        }
        if self.node_unit == 0 || self.node_unit > self.nodes_max {
            return Err(SpecError::Unit { unit: self.node_unit, max: self.nodes_max });
        }
        if self.detect_timeout_ms < 200 {
            return Err(SpecError::Timeout(self.detect_timeout_ms));
        }
        Ok(())
    }

    /// Returns the timeouts derived from `--detect-timeout`.
    #[must_use]
    pub fn ladder(&self) -> Ladder {
        Ladder::from_detect_timeout(Duration::from_millis(self.detect_timeout_ms))
    }
}

/// Every timeout of the system, derived from `--detect-timeout`. `everstep doctor` prints them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ladder {
    /// Interval at which each side of a connection sends something.
    pub ping: Duration,
    /// A closed connection may be reopened within this time without counting as a lost node.
    pub reconnect: Duration,
    /// The same for a node whose messages had been arriving late: packets are being lost, and a
    /// second attempt is worthwhile.
    pub reconnect_late: Duration,
    /// A connection that is silent for this long counts as lost.
    pub silence: Duration,
    /// A step or section may be silent for at least this long.
    pub step_silence: Duration,
    /// After a coordinator restart, nodes have this long to come back before they count as lost.
    pub reattach: Duration,
    /// An elastic world forms when no node has joined for this long.
    pub last_call: Duration,
    /// Workers of a fenced generation get this long between TERM and KILL.
    pub fence_grace: Duration,
    /// When a failure ends the job, workers that are failing elsewhere have this long to report
    /// why.
    pub last_words: Duration,
    /// An agent without a coordinator keeps its workers for this long, then ends them. It exits
    /// with code 75 after a further `--join-timeout`.
    pub orphan: Duration,
    /// First pause before a write to the store is retried.
    pub store_retry: Duration,
}

impl Ladder {
    /// Derives all timeouts from `--detect-timeout`.
    #[must_use]
    pub fn from_detect_timeout(detect: Duration) -> Self {
        Ladder {
            ping: detect / 8,
            reconnect: detect / 5,
            reconnect_late: detect * 4,
            silence: detect / 2,
            step_silence: detect,
            reattach: (detect * 3).max(Duration::from_secs(5)),
            last_call: detect,
            fence_grace: detect / 4,
            last_words: detect / 2,
            orphan: (detect * 15).max(Duration::from_secs(30)),
            store_retry: detect / 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(min: u32, max: u32) -> JobSpec {
        JobSpec {
            job: JobId("j".into()),
            nodes_min: min,
            nodes_max: max,
            node_unit: 1,
            spares: 0,
            restarts: RestartBudget::Exactly(3),
            detect_timeout_ms: 2000,
            join_timeout_ms: 600_000,
            policy: crate::spec::Policy::Observe,
            check: crate::spec::CheckWhen::Never,
        }
    }

    #[test]
    fn an_inverted_range_says_how_to_write_it() {
        let text = spec(4, 2).validate().unwrap_err().to_string();
        assert!(text.contains("--nnodes 2:4"), "{text}");
    }

    #[test]
    fn timeouts_rise_along_the_ladder() {
        for ms in [200, 2000, 60_000] {
            let l = Ladder::from_detect_timeout(Duration::from_millis(ms));
            assert!(l.ping < l.reconnect && l.reconnect < l.silence && l.silence < l.reattach && l.reattach < l.orphan);
        }
    }
}
