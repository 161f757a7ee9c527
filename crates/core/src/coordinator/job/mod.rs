//! A job as the coordinator knows it, by concern. [`JobRecord`] is kept in the store; everything
//! else is rebuilt from what agents report when they come back.
//!
//! The files in this directory store state, and answer questions about it. They send nothing, and
//! no file knows another concern. The files beside this directory decide: each is an `impl Job`
//! that handles events, changes the concerns that they affect, and returns commands.

mod checks;
mod ending;
mod evidence;
mod growth;
mod machines;
mod node_state;
mod nodes;
mod phase;
mod provisioning;
mod recent;
mod record;
mod record_write;
mod recovery;
mod replicas;
mod restarts;
mod shards;

pub(crate) use checks::Checking;
pub(crate) use ending::{Ending, Vanished};
pub(crate) use evidence::{Blame, BlameWindow, NodeFailure};
pub use machines::{Exclusion, Machines};
pub use node_state::NodeState;
pub use nodes::{Node, Nodes};
pub use phase::Phase;
pub(crate) use provisioning::MISSED;
pub(crate) use record::NoRestart;
pub use record::{GivingUp, JobRecord, Stage};
pub(crate) use replicas::{Replicas, RoundState};
pub(crate) use restarts::Charge;
pub(crate) use shards::Decision;

use super::command::Reason;
use super::event::Version;
use crate::message::Hello;
use crate::progress::ProgressWatch;
use crate::time::Time;
use checks::Checks;
use evidence::Evidence;
use growth::Growth;
use provisioning::Provisioning;
use record_write::RecordWrite;
use recovery::Recovery;
use restarts::Restarts;
use shards::Shards;
use std::collections::BTreeSet;

/// The state of one job in the coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The record that the store has, or will have.
    pub(super) record: JobRecord,
    /// State of the writes to the store.
    pub(super) write: RecordWrite,
    /// Nodes by id.
    pub(super) nodes: Nodes,
    /// What the job is doing.
    pub(super) phase: Phase,
    /// Why it is doing that.
    pub(super) reason: Reason,
    /// Shards of the current generation.
    pub(super) shards: Shards,
    /// Replicas of the current generation.
    pub(super) replicas: Replicas,
    /// How far the current generation is, against the ones before.
    pub(super) recovery: Recovery,
    /// The failures around the latest incident.
    pub(super) evidence: Evidence,
    /// The latest restarts.
    pub(super) restarts: Restarts,
    /// Checks of nodes.
    pub(super) checks: Checks,
    /// Attempts to change the size of the world.
    pub(super) growth: Growth,
    /// Requests about machines.
    pub(super) provisioning: Provisioning,
    /// The ranks that have ended, or may have.
    pub(super) ending: Ending,
    /// What the ranks of the current generation report.
    pub(super) progress: ProgressWatch,
}

impl Job {
    /// Returns a new job, which the agent with this introduction begins.
    #[must_use]
    pub fn new(hello: &Hello, now: Time) -> Self {
        Job::from_record(JobRecord::new(hello.spec.clone(), hello.incarnation), None, now)
    }

    /// What the store has, or will have.
    #[must_use]
    pub fn record(&self) -> &JobRecord {
        &self.record
    }

    /// What the job is doing.
    #[must_use]
    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Why it is doing that.
    #[must_use]
    pub fn reason(&self) -> &Reason {
        &self.reason
    }

    /// Its nodes by id.
    #[must_use]
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// Shards of the current generation.
    #[must_use]
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Replicas of the current generation.
    #[must_use]
    pub fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    /// How far the current generation is, against the ones before.
    #[must_use]
    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// What the ranks of the current generation report.
    #[must_use]
    pub fn progress(&self) -> &ProgressWatch {
        &self.progress
    }

    /// Attempts to change the size of the world.
    #[must_use]
    pub fn growth(&self) -> &Growth {
        &self.growth
    }

    /// Returns a job from its record: its nodes are expected to come back.
    #[must_use]
    pub fn from_record(record: JobRecord, version: Option<Version>, now: Time) -> Self {
        let reattach_until = Some(now.after(record.spec.ladder().reattach));
        let mut ending = Ending::default();
        record.ended.iter().for_each(|(rank, extent)| ending.add_over(*rank, *extent, true));
        let over = record.world.slots.iter().filter(|slot| ending.is_over(slot));
        let finished: BTreeSet<_> = over.map(|slot| slot.node.clone()).collect();
        let phase = match (&record.stage, &record.giving_up) {
            (Stage::Ended { code, why, .. }, _) => Phase::Over { code: *code, why: why.clone() },
            // What else was heard about the failure is lost with the coordinator that heard it.
            (_, Some(GivingUp { code, why, what, .. })) => Phase::Over { code: *code, why: format!("{what}; {why}") },
            (Stage::Forming, None) => Phase::Forming { since: now, last_join: Some(now) },
            (Stage::Training, None) => Phase::Training { finished, reattach_until },
        };
        Job {
            nodes: Nodes::expected(&record.world),
            record,
            write: RecordWrite::of(version),
            phase,
            reason: Reason::StoreBusy,
            shards: Shards::default(),
            replicas: Replicas::default(),
            recovery: Recovery::new(now),
            evidence: Evidence::default(),
            restarts: Restarts::default(),
            checks: Checks::default(),
            growth: Growth::default(),
            provisioning: Provisioning::default(),
            ending,
            progress: ProgressWatch::default(),
        }
    }
}
