//! Requests about machines, as they are stored, shown and carried out.

use crate::id::{Incarnation, JobId, NodeId};
use crate::time::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Something to do about machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", tag = "action")]
pub enum Remedy {
    /// Keep this machine out of use until someone has looked after it.
    Cordon {
        /// The node.
        node: NodeId,
        /// Its host.
        host: String,
        /// The reason, for people.
        why: String,
    },
    /// Give this machine to another job.
    Move {
        /// The node, under the name that its job uses.
        node: NodeId,
        /// This life of its agent.
        incarnation: Incarnation,
        /// Its host.
        host: String,
        /// The other job.
        to: JobId,
        /// The reason, for people.
        why: String,
    },
    /// One more machine is needed.
    Add {
        /// The reason, for people.
        why: String,
    },
}

impl std::fmt::Display for Remedy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Remedy::Cordon { node, host, why } => write!(f, "cordon node {node} ({host}): {why}"),
            Remedy::Move { node, host, to, why, .. } => write!(f, "move node {node} ({host}) to job {to}: {why}"),
            Remedy::Add { why } => write!(f, "add a machine: {why}"),
        }
    }
}

/// The stage of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Stage {
    /// It was only reported.
    Noted,
    /// It waits for approval.
    Asked,
    /// It must be carried out.
    Due {
        /// Attempts so far.
        tries: u32,
        /// Time of the next attempt at the earliest.
        at: Time,
    },
    /// The machine provider has accepted it.
    Taken,
    /// The remedy is complete.
    Done,
    /// It could not be carried out.
    Failed {
        /// The reason.
        why: String,
    },
}

impl Stage {
    /// Returns the stage in a word, for people.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Stage::Noted => "noted",
            Stage::Asked => "waiting",
            Stage::Due { .. } => "pending",
            Stage::Taken => "accepted",
            Stage::Done => "done",
            Stage::Failed { .. } => "failed",
        }
    }
}

/// A request for a remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Request {
    /// Its number within the job, from 1, by which the provider recognizes a repeated request.
    pub id: u64,
    /// The remedy.
    pub remedy: Remedy,
    /// How far it has come.
    pub stage: Stage,
    /// When it was made.
    pub at: Time,
}

impl Request {
    /// Returns whether it is for a machine that may still arrive.
    pub(crate) fn awaits(&self) -> bool {
        matches!(self.remedy, Remedy::Add { .. }) && !matches!(self.stage, Stage::Done | Stage::Failed { .. })
    }

    /// Returns whether the request takes this life of a node away from its job.
    pub(crate) fn takes(&self, id: &NodeId, life: Incarnation) -> bool {
        let decided = !matches!(self.stage, Stage::Noted | Stage::Asked | Stage::Failed { .. });
        let this = matches!(&self.remedy, Remedy::Move { node, incarnation, .. } if node == id && *incarnation == life);
        decided && this
    }
}

/// Why a person cannot approve a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotApproved {
    #[error("there is no request {id}; everstep approve lists them")]
    Unknown { id: u64 },
    #[error("request {id} has already been decided: {remedy}")]
    Decided { id: u64, remedy: Remedy },
}

/// Why the provisioner did not carry out a request, for people. Every cause has the same effect:
/// the request is tried again, up to a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotProvisioned(pub String);
