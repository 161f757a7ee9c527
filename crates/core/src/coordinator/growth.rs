//! Changes the size of a world at a step boundary, without losing anything: waiting nodes are taken
//! in, or nodes leave (`reassignment.rs`).
//!
//! For jobs with everstep checkpoints, the leader names a step ahead, and all ranks persist it and
//! hold there. When every node can read that step, even one without the job's state in memory, the
//! world forms again. Other jobs have their own way back and are restarted as under torchrun.

use super::command::Fact;
use super::job::{Job, Node, Phase};
use super::output::Output;
use crate::id::{NodeId, Step};
use crate::message::{CrewOrder, Order};
use crate::time::Time;

impl Job {
    /// Returns the nodes outside the world that are ready to be taken in.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (&NodeId, &Node)> {
        let record = &self.record;
        self.nodes
            .iter()
            .filter(|(id, n)| n.is_ready() && self.growth.is_able(id) && record.world.slot(id).is_none())
            .filter(|(id, n)| {
                let life = n.hello.incarnation;
                !record.machines.is_excluded(id, life) && !record.machines.is_reassigned(id, life)
            })
    }

    /// Tells nodes outside the world that they are idle, and waiting ones to stand by with torch
    /// imported: as many as `--spares`, or all while the world could be larger.
    pub(super) fn stand_by(&self, out: &mut Output) {
        for (id, node) in self.nodes.iter().filter(|(id, n)| n.clean && self.record.world.slot(id).is_none()) {
            if let Some(session) = node.session {
                let excluded = self.record.machines.is_excluded(id, node.hello.incarnation);
                out.send(session, Order::Idle { excluded });
            }
        }
        let spec = &self.record.spec;
        let full = self.record.world.slots.len() >= spec.nodes_max as usize;
        let ready = if full { spec.spares as usize } else { usize::MAX };
        let sessions = self.waiting().take(ready).filter_map(|(_, n)| n.session);
        out.send_each(sessions, &Order::StandBy);
    }

    /// Returns when the world may change its size, if it can grow or should shrink.
    fn ripe(&self) -> Option<Time> {
        let members = self.record.world.slots.len();
        let may_go = !self.record.machines.requests().is_empty() || !self.record.machines.excluded().is_empty();
        let smaller = may_go && self.may_shrink();
        if self.nodes.len() <= members && !smaller {
            return None;
        }
        let spec = &self.record.spec;
        let newest = self.waiting().map(|(_, n)| n.joined_at).max();
        let newest = if smaller { newest.unwrap_or(Time(0)) } else { newest? };
        let have = u32::try_from(members + self.waiting().count()).unwrap_or(u32::MAX);
        let usable = have.min(spec.nodes_max) / spec.node_unit * spec.node_unit;
        let larger = usable as usize > members;
        let ladder = spec.ladder();
        let since = self.recovery.since();
        let settled = if self.recovery.has_stepped() {
            Some(since)
        } else {
            // Steps are not reported: the job must run long enough to rule out a crash loop.
            (!self.record.checkpointed).then(|| since.after(ladder.last_call * 2))
        };
        (larger || smaller).then_some(settled?.max(newest.after(ladder.last_call)).max(self.growth.not_before()))
    }

    /// Starts, finishes or gives up an attempt to change the size of the world.
    pub(super) fn consider_growth(&mut self, now: Time, out: &mut Output) {
        let Phase::Training { finished, reattach_until: None } = &self.phase else {
            self.growth.abandon();
            return;
        };
        // A job at its end would begin its training again in another world.
        if !finished.is_empty() || self.ending.known() > 0 {
            return self.give_up_growth(now, out);
        }
        if let Some(until) = self.growth.until() {
            if now >= until {
                self.give_up_growth(now, out);
            }
            return;
        }
        let whole = self.record.world.slots.iter().all(|s| self.nodes.session(&s.node).is_some());
        if self.ripe().is_none_or(|at| now < at) || !whole {
            return;
        }
        if !self.record.checkpointed {
            return self.regroup(now, out);
        }
        if let Some(session) = self.leader() {
            self.growth.start(now);
            let order = self.crew_order(CrewOrder::ProposeStep);
            out.send(session, order);
        }
    }

    /// Records the step that the leader named, and orders all ranks to hold there.
    pub(super) fn step_proposed(&mut self, now: Time, step: Option<Step>, out: &mut Output) {
        match step {
            // The duration of a step is not known yet.
            None => self.growth.postpone(now, self.record.spec.ladder().last_call),
            Some(step) if self.growth.set_step(step) => self.hold(Some(step), out),
            Some(_) => {}
        }
    }

    fn hold(&self, step: Option<Step>, out: &mut Output) {
        self.order_crew(CrewOrder::HoldAt(step), out);
    }

    fn give_up_growth(&mut self, now: Time, out: &mut Output) {
        if self.growth.give_up(now) {
            self.hold(None, out);
        }
    }

    /// Forms the next world from this step if all ranks hold there. Ranks whose scripts count in
    /// strides hold at the first step at or after the named one.
    pub(super) fn grow_from(&mut self, now: Time, step: Step, out: &mut Output) {
        if self.growth.step().is_some_and(|named| step >= named) {
            self.regroup(now, out);
        }
    }

    /// Forms the world again although nothing failed. The restart budget is not charged.
    fn regroup(&mut self, now: Time, out: &mut Output) {
        let nodes: Vec<NodeId> = self.waiting().map(|(id, _)| id.clone()).collect();
        self.record_progress(out);
        let fact = Fact::Growing { generation: self.record.generation, nodes };
        out.record(fact);
        self.growth.finish();
        self.recovery.begin_stop();
        self.fence(now, out);
        self.phase = Phase::forming(now);
    }

    /// Continues without new nodes that cannot read the state that the others have.
    pub(super) fn leave_out(&mut self, now: Time, nodes: Vec<NodeId>, out: &mut Output) {
        let fact = Fact::LeftOut { generation: self.record.generation, nodes: nodes.clone() };
        out.record(fact);
        self.growth.mark_unable(nodes, self.record.durable.is_none());
        self.fence(now, out);
        self.phase = Phase::forming(now);
    }

    /// Returns when [`Job::consider_growth`] has something to do next.
    pub(super) fn growth_deadline(&self) -> Option<Time> {
        if !self.phase.is_settled() {
            return None;
        }
        self.growth.until().or_else(|| self.ripe())
    }
}
