//! The life of a generation's workers: start, first step, end.

use super::Place;
use crate::id::{Incarnation, Step};
use serde::{Deserialize, Serialize};

/// What a node needs to start its workers of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// This node's place in the world.
    pub place: Place,
    /// The agent that began this run of the job, by which its checkpoint directories know the run.
    pub began: Incarnation,
    /// Restarts used so far (`TORCHELASTIC_RESTART_COUNT`).
    pub restarts: u32,
    /// Restarts allowed (`TORCHELASTIC_MAX_RESTARTS`).
    pub max_restarts: u32,
}

/// The first new step that all workers of a node have completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstStep {
    /// Number of steps completed.
    pub step: Step,
    /// The step that the workers continue from; `None`: not known.
    pub from: Option<Step>,
}

/// The state of a node on which no worker is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// Port of a fresh process-group store.
    pub store_port: u16,
    /// Steps that every worker of this node had completed; `None`: not known.
    pub reached: Option<Step>,
}
