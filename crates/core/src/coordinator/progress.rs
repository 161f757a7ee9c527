//! What follows from the ranks' progress: slow ranks are announced, the ledger learns how far the
//! job is, and an incident is over when all ranks are where they were before it.

use super::Coordinator;
use super::command::Fact;
use super::job::Job;
use super::output::Output;
use crate::id::{Generation, NodeId, Session};
use crate::progress::RankProgress;
use crate::time::Time;

impl Coordinator {
    /// Ranks report several times a second, and nothing that they report changes a world or a
    /// record. So this leaves out what [`Coordinator::with`] does after other events. Workers of an
    /// earlier generation had other ranks.
    pub(super) fn progressed(&mut self, now: Time, session: Session, generation: Generation, ranks: Vec<RankProgress>) {
        let Some((id, node)) = self.by_session.get(&session) else { return };
        let Some(job) = self.jobs.get_mut(id) else { return };
        if job.nodes.session(node) == Some(session) && generation == job.record.generation {
            let mut out = Output::new(id.clone());
            job.progressed(now, node, ranks, &mut out);
            self.out.extend(out.into_commands());
        }
    }
}

impl Job {
    fn progressed(&mut self, now: Time, node: &NodeId, ranks: Vec<RankProgress>, out: &mut Output) {
        let changes = self.progress.report(now, node, ranks);
        if self.progress.record_is_due(now) {
            self.record_progress(out);
        }
        for change in changes {
            self.slow(change, out);
        }
        if self.recovery.is_behind()
            && let Some(step) = self.progress.completed_by_all(self.record.world.size())
        {
            self.reached(step, out);
        }
    }

    /// Records for the ledger how far the job is.
    pub(super) fn record_progress(&self, out: &mut Output) {
        let step = self.progress.lowest_step(self.record.world.size());
        if let (Some(step), Some(step_us)) = (step, self.progress.median_step_us()) {
            let fact = Fact::Progress { generation: self.record.generation, step, step_us };
            out.record(fact);
        }
    }
}
