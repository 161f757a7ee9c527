//! Tracks the nodes of a job: joins, lost connections, lives of agents, and nodes that must come
//! back after a restart of the coordinator.

use super::command::{Fact, Reason};
use super::job::{Job, Node, Phase};
use super::output::Output;
use crate::exit_code::ExitCode;
use crate::id::{Epoch, Generation, NodeId, Session};
use crate::message::{CrewOrder, ExitReason, Hello, Order, Running};
use crate::time::Time;
use std::time::Duration;

impl Job {
    /// Handles an agent that introduced itself on a new connection.
    pub(super) fn joined(&mut self, now: Time, session: Session, hello: Hello, epoch: Epoch, out: &mut Output) {
        let id = hello.node.clone();
        if let Some(known) = self.nodes.get(&id) {
            let same_life = known.hello.incarnation == hello.incarnation;
            if known.session.is_some() && !same_life {
                let why = format!(
                    "node id {id} is already in use in job {} by an agent on {}; give each node its own --node-rank",
                    self.record.spec.job, known.hello.host
                );
                return out.send(session, Order::Refused(ExitReason { code: ExitCode::Refused.number(), why }));
            }
            if !same_life {
                self.remove(now, &id, out);
            }
        }
        let known = self.nodes.get(&id).is_some_and(|n| n.hello.incarnation == hello.incarnation);
        if let Some(stop) = hello.stop.filter(|_| !known && !self.record.is_member(&id, hello.incarnation)) {
            // It was stopped in an earlier run of this job.
            return out.send(session, Order::End(stop.end()));
        }
        out.send(session, Order::Welcome { epoch, began: self.record.began });
        self.came_back(now, &hello, out);
        let again = self.nodes.contains(&id);
        if !again {
            self.arrived(out);
        }
        out.record(Fact::NodeJoined { node: id.clone(), again });
        let (running, stop, over) = (hello.running.clone(), hello.stop, self.phase.is_over());
        self.attach(now, session, hello);
        self.believe(now, &id, running.as_ref(), out);
        if let Some(stop) = stop {
            let current = running.as_ref().filter(|r| r.generation == self.record.generation);
            for ended in current.iter().flat_map(|r| &r.ended) {
                self.ended(now, &id, ended, out);
            }
            self.stop(now, stop, out);
        }
        match &self.phase {
            Phase::Forming { .. } => self.joined_early(now, &id, session, running, out),
            Phase::Training { .. } if self.record.world.slot(&id).is_some() => {
                self.member_returned(now, &id, session, running, out);
            }
            Phase::Stopping { .. } if self.record.world.slot(&id).is_some() => {
                self.stopping_member_returned(&id, session, running.as_ref(), out);
            }
            Phase::Training { .. } | Phase::Stopping { .. } if running.is_none() => {
                out.notice(session, "joined; this node stands by until the job needs it".to_owned());
                self.stand_by(out);
            }
            Phase::Training { .. } | Phase::Stopping { .. } => {
                out.send(session, self.crew_order(CrewOrder::Fence { stacks: false }));
            }
            // The end that its stop has just brought about is sent to all once it is written.
            Phase::Over { .. } if !over => {}
            Phase::Over { code, why } => out.send(session, Order::End(ExitReason { code: *code, why: why.clone() })),
        }
    }

    /// Adds a node, or replaces what was known about it.
    fn attach(&mut self, now: Time, session: Session, hello: Hello) {
        let id = hello.node.clone();
        let known = self.nodes.get(&id);
        if known.is_none_or(|known| known.hello.incarnation != hello.incarnation) {
            self.evidence.forget_signs(&id);
        }
        let (late, bad_network_until) = known.map_or((None, Time(0)), |known| (known.late, known.bad_network_until));
        let clean = hello.running.is_none();
        let node = Node {
            session: Some(session),
            lost_at: None,
            hello,
            clean,
            joined_at: now,
            fenced_at: None,
            late,
            bad_network_until,
        };
        self.growth.mark_able(&id);
        self.nodes.insert(id.clone(), node);
        self.nodes.confirm(&id, self.record.generation);
    }

    /// Learns from a node what this coordinator has not heard.
    fn believe(&mut self, now: Time, id: &NodeId, running: Option<&Running>, out: &mut Output) {
        let seen = self.nodes.get(id).map_or(Generation(0), |n| n.hello.seen);
        if seen > self.record.generation {
            // The record was read before another coordinator's last write (or was lost), so the
            // numbers up to `seen` are used. Form a new world. If that write exists, ours conflicts
            // with it and this coordinator ends.
            self.record.generation = seen;
            self.record.ended.clear();
            if self.phase.is_training() {
                self.fence(now, out);
                self.phase = Phase::Forming { since: now, last_join: Some(now) };
            }
        }
        if let Some(running) = running.filter(|r| r.progressed) {
            self.record.progressed = true;
            // A coordinator that has just started did not receive the report of the first step.
            if running.generation == self.record.generation {
                self.recovery.mark_stepped();
            }
        }
    }

