//! Everything that can happen to the coordinator: a closed list.

use super::unlike::Finding;
use crate::id::{JobId, PersistId, Session, Step};
use crate::message::{Hello, Report};
use crate::slow::Change;

/// Version of a key in the store; rises with every write.
pub type Version = u64;

/// Why a write to the store did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreFailure {
    /// Someone else wrote the key: another coordinator is active.
    Conflict,
    /// The store did not answer or could not write; nothing is known to be written.
    Unavailable,
}

/// An input of [`super::Coordinator::handle`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An agent opened a connection and introduced itself.
    Joined {
        /// the connection
        session: Session,
        /// who and in which state
        hello: Box<Hello>,
    },
    /// A connection ended or fell silent for longer than the detect timeout.
    Lost {
        /// the connection
        session: Session,
    },
    /// A line arrived after half of the silence that ends a connection: packets are being lost on the way.
    Late {
        /// the connection
        session: Session,
    },
    /// An agent says something.
    Report {
        /// the connection
        session: Session,
        /// what
        report: Report,
    },
    /// A write returned.
    Persisted {
        /// which
        id: PersistId,
        /// new version of the key, or why not
        result: Result<Version, StoreFailure>,
    },
    /// A user asks for a job to end.
    StopJob {
        /// which
        job: JobId,
        /// signal to pass to the workers
        signal: i32,
    },
    /// [`super::command::Command::Provision`] was taken, or could not be.
    Provisioned {
        /// which job
        job: JobId,
        /// the request's number
        id: u64,
        /// why not
        result: Result<(), String>,
    },
    /// A person says yes to a request.
    Approved {
        /// which job
        job: JobId,
        /// the request's number
        id: u64,
    },
    /// A rank of the current generation became slow, or well again.
    Slow {
        /// which job
        job: JobId,
        /// which rank, and how slow
        change: Change,
    },
    /// A detector has found machines of the current world that behave unlike their peers.
    Unlike {
        /// which job
        job: JobId,
        /// what was found
        finding: Finding,
    },
    /// All ranks of the current generation have completed this step. Only asked for while [`super::state::Job::behind`] says so.
    Reached {
        /// which job
        job: JobId,
        /// the step
        step: Step,
    },
    /// The store shows that a later coordinator has started (watch on the epoch's key).
    Superseded,
    /// The deadline passed.
    Tick,
}
