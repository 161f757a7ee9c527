//! Everything that can happen to the coordinator: a closed list.

use super::finding::Finding;
use super::request::NotProvisioned;
use crate::id::{Generation, JobId, PersistId, Session};
use crate::message::{Hello, Report};
use crate::progress::RankProgress;

/// Version of a key in the store; it rises with every write.
pub type Version = u64;

/// Why a write to the store did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreFailure {
    /// Someone else wrote the key: another coordinator is active.
    Conflict,
    /// The store did not answer or could not write; it is unknown whether it did.
    Unavailable,
}

/// An input of [`super::Coordinator::handle`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An agent opened a connection and introduced itself.
    Joined {
        /// Number of the new connection.
        session: Session,
        /// The node and its state.
        hello: Box<Hello>,
    },
    /// A connection ended, or was silent for longer than [`crate::spec::Ladder::silence`].
    Lost {
        /// Number of the connection.
        session: Session,
    },
    /// A message came only after half of the silence that ends a connection: packets are being
    /// lost.
    Late {
        /// Number of the connection.
        session: Session,
    },
    /// An agent sent a report.
    Report {
        /// Number of the connection.
        session: Session,
        /// The agent's report.
        report: Report,
    },
    /// A write to the store has returned.
    Persisted {
        /// Number of the write, from [`super::command::Command::Persist`].
        id: PersistId,
        /// The new version of the key, or why the write failed.
        result: Result<Version, StoreFailure>,
    },
    /// A user asked for a job to end.
    StopJob {
        /// The job.
        job: JobId,
        /// Signal to pass to the workers.
        signal: i32,
    },
    /// The answer to [`super::command::Command::Provision`].
    Provisioned {
        /// The job.
        job: JobId,
        /// Number of the request within the job.
        id: u64,
        /// Why the request failed, if it did.
        result: Result<(), NotProvisioned>,
    },
    /// A person approved a request.
    Approved {
        /// The job.
        job: JobId,
        /// Number of the request within the job.
        id: u64,
    },
    /// An agent reported the progress of its workers, together with a keep-alive.
    Progress {
        /// Number of the connection.
        session: Session,
        /// Generation of the workers.
        generation: Generation,
        /// Progress of each rank.
        ranks: Vec<RankProgress>,
    },
    /// A detector found machines of the current world that behave unlike their peers.
    Unlike {
        /// The job.
        job: JobId,
        /// The machines, and how they differ from their peers.
        finding: Finding,
    },
    /// The store shows that a later coordinator has started (watch on the key of the epoch).
    Superseded,
    /// The deadline of the coordinator has passed.
    Tick,
}
