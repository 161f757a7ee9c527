//! What the user asked for, and the one place where all times are derived from `--detect-timeout`.

use crate::id::JobId;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How many restarts a job may use before it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestartBudget {
    /// `--max-restarts N` was given: exactly N for the whole job, as the user said.
    Exactly(u32),
    /// Not given: a worker's failure before the first optimizer step fails as under torchrun; later ones,
    /// and the loss of a node at any time, restart at most this often within 24 hours.
    PerDayAfterFirstStep(u32),
}

/// The default when `--max-restarts` is not given.
pub const RESTARTS_PER_DAY: u32 = 10;

/// What is done about machines beyond this job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Policy {
    /// Say what would be done.
    #[default]
    Observe,
    /// Ask before it is done.
    Advise,
    /// Do it.
    Act,
}

/// When nodes are checked (see [`crate::node_check`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckWhen {
    /// After failures that nothing explains.
    #[default]
    OnTrouble,
    /// Also before the first start.
    First,
    /// There is nothing else to do: the job is over then.
    Only,
    /// Never.
    Never,
}

/// What a job needs and how patient it is. All nodes of a job must present an equal spec.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Name of the job.
    pub job: JobId,
    /// Fewest nodes that may form a world (`--nnodes MIN:MAX`).
    pub nodes_min: u32,
    /// Most nodes that a world may have.
    pub nodes_max: u32,
    /// Worlds have a multiple of this many nodes.
    pub node_unit: u32,
    /// Nodes beyond the most that are kept ready.
    #[serde(default)]
    pub spares: u32,
    /// Restart budget, job-wide.
    pub restarts: RestartBudget,
    /// The one knob for all timeouts, in milliseconds.
    pub detect_timeout_ms: u64,
    /// How long a world that lacks nodes waits for them before the job asks to be requeued, in milliseconds.
    pub join_timeout_ms: u64,
    /// What is done about machines.
    #[serde(default)]
    pub policy: Policy,
    /// When its nodes are checked.
    #[serde(default)]
    pub check: CheckWhen,
}

/// Why a spec cannot be used; the text says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// MIN is larger than MAX.
    #[error("--nnodes {min}:{max} asks for at least {min} but at most {max} nodes; write it as --nnodes {max}:{min}")]
    Inverted {
        /// the MIN given
        min: u32,
        /// the MAX given
        max: u32,
    },
    /// Zero nodes.
    #[error("--nnodes 0 leaves nothing to run on; use --nnodes 1 or more")]
    NoNodes,
    /// The unit does not fit.
    #[error("--node-unit {unit} does not fit into --nnodes {max}; use a unit of at most {max}")]
    Unit {
        /// the unit given
        unit: u32,
        /// the MAX given
        max: u32,
    },
    /// Timeout too short to be told from noise.
    #[error("--detect-timeout {0} ms is shorter than a scheduler hiccup; use 200 ms or more")]
    Timeout(u64),
}

impl JobSpec {
    /// Checks everything that can be known before a port is opened.
    ///
    /// # Errors
    /// One [`SpecError`] with a sentence for the user.
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

    /// The derived times.
    #[must_use]
    pub fn ladder(&self) -> Ladder {
        Ladder::from_detect_timeout(Duration::from_millis(self.detect_timeout_ms))
    }
}

/// Every timeout of the system, derived from one knob. `everstep doctor` prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ladder {
    /// Each side of a connection says something this often.
    pub ping: Duration,
    /// A closed connection may be re-opened within this time without counting as a lost node.
    pub reconnect: Duration,
    /// The same for a node whose lines had been coming late: packets are being lost, and it is worth a second try.
    pub reconnect_late: Duration,
    /// A silent connection is lost after this.
    pub silence: Duration,
    /// A step or section may be silent for at least this long.
    pub step_silence: Duration,
    /// After a coordinator restart, nodes have this long to come back before they count as lost.
    pub reattach: Duration,
    /// An elastic world forms when no node has joined for this long.
    pub last_call: Duration,
    /// Workers of a fenced generation get this long between TERM and KILL.
    pub fence_grace: Duration,
    /// When a failure ends the job, workers elsewhere that are failing, too, may say of what for this long.
    pub last_words: Duration,
    /// An agent without a coordinator keeps its workers for this long, then stops them (exit code 75).
    pub orphan: Duration,
    /// First pause before a write to the store is tried again.
    pub store_retry: Duration,
}

impl Ladder {
    /// Derives all times from `--detect-timeout`.
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
