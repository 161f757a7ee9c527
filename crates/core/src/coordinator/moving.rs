//! A node that another job is to have: its job goes on without it from a step that all ranks hold (`growth.rs`), its agent is let go, and then
//! whoever provides machines is asked to start the other job's agent there.

use super::command::Command;
use super::remedy::{Remedy, Request, Stage};
use super::state::{Job, Phase};
use crate::id::{Incarnation, JobId, NodeId};
use crate::message::Order;
use crate::time::Time;

impl Request {
    /// It takes this life of a node away from its job.
    fn takes(&self, id: &NodeId, life: Incarnation) -> bool {
        let decided = !matches!(self.stage, Stage::Noted | Stage::Asked | Stage::Failed { .. });
        let this = matches!(&self.remedy, Remedy::Move { node, incarnation, .. } if node == id && *incarnation == life);
        decided && this
    }
}

impl Job {
    /// This life of a node is to go to another job, or has gone.
    pub(super) fn moves_away(&self, id: &NodeId, life: Incarnation) -> bool {
        self.record.requests.iter().any(|r| r.takes(id, life))
    }

    /// Asks for a node to be given to another job.
    pub(super) fn give_away(&mut self, now: Time, node: &NodeId, to: &JobId, why: String, out: &mut Vec<Command>) {
        let Some(known) = self.nodes.get(node) else { return };
        let (host, incarnation) = (known.hello.host.clone(), known.hello.incarnation);
        let same = |r: &Request| matches!(&r.remedy, Remedy::Move { node: n, incarnation: i, to: t, .. } if n == node && *i == incarnation && t == to);
        // Said, or asked of a person, before.
        if self.record.requests.iter().any(|r| same(r) && !matches!(r.stage, Stage::Failed { .. })) {
            return;
        }
        self.request(now, Remedy::Move { node: node.clone(), incarnation, host, to: to.clone(), why }, out);
    }

    /// Members that are to go, if the job has enough nodes without them.
    pub(super) fn may_shrink(&self) -> bool {
        let goes = |s: &crate::message::Slot| {
            self.moves_away(&s.node, s.incarnation) || self.is_excluded(&s.node, s.incarnation)
        };
        let members = self.record.world.slots.len();
        let going = self.record.world.slots.iter().filter(|s| goes(s)).count();
        let left = u32::try_from(members - going + self.waiting().count()).unwrap_or(u32::MAX);
        going > 0 && left / self.record.spec.node_unit * self.record.spec.node_unit >= self.record.spec.nodes_min
    }

    /// Lets go of nodes that have no part in the world any more.
    pub(super) fn let_go(&mut self, out: &mut Vec<Command>) {
        if !matches!(self.phase, Phase::Training { reattach_until: None, .. }) {
            return;
        }
        let outside = self.nodes.iter().filter(|(id, n)| n.clean && self.record.world.slot(id).is_none());
        let gone: Vec<NodeId> =
            outside.filter(|(id, n)| self.moves_away(id, n.hello.incarnation)).map(|(id, _)| id.clone()).collect();
        for id in gone {
            let Some(session) = self.nodes.remove(&id).and_then(|n| n.session) else { continue };
            let why = format!("node {id} goes to another job");
            out.push(Command::Send { session, order: Order::Notice { what: why.clone() }, after: None });
            out.push(Command::Send { session, order: Order::End { code: 0, why }, after: None });
            // What the job had with it is no reason to ask for another one.
            let most = u32::try_from(self.record.world.slots.len()).unwrap_or(u32::MAX);
            self.record.largest = self.record.largest.min(most.max(1));
            self.changed(false);
        }
    }

    /// Whether a request may leave: a node that is to be moved has been let go.
    pub(super) fn may_leave(&self, request: &Request) -> bool {
        let Remedy::Move { node, incarnation, .. } = &request.remedy else { return true };
        self.nodes.get(node).is_none_or(|n| n.hello.incarnation != *incarnation)
    }
}
