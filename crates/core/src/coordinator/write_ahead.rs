//! Writes ahead: a changed record is written first, and the orders that depend on it are sent once
//! that write has succeeded. A failed write is retried, and its orders wait for the retry; a
//! conflict ends this coordinator. Only the end of a job does not wait forever.

use super::command::{Command, Precondition};
use super::event::{StoreFailure, Version};
use super::job::{Job, Phase};
use super::output::Output;
use super::{Coordinator, job_key};
use crate::id::{JobId, NodeId, PersistId, Session};
use crate::message::{CrewOrder, ExitReason, Order, Start};
use crate::time::Time;
use std::time::Duration;

/// How long the end of a job waits for a store that cannot be written. A job that is over must not
/// continue because of a full disk; the cost is that the store still lists it as running.
const STORE_PATIENCE: Duration = Duration::from_secs(10);

impl Coordinator {
    pub(super) fn persisted(&mut self, now: Time, id: PersistId, result: Result<Version, StoreFailure>) {
        let Some(job_id) = self.writes.remove(&id) else { return };
        let Some(job) = self.jobs.get_mut(&job_id) else { return };
        if !job.write.finish(id) {
            return;
        }
        match result {
            Ok(version) => job.write.succeeded(version),
            Err(StoreFailure::Unavailable) => job.write.failed(now, job.record.spec.ladder().store_retry),
            Err(StoreFailure::Conflict) => {
                return self.step_down(format!("another coordinator has taken over job {job_id}"));
            }
        }
        self.with(now, &job_id, Job::end_without_record);
    }

    pub(super) fn write(&mut self, now: Time, id: &JobId, early: bool) {
        let Some(job) = self.jobs.get_mut(id).filter(|job| job.write.is_due(now)) else { return };
        let write_id = self.next_write;
        self.next_write = write_id.next();
        let announces = job.write.start(write_id);
        let value = serde_json::to_vec(&job.record).unwrap_or_default();
        let precondition = job.write.version().map_or(Precondition::Absent, Precondition::Version);
        self.writes.insert(write_id, id.clone());
        self.out.push_back(Command::Persist { id: write_id, key: job_key(id), value, precondition });
        if announces {
            let after = Some(write_id).filter(|_| !early);
            let sends: Vec<Command> = job
                .announcements()
                .into_iter()
                .map(|(session, order)| Command::Send { session, order, after })
                .collect();
            self.out.extend(sends);
        }
    }
}

impl Job {
    /// Sends an order to every attached node, without waiting for a write.
    pub(super) fn to_all(&self, order: &Order, out: &mut Output) {
        out.send_each(self.nodes.sessions().map(|(_, session)| session), order);
    }

    /// Sends an order about the workers of the current generation to every attached node.
    pub(super) fn order_crew(&self, order: CrewOrder, out: &mut Output) {
        self.to_all(&self.crew_order(order), out);
    }

    /// Returns an order about the workers of the current generation.
    pub(super) fn crew_order(&self, order: CrewOrder) -> Order {
        Order::Crew(self.record.generation, order)
    }

    /// Marks the record as changed; `announce` means that orders depend on it.
    pub(super) fn changed(&mut self, announce: bool) {
        self.write.changed(announce);
    }

    /// Ends the nodes of a job that is over and has failed to write that for too long. The write is
    /// tried again until they are gone.
    fn end_without_record(&mut self, now: Time, out: &mut Output) {
        let Phase::Over { code, why } = &self.phase else { return };
        if !self.write.has_failed_for(now, STORE_PATIENCE) {
            return;
        }
        let end = Order::End(ExitReason { code: *code, why: why.clone() });
        if self.write.waive() {
            let what = format!(
                "the store could not be written for {} s; the job ends anyway, and its next start will see outdated \
                 records of this run; its checkpoints are not affected",
                STORE_PATIENCE.as_secs()
            );
            self.to_all(&Order::Notice { what }, out);
            self.to_all(&end, out);
        }
        if self.nodes.is_empty() {
            self.write.abandon();
        }
    }

    /// Returns the order that starts the current generation on `node`, if it takes part.
    pub(crate) fn start_order(&self, node: &NodeId, size: u32) -> Option<Order> {
        let place = self.record.world.place(node, size)?;
        let (began, restarts, max_restarts) = (self.record.began, self.record.restarts(), self.record.max_restarts());
        Some(self.crew_order(CrewOrder::Start(Start { place, began, restarts, max_restarts })))
    }

    fn announcements(&self) -> Vec<(Session, Order)> {
        match &self.phase {
            // Nodes that asked what to restore have already started.
            Phase::Training { .. } if self.shards.decision().is_some() => {
                self.restore_orders().into_iter().map(|(_, session, order)| (session, order)).collect()
            }
            Phase::Training { .. } => {
                let size = self.record.world.size();
                let members = |(id, s): (&NodeId, Session)| Some((s, self.start_order(id, size)?));
                self.nodes.sessions().filter_map(members).collect()
            }
            Phase::Over { code, why } => self
                .nodes
                .sessions()
                .map(|(_, s)| (s, Order::End(ExitReason { code: *code, why: why.clone() })))
                .collect(),
            Phase::Forming { .. } | Phase::Stopping { .. } => Vec::new(),
        }
    }
}
