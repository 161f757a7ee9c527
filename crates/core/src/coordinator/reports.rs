//! Routes the reports of agents.

use super::job::{Job, Phase};
use super::output::Output;
use crate::id::{Generation, NodeId, Step};
use crate::message::{Failure, Order, Report};
use crate::time::Time;

impl Job {
    pub(super) fn report(&mut self, now: Time, node: &NodeId, report: Report, out: &mut Output) {
        match report {
            Report::WorkerFailed { generation, failure } => self.worker_failed(now, node, generation, failure, out),
            Report::Checked(answer) => self.checked(now, node, &answer, out),
            Report::Signed(sign) => self.signed(now, node, sign, out),
            Report::Ended { generation, ended } => self.ended(now, node, generation, &ended, out),
            Report::Finished { generation } => self.finished(generation, node),
            Report::Stopped { generation, store_port, reached } => {
                self.node_stopped(generation, node, store_port, reached);
            }
            Report::FirstStep { generation, step, from } => {
                if generation == self.record.generation && !self.recovery.has_stepped() {
                    self.first_step(generation, step, from, out);
                    if !self.record.progressed {
                        self.record.progressed = true;
                        self.changed(false);
                    }
                } else if let Some(from) = from {
                    self.began(generation, step, from, out);
                }
            }
            Report::Holds { generation, held, parity } => self.holds(now, node, generation, held, parity, out),
            Report::Offers { generation, rank, offers } => self.offers(now, node, generation, rank, offers, out),
            Report::RestoreFailed { generation, rank, step, tier } => {
                self.restore_failed(now, generation, (rank, step, tier), out);
            }
            Report::Sealed { generation, step, wish, instead } => {
                self.sealed(node, generation, step, wish, instead, out);
            }
            Report::Replicated(replicated) => self.replicated(now, node, replicated, out),
            Report::ShardWritten { generation, step, directory, shard } => {
                self.shard_written(generation, step, directory, shard, out);
            }
            Report::Published { generation, step } => {
                if self.published(generation, step, out) {
                    self.changed(false);
                }
                if generation == self.record.generation {
                    self.grow_from(now, step, out);
                }
            }
            Report::Refused { code, why } => self.refused(code, why),
            Report::StopRequested(stop) => self.stop(now, stop, out),
            Report::StepProposed { generation, step } => self.step_proposed(now, generation, step, out),
            Report::PersistDue { generation, at } => {
                self.tell_all(Order::PersistAt { generation, step: at }, generation, out);
            }
            Report::SnapshotEvery { generation, from, every } => {
                self.tell_all(Order::SnapshotEvery { generation, from, every }, generation, out);
            }
        }
    }

    /// Handles the failure of a worker. In another phase, it shows what an earlier failure was about.
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
            self.testify(node, generation, Some(failure), out);
        }
    }

    /// Sends an order that concerns the ranks of a generation, if that is the current one.
    fn tell_all(&self, order: Order, generation: Generation, out: &mut Output) {
        if generation == self.record.generation {
            self.to_all(&order, out);
        }
    }

    /// Ends a job that cannot run anywhere. That is no failure of the node that reports it. A job that
    /// is stopping ends as it was asked to.
    fn refused(&mut self, code: i32, why: String) {
        if !self.phase.is_over() && !matches!(self.phase, Phase::Stopping { .. }) {
            self.phase = Phase::Over { code, why };
        }
    }

    fn finished(&mut self, generation: Generation, node: &NodeId) {
        if generation != self.record.generation {
            return;
        }
        match &mut self.phase {
            Phase::Training { finished, .. } => {
                finished.insert(node.clone());
                self.finish();
            }
            Phase::Stopping { .. } => self.stopping_done(node),
            Phase::Forming { .. } | Phase::Over { .. } => {}
        }
    }

    fn node_stopped(&mut self, generation: Generation, id: &NodeId, port: u16, reached: Option<Step>) {
        if generation < self.record.generation {
            return;
        }
        self.nodes.set_clean(id, generation, port);
        self.nodes.confirm(id, self.record.generation);
        if let Some(step) = reached {
            self.recovery.stopped_at(step);
        }
        self.stopping_done(id);
    }
}
