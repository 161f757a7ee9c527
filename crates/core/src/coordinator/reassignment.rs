//! Reassigns a node to another job. Its job continues without it from a step that all ranks hold
//! (`growth.rs`) and ends its agent. Then the machine provider is asked to start the other job's
//! agent there.

use super::job::Job;
use super::output::Output;
use super::request::{Remedy, Request, Stage};
use crate::exit_code::ExitCode;
use crate::id::{JobId, NodeId};
use crate::message::{ExitReason, Order};
use crate::time::Time;

impl Job {
    /// Requests that a node be moved to another job.
    pub(super) fn reassign(&mut self, now: Time, node: &NodeId, to: &JobId, why: String, out: &mut Output) {
        let Some(known) = self.nodes.get(node) else { return };
        let (host, incarnation) = (known.hello.host.clone(), known.hello.incarnation);
        let same = |r: &Request| matches!(&r.remedy, Remedy::Move { node: n, incarnation: i, to: t, .. } if n == node && *i == incarnation && t == to);
        // The same request was made before.
        if self.record.machines.requests().iter().any(|r| same(r) && !matches!(r.stage, Stage::Failed { .. })) {
            return;
        }
        self.request(now, Remedy::Move { node: node.clone(), incarnation, host, to: to.clone(), why }, out);
    }

    /// Returns whether members should leave and the job has enough nodes without them.
    pub(super) fn may_shrink(&self) -> bool {
        let goes = |s: &crate::message::Slot| {
            self.record.machines.is_reassigned(&s.node, s.incarnation)
                || self.record.machines.is_excluded(&s.node, s.incarnation)
        };
        let members = self.record.world.slots.len();
        let going = self.record.world.slots.iter().filter(|s| goes(s)).count();
        let left = u32::try_from(members - going + self.waiting().count()).unwrap_or(u32::MAX);
        going > 0 && left / self.record.spec.node_unit * self.record.spec.node_unit >= self.record.spec.nodes_min
    }

    /// Ends the agents of nodes that are reassigned and no longer part of the world.
    pub(super) fn release_reassigned(&mut self, out: &mut Output) {
        if !self.phase.is_settled() {
            return;
        }
        let outside = self.nodes.iter().filter(|(id, n)| n.clean && self.record.world.slot(id).is_none());
        let gone: Vec<NodeId> = outside
            .filter(|(id, n)| self.record.machines.is_reassigned(id, n.hello.incarnation))
            .map(|(id, _)| id.clone())
            .collect();
        for id in gone {
            let Some(session) = self.nodes.remove(&id).and_then(|n| n.session) else { continue };
            let why = format!("node {id} goes to another job");
            out.notice(session, why.clone());
            out.send(session, Order::Leave(ExitReason { code: ExitCode::Done.number(), why }));
            // The job must not ask for a replacement of a node that was reassigned.
            let most = u32::try_from(self.record.world.slots.len()).unwrap_or(u32::MAX);
            self.record.largest = self.record.largest.min(most.max(1));
            self.changed(false);
        }
    }

    /// Returns whether a request may be sent: a node to be moved must have left its job first.
    pub(super) fn may_be_sent(&self, request: &Request) -> bool {
        let Remedy::Move { node, incarnation, .. } = &request.remedy else { return true };
        self.nodes.get(node).is_none_or(|n| n.hello.incarnation != *incarnation)
    }
}
