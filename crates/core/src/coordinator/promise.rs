//! Persist before you promise: a changed record is written, and what depends on it is sent when
//! that write has succeeded. A failed write is retried with all its promises; a conflict ends this
//! coordinator.

use super::command::{Command, Precondition};
use super::event::{StoreFailure, Version};
use super::state::{self, Job, Phase};
use super::{Coordinator, job_key};
use crate::id::{JobId, NodeId, PersistId, Session};
use crate::message::Order;
use crate::time::Time;
use std::time::Duration;

/// Longest pause between two attempts to write to the store.
const STORE_RETRY_MAX: Duration = Duration::from_secs(5);

impl Coordinator {
    pub(super) fn persisted(&mut self, now: Time, id: PersistId, result: Result<Version, StoreFailure>) {
        let Some(job_id) = self.writes.remove(&id) else { return };
        let Some(job) = self.jobs.get_mut(&job_id) else { return };
        if job.write.in_flight != Some(id) {
            return;
        }
        job.write.in_flight = None;
        match result {
            Ok(version) => {
                job.version = Some(version);
                job.write.retry = None;
                job.write.announces = false;
                job.write.last_pause = None;
            }
            Err(StoreFailure::Unavailable) => {
                let first = job.record.spec.ladder().store_retry;
                let pause = job.write.last_pause.map_or(first, |p| (p * 2).min(STORE_RETRY_MAX));
                job.write.last_pause = Some(pause);
                job.write.retry = Some((now.after(pause), pause));
            }
            Err(StoreFailure::Conflict) => {
                return self.step_down(format!("another coordinator has written {}", job_key(&job_id)));
            }
        }
        self.with(now, &job_id, |_, _, _| {});
    }

    pub(super) fn write(&mut self, now: Time, id: &JobId, early: bool) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let due = job.write.retry.is_none_or(|(at, _)| now >= at);
        if !job.write_pending() || job.write.in_flight.is_some() || !due {
            return;
        }
        let write_id = self.next_write;
        self.next_write = write_id.next();
        let announces = job.write.announce_next || job.write.announces;
        let last_pause = job.write.last_pause;
        job.write = state::Write { in_flight: Some(write_id), announces, last_pause, ..state::Write::default() };
        let value = serde_json::to_vec(&job.record).unwrap_or_default();
        let precondition = job.version.map_or(Precondition::Absent, Precondition::Version);
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
    pub(super) fn write_pending(&self) -> bool {
        self.write.dirty || self.write.retry.is_some() || self.write.in_flight.is_some()
    }

    /// Sends an order to every attached node, without waiting for a write.
    pub(super) fn to_all(&self, order: &Order, out: &mut Vec<Command>) {
        out.extend(self.sessions().map(|(_, session)| Command::Send { session, order: order.clone(), after: None }));
    }

    /// Marks the record as changed; `announce` means that a promise depends on it.
    pub(super) fn changed(&mut self, announce: bool) {
        self.write.dirty = true;
        self.write.announce_next |= announce;
    }

    /// Returns the order that starts the current generation on `node`, if it takes part.
    pub(crate) fn start_order(&self, node: &NodeId, size: u32) -> Option<Order> {
        Some(Order::Start {
            generation: self.record.generation,
            place: self.record.world.place(node, size)?,
            restarts: self.record.restarts,
            max_restarts: self.max_restarts(),
        })
    }

    fn announcements(&self) -> Vec<(Session, Order)> {
        match &self.phase {
            // Nodes that asked what to restore have already started.
            Phase::Training { .. } if self.durability.decision.is_some() => {
                self.restore_orders().into_iter().map(|(_, session, order)| (session, order)).collect()
            }
            Phase::Training { .. } => {
                let size = self.record.world.size();
                let members = |(id, s): (&NodeId, Session)| Some((s, self.start_order(id, size)?));
                self.sessions().filter_map(members).collect()
            }
            Phase::Over { code, why } => {
                self.sessions().map(|(_, s)| (s, Order::End { code: *code, why: why.clone() })).collect()
            }
            Phase::Forming { .. } | Phase::Stopping { .. } => Vec::new(),
        }
    }
}
