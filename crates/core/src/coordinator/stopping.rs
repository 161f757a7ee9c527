//! A job that is asked to stop: its workers get the signal and may finish what they do, for a
//! while.

use super::command::{Action, Fact, Reason};
use super::job::{Job, Phase};
use super::output::Output;
use crate::id::{NodeId, Session};
use crate::message::{CrewOrder, Running, Stop};
use crate::time::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Shortest time after which a job that was asked to stop is over.
const PATIENCE: Duration = Duration::from_mins(1);
/// Time that agents have to end workers that did not end by themselves, and to report it.
const MARGIN: Duration = Duration::from_secs(30);

impl Job {
    /// Stops the job, unless it is over.
    pub(super) fn stop(&mut self, now: Time, stop: Stop, out: &mut Output) {
        match self.phase {
            Phase::Training { .. } => {
                self.record_held_crashes(out);
                self.order_crew(CrewOrder::Signal(stop), out);
                let grace = self.nodes.iter().map(|(_, n)| n.hello.shutdown_grace_ms).max().unwrap_or(0);
                let deadline = now.after(PATIENCE.max(Duration::from_millis(grace).saturating_add(MARGIN)));
                self.reason = Reason::Stopping;
                self.phase = Phase::Stopping { done: BTreeSet::new(), deadline, stop };
            }
            Phase::Forming { .. } => {
                if self.record.giving_up.is_some() {
                    // How the job ends is decided, and only the first cause is still waited for.
                    self.settle_blame(now, out);
                }
                if !self.phase.is_over() {
                    self.phase = Phase::stopped_by(stop);
                }
            }
            Phase::Stopping { .. } | Phase::Over { .. } => {}
        }
    }

    /// Records the crashes that were held because they may have come after the last step. This can
    /// no longer be determined, and the job is not restarted for them.
    fn record_held_crashes(&mut self, out: &mut Output) {
        let mut held = self.ending.release().into_iter();
        let Some((node, failure)) = held.next() else { return };
        self.record.incidents += 1;
        let (incident, generation, action) = (self.record.incidents, self.record.generation, Action::Restart);
        let mut others: BTreeMap<String, u32> = BTreeMap::new();
        for (_, failure) in held {
            *others.entry(failure.verdict.class).or_default() += 1;
        }
        let failed = Some(failure.clone());
        out.record(Fact::IncidentOpened { incident, generation, node: node.clone(), failure: failed, action });
        if !others.is_empty() {
            let verdict = Box::new(failure.verdict.clone());
            out.record(Fact::Blamed { incident, node, failure: Some(Box::new(failure)), verdict, others });
        }
    }

    /// Handles a member of the world that is attached again while the job stops. The order, or the
    /// report that its workers have ended, may have been lost with the connection.
    pub(super) fn stopping_member_returned(
        &mut self,
        node: &NodeId,
        session: Session,
        running: Option<&Running>,
        out: &mut Output,
    ) {
        let Phase::Stopping { stop, .. } = self.phase else { return };
        let generation = self.record.generation;
        for ended in running.filter(|r| r.generation == generation).iter().flat_map(|r| &r.ended) {
            self.script_over(node, ended, out);
        }
        match running {
            Some(running) if running.generation == generation && !running.finished => {
                out.send(session, self.crew_order(CrewOrder::Signal(stop)));
            }
            Some(running) if running.generation != generation => {
                out.send(session, self.crew_order(CrewOrder::Fence { stacks: false }));
            }
            _ => self.stopping_done(node),
        }
    }

    /// Returns the end of a job that was asked to stop. If the scripts of all ranks had ended
    /// before, it is done.
    pub(super) fn stopped(&self, stop: Stop) -> Phase {
        if self.scripts_are_over() { self.finished_well() } else { Phase::stopped_by(stop) }
    }

    pub(super) fn stopping_done(&mut self, node: &NodeId) {
        let Phase::Stopping { done, stop, .. } = &mut self.phase else { return };
        done.insert(node.clone());
        // Ranks that wait for the step to restore have done nothing yet, and a node that has
        // stopped offers none. The record has the decision even if an earlier life of the
        // coordinator made it.
        let in_vain = self.record.restored_by(self.record.generation).is_none() && self.shards.has_offers();
        if in_vain || self.record.world.slots.iter().all(|s| done.contains(&s.node)) {
            let stop = *stop;
            self.phase = self.stopped(stop);
        }
    }
}