    /// Handles a node that joins while the world forms.
    fn joined_early(&mut self, now: Time, id: &NodeId, session: Session, running: Option<Running>, out: &mut Output) {
        if let Phase::Forming { last_join: Some(at), .. } = &mut self.phase {
            *at = now;
        }
        let (have, need) = (u32::try_from(self.nodes.len()).unwrap_or(u32::MAX), self.record.spec.nodes_min);
        if have < need {
            out.notice(session, Reason::WaitingForNodes { have, need }.sentence());
        }
        if let Some(Running { generation, failures, ended, .. }) = running {
            // What others failed with may only have followed from this.
            let current = generation == self.record.generation;
            for ended in ended.iter().filter(|_| current) {
                self.ended(now, id, ended, out);
            }
            for failure in failures {
                self.add_failure(id, generation, Some(failure), out);
            }
        }
        self.fence_node(id, now, out);
        self.check_again(id, out);
    }

    /// Handles a node of the current world that is attached again.
    fn member_returned(
        &mut self,
        now: Time,
        id: &NodeId,
        session: Session,
        running: Option<Running>,
        out: &mut Output,
    ) {
        let generation = self.record.generation;
        let Some(hello) = self.nodes.get(id).map(|n| &n.hello) else { return };
        let (incarnation, seen) = (hello.incarnation, hello.seen);
        let running = running.filter(|r| r.generation == generation);
        if running.is_none() && matches!(&self.phase, Phase::Training { finished, .. } if finished.contains(id)) {
            // Its ranks had ended before it was lost, or before its agent was started again.
            return;
        }
        if !self.record.is_member(id, incarnation) {
            self.member_lost(now, id, out);
        } else if let Some(running) = running {
            if let Phase::Training { finished, .. } = &mut self.phase
                && running.finished
            {
                finished.insert(id.clone());
            }
            for ended in &running.ended {
                self.ended(now, id, ended, out);
            }
            self.finish();
            for failure in running.failures {
                self.worker_failed(now, id, generation, failure, out);
            }
        } else if seen < generation {
            // The start order never arrived. If the record is still to be written, the write that
            // succeeds sends the order to all nodes.
            if let Some(after) = self.write.awaited_write()
                && let Some(order) = self.start_order(id, self.record.world.size())
            {
                out.send_after(after, session, order);
            }
            self.nodes.set_unclean(id);
        } else {
            match self.fenced_before(id) {
                None => self.member_lost(now, id, out),
                failure => self.fail(now, id, failure, out),
            }
        }
    }

    /// Handles the end of a connection. The node may come back within the reconnect time; if it
    /// already has, the end of the old connection means nothing.
    pub(super) fn lost(&mut self, now: Time, id: &NodeId, session: Session, believe_stale: bool) {
        if let Some(node) = self.nodes.get_mut(id).filter(|n| n.session == Some(session) || believe_stale) {
            node.session = None;
            node.lost_at = Some(now);
            self.progress.lost(id);
        }
    }

    /// Removes a node that is lost for good.
    pub(super) fn remove(&mut self, now: Time, id: &NodeId, out: &mut Output) {
        let Some(node) = self.nodes.remove(id) else { return };
        out.record(Fact::NodeLost { node: id.clone() });
        self.check_without(now, id, out);
        let member = self.record.is_member(id, node.hello.incarnation);
        match &mut self.phase {
            Phase::Training { finished, .. } if member && !finished.contains(id) => self.member_lost(now, id, out),
            Phase::Training { .. } if member => self.keep_ends(id),
            Phase::Stopping { .. } => self.stopping_done(id),
            Phase::Forming { .. } if member => self.add_failure(id, self.record.generation, None, out),
            _ => {}
        }
    }

    /// Acts on deadlines that have passed.
    pub(super) fn tick(&mut self, now: Time, out: &mut Output) {
        let ladder = self.record.spec.ladder();
        for id in self.nodes.gone(now, &ladder) {
            self.remove(now, &id, out);
        }
        self.settle_blame_when_due(now, out);
        self.end_wait(now, out);
        self.check_in_time(now, out);
        if let Phase::Training { reattach_until, finished } = &mut self.phase
            && let Some(until) = *reattach_until
        {
            let missing =
                self.record.world.slots.iter().find(|s| !self.nodes.contains(&s.node) && !finished.contains(&s.node));
            match missing.map(|s| s.node.clone()) {
                None => *reattach_until = None,
                Some(node) if now >= until => self.fail(now, &node, None, out),
                Some(_) => {}
            }
        }
        match &self.phase {
            Phase::Forming { since, .. } => {
                let patience = Duration::from_millis(self.record.spec.join_timeout_ms);
                let able = |(id, n): &(&NodeId, &Node)| {
                    let usable = self.growth.is_able(id) && !self.record.machines.is_barred(id, n.hello.incarnation);
                    n.session.is_some() && usable
                };
                let have = self.nodes.iter().filter(able).count();
                // With enough nodes, the job waits for something else, which has its own timeout.
                if now >= since.after(patience) && have < self.record.spec.nodes_min as usize {
                    let why = format!(
                        "{have} of {} nodes joined within {} s; start the missing ones, or ask for fewer with --nnodes MIN:MAX{}",
                        self.record.spec.nodes_min,
                        patience.as_secs(),
                        self.barred_for_people()
                    );
                    self.phase = Phase::Over { code: ExitCode::Requeue.number(), why };
                }
            }
            Phase::Stopping { deadline, stop, .. } if now >= *deadline => {
                self.phase = self.stopped(*stop);
            }
            _ => {}
        }
    }
}
