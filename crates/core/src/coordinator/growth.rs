//! A world that could be larger: nodes that wait are taken in at a step boundary, with nothing lost. Or is to be smaller (`moving.rs`).
//!
//! Jobs that keep checkpoints with everstep: the leader names a step ahead, all ranks persist it and
//! hold there, and when it is durable (so that a node without memory of the job can read it) the
//! world forms anew. Other jobs have their own way back and are restarted as torchrun does.

use super::command::{Command, Fact};
use super::state::{Job, Node, Phase};
use crate::id::{Generation, NodeId, Step};
use crate::message::Order;
use crate::time::Time;
use std::time::Duration;

/// A step that was named for growing must be durable within this, else training goes on as it is.
const PATIENCE: Duration = Duration::from_secs(60);
/// After that, growing is not tried again for this long.
const PAUSE: Duration = Duration::from_secs(600);

/// An attempt to grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// When it is given up.
    pub until: Time,
    /// The step at which all ranks hold, once it is named.
    pub step: Option<Step>,
}

impl Job {
    /// Nodes that are ready and have no part in the world.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (&NodeId, &Node)> {
        let ready = |n: &Node| n.session.is_some() && n.clean;
        self.nodes
            .iter()
            .filter(move |(id, n)| ready(n) && !self.unable.contains_key(*id) && self.record.world.slot(id).is_none())
            .filter(|(id, n)| !self.is_excluded(id, n.hello.incarnation) && !self.moves_away(id, n.hello.incarnation))
    }

    /// Nodes that wait have torch imported: as many as `--spares` says, or all while the world could be larger.
    pub(super) fn stand_by(&self, out: &mut Vec<Command>) {
        let outside = self.nodes.iter().filter(|(id, n)| n.clean && self.record.world.slot(id).is_none());
        out.extend(outside.filter_map(|(id, n)| {
            let order = Order::Idle { excluded: self.is_excluded(id, n.hello.incarnation) };
            Some(Command::Send { session: n.session?, order, after: None })
        }));
        let spec = &self.record.spec;
        let full = self.record.world.slots.len() >= spec.nodes_max as usize;
        let ready = if full { spec.spares as usize } else { usize::MAX };
        let sessions = self.waiting().take(ready).filter_map(|(_, n)| n.session);
        out.extend(sessions.map(|session| Command::Send { session, order: Order::StandBy, after: None }));
    }

    /// When the waiting nodes may be taken in, if they make a larger world.
    fn ripe(&self) -> Option<Time> {
        let members = self.record.world.slots.len();
        let may_go = !self.record.requests.is_empty() || !self.record.excluded.is_empty();
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
        let settled = if self.stepped {
            Some(self.trained_since)
        } else {
            // Without steps to go by: long enough that it is no crash loop.
            (!self.record.checkpointed).then(|| self.trained_since.after(ladder.last_call * 2))
        };
        (larger || smaller).then_some(settled?.max(newest.after(ladder.last_call)).max(self.growth_after))
    }

    /// Starts, ends or gives up growing.
    pub(super) fn consider_growth(&mut self, now: Time, out: &mut Vec<Command>) {
        let Phase::Training { finished, reattach_until: None } = &self.phase else {
            self.growth = None;
            return;
        };
        if !finished.is_empty() {
            return self.give_up_growth(now, out);
        }
        if let Some(growth) = self.growth {
            if now >= growth.until {
                self.give_up_growth(now, out);
            }
            return;
        }
        let whole =
            self.record.world.slots.iter().all(|s| self.nodes.get(&s.node).is_some_and(|n| n.session.is_some()));
        if self.ripe().is_none_or(|at| now < at) || !whole {
            return;
        }
        if !self.record.checkpointed {
            return self.regroup(now, out);
        }
        if let Some(session) = self.leader() {
            self.growth = Some(Growth { until: now.after(PATIENCE), step: None });
            let order = Order::ProposeStep { generation: self.record.generation };
            out.push(Command::Send { session, order, after: None });
        }
    }

    /// The leader names the step.
    pub(super) fn step_proposed(
        &mut self,
        now: Time,
        generation: Generation,
        step: Option<Step>,
        out: &mut Vec<Command>,
    ) {
        let open = self.growth.filter(|g| g.step.is_none() && generation == self.record.generation);
        let Some(growth) = open else { return };
        let Some(step) = step else {
            // The pace of the steps is not known yet.
            self.growth = None;
            self.growth_after = now.after(self.record.spec.ladder().last_call);
            return;
        };
        self.growth = Some(Growth { step: Some(step), ..growth });
        self.hold(Some(step), out);
    }

    fn hold(&self, step: Option<Step>, out: &mut Vec<Command>) {
        self.to_all(&Order::HoldAt { generation: self.record.generation, step }, out);
    }

    fn give_up_growth(&mut self, now: Time, out: &mut Vec<Command>) {
        if let Some(growth) = self.growth.take() {
            self.growth_after = now.after(PAUSE);
            if growth.step.is_some() {
                self.hold(None, out);
            }
        }
    }

    /// A checkpoint became durable: if all ranks hold there, the next world may form. Ranks whose scripts count in strides hold at the first step
    /// that is not before the one that was named.
    pub(super) fn grow_from(&mut self, now: Time, step: Step, out: &mut Vec<Command>) {
        if self.growth.is_some_and(|g| g.step.is_some_and(|named| step >= named)) {
            self.regroup(now, out);
        }
    }

    /// Forms the world anew although nothing failed. Costs nothing of the restart budget.
    fn regroup(&mut self, now: Time, out: &mut Vec<Command>) {
        let nodes: Vec<NodeId> = self.waiting().map(|(id, _)| id.clone()).collect();
        let fact = Fact::Growing { generation: self.record.generation, nodes };
        out.push(Command::Record { job: self.record.spec.job.clone(), fact });
        self.growth = None;
        self.newcomers = true;
        self.reached = None;
        self.fence(now, out);
        self.phase = Phase::Forming { since: now, last_join: None };
    }

    /// A rank of a new node has no way to the state that the others have: go on without that node.
    pub(super) fn leave_out(&mut self, now: Time, nodes: Vec<NodeId>, out: &mut Vec<Command>) {
        let fact = Fact::LeftOut { generation: self.record.generation, nodes: nodes.clone() };
        out.push(Command::Record { job: self.record.spec.job.clone(), fact });
        let too_early = self.record.durable.is_none();
        self.unable.extend(nodes.into_iter().map(|n| (n, too_early)));
        self.fence(now, out);
        self.phase = Phase::Forming { since: now, last_join: None };
    }

    /// When [`Job::consider_growth`] has something to do next.
    pub(super) fn growth_deadline(&self) -> Option<Time> {
        let Phase::Training { reattach_until: None, .. } = &self.phase else { return None };
        self.growth.map(|g| g.until).or_else(|| self.ripe())
    }
}
