//! Something outside refuses the job, such as a checkpoint directory that another job owns. A
//! restart would be refused, too, so this is not a failure: the coordinator ends the job on all
//! nodes.

use super::Agent;
use crate::message::{ExitReason, Report};
use crate::time::Time;

/// A refusal that the coordinator must learn of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    reason: ExitReason,
    /// When this agent ends by itself, if no coordinator has ended the job.
    until: Time,
}

impl Agent {
    /// Reports that the job is refused. From now on, an end of its workers is not a failure.
    pub(super) fn refused(&mut self, now: Time, reason: ExitReason) {
        if self.over.is_some() || self.refusal.is_some() {
            return;
        }
        let until = now.after(self.config.spec.ladder().silence * 3);
        self.refusal = Some(Refusal { reason, until });
        self.report_refusal();
    }

    /// Returns the refusal of a job that has not been ended yet.
    fn pending_refusal(&self) -> Option<&Refusal> {
        self.refusal.as_ref().filter(|_| self.over.is_none())
    }

    /// Sends the report, now and on each new connection.
    pub(super) fn report_refusal(&mut self) {
        if let Some(Refusal { reason, .. }) = self.pending_refusal().cloned() {
            self.send(Report::Refused(reason));
        }
    }

    /// Returns when this agent stops waiting for the end of the refused job.
    pub(super) fn refusal_until(&self) -> Option<Time> {
        self.pending_refusal().map(|r| r.until)
    }

    /// Ends this agent if the refused job has not been ended in time.
    pub(super) fn end_refused(&mut self, now: Time) {
        if let Some(Refusal { reason, .. }) = self.pending_refusal().filter(|r| now >= r.until).cloned() {
            self.end(now, reason);
        }
    }
}
