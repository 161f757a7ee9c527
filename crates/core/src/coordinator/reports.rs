//! Routes the reports of agents.

use super::job::{Job, Phase};
use super::output::Output;
use crate::id::{Generation, NodeId};
use crate::message::{CrewOrder, CrewReport, ExitReason, Failure, FirstStep, Report, Stopped};
use crate::time::Time;

impl Job {
    pub(super) fn report(&mut self, now: Time, node: &NodeId, report: Report, out: &mut Output) {
        match report {
            Report::Crew(generation, report) => self.crew_report(now, node, generation, report, out),
            Report::Checked(answer) => self.checked(now, node, &answer, out),
            Report::Signed(sign) => self.signed(now, node, sign, out),
            Report::Refused(reason) => self.refused(reason),
            Report::StopRequested(stop) => self.stop(now, stop, out),
        }
    }

    fn crew_report(&mut self, now: Time, node: &NodeId, generation: Generation, report: CrewReport, out: &mut Output) {
        match report {
            // These count for another generation, too: a failure may show what an earlier one was
            // about, and a node that has ended newer workers has also ended the current ones.
            CrewReport::WorkerFailed(failure) => self.worker_failed(now, node, generation, failure, out),
            CrewReport::Stopped(stopped) => self.node_stopped(generation, node, stopped),
            _ if generation != self.record.generation => {}
            CrewReport::Ended(ended) => self.ended(now, node, &ended, out),
            CrewReport::Finished => self.finished(node),
            CrewReport::FirstStep(first) => self.stepped(first, out),
            CrewReport::Holds(holdings) => self.holds(now, node, holdings, out),
            CrewReport::Offers(offers) => self.offers(now, node, offers, out),
            CrewReport::RestoreFailed(rank, unreadable) => self.restore_failed(now, rank, unreadable, out),
            CrewReport::FetchFailed(rank, missing) => self.fetch_failed(now, rank, missing, out),
            CrewReport::Sealed(sealed) => self.sealed(node, sealed, out),
            CrewReport::Replicated(replicated) => self.replicated(now, node, replicated, out),
            CrewReport::ShardWritten(written) => self.shard_written(written, out),
            CrewReport::Published(step) => {
                if self.published(step, out) {
                    self.changed(false);
                }
                self.grow_from(now, step, out);
            }
            CrewReport::StepProposed(step) => self.step_proposed(now, step, out),
            CrewReport::PersistDue(at) => self.order_crew(CrewOrder::PersistAt(at), out),
            CrewReport::SnapshotEvery(change) => self.order_crew(CrewOrder::SnapshotEvery(change), out),
        }
    }

    /// Handles the first step of the workers, or the step that they continue from.
    fn stepped(&mut self, first: FirstStep, out: &mut Output) {
        if !self.recovery.has_stepped() {
            self.first_step(first, out);
            if !self.record.progressed {
                self.record.progressed = true;
                self.changed(false);
            }
        } else if let Some(from) = first.from {
            self.began(first.step, from, out);
        }
    }

    /// Handles the failure of a worker. In another phase, it shows what an earlier failure was
    /// about.
    pub(super) fn worker_failed(
        &mut self,
        now: Time,
        node: &NodeId,
        generation: Generation,
        failure: Failure,
        out: &mut Output,
    ) {
        if generation == self.record.generation && self.phase.is_training() {
            self.fail(now, node, Some(failure), out);
        } else {
            self.add_failure(node, generation, Some(failure), out);
        }
    }

    /// Ends a job that cannot run anywhere. That is not a failure of the node that reports it. A
    /// job that is stopping ends as requested.
    fn refused(&mut self, reason: ExitReason) {
        if !self.phase.is_over() && !matches!(self.phase, Phase::Stopping { .. }) {
            let ExitReason { code, why } = reason;
            self.phase = Phase::Over { code, why };
        }
    }

    fn finished(&mut self, node: &NodeId) {
        match &mut self.phase {
            Phase::Training { finished, .. } => {
                finished.insert(node.clone());
                self.finish();
            }
            Phase::Stopping { .. } => self.stopping_done(node),
            Phase::Forming { .. } | Phase::Over { .. } => {}
        }
    }

    fn node_stopped(&mut self, generation: Generation, id: &NodeId, stopped: Stopped) {
        if generation < self.record.generation {
            return;
        }
        self.nodes.set_clean(id, generation, stopped.store_port);
        self.nodes.confirm(id, self.record.generation);
        if let Some(step) = stopped.reached {
            self.recovery.stopped_at(step);
        }
        self.stopping_done(id);
    }
}
