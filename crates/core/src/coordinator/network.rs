//! What the network did is not charged to the script: a node whose lines come late gets longer to reconnect, and a restart that nothing but
//! lost connections explains is taken off the daily budget.

use super::command::Command;
use super::state::{Job, Node};
use crate::id::{Incarnation, NodeId};
use crate::message::{Cause, Failure, Hello, Order};
use crate::spec::{Ladder, RestartBudget};
use crate::time::Time;
use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 3600);
/// Two late lines within this are a bad network, not a hiccup.
const LATE_WITHIN: Duration = Duration::from_secs(60);
/// A network stays bad for this long after its last late line.
const BAD_FOR: Duration = Duration::from_secs(10 * 60);
/// Restarts of a day that are put down to the network at most: an error that only looks like it must not restart a job for ever.
const NETWORK_RESTARTS_PER_DAY: usize = 50;

/// A restart that the daily budget was charged for, while it is not known whether the network was the cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charge {
    at: Time,
    /// The node that was counted as lost, and its life.
    lost: Option<(NodeId, Incarnation)>,
    /// The first failure was only a consequence of another one, in a generation that had been making steps.
    consequence: bool,
}

impl Node {
    /// A line came late on a living connection.
    fn late(&mut self, now: Time) {
        if self.late.is_some_and(|at| now.since(at) < LATE_WITHIN) {
            self.bad_network_until = now.after(BAD_FOR);
        }
        self.late = Some(now);
    }

    /// How long this node may take to reconnect before it counts as lost.
    pub(super) fn reconnect(&self, ladder: &Ladder) -> Duration {
        let bad = self.lost_at.is_some_and(|at| at < self.bad_network_until);
        if bad { ladder.reconnect_late } else { ladder.reconnect }
    }
}

impl Job {
    /// A line of a node came late.
    pub(super) fn late(&mut self, now: Time, id: &NodeId) {
        if let Some(node) = self.nodes.get_mut(id) {
            node.late(now);
        }
    }

    /// The daily budget was charged for a failure; it may turn out that the network was the cause.
    pub(super) fn charged(&mut self, now: Time, node: &NodeId, failure: Option<&Failure>) {
        let life = self.record.world.slot(node).map(|s| s.incarnation);
        let fenced = |f: &Failure| f.cause == Cause::Fenced;
        self.charge = Some(Charge {
            at: now,
            lost: life.filter(|_| failure.is_none()).map(|life| (node.clone(), life)),
            consequence: failure.is_some_and(|f| f.verdict.follows && (f.progressed || fenced(f))),
        });
    }

    /// An agent that was counted as lost is back, in the same life: only its connection had been lost.
    pub(super) fn came_back(&mut self, now: Time, hello: &Hello, out: &mut Vec<Command>) {
        let lost = self.charge.as_ref().and_then(|c| c.lost.as_ref());
        if lost.is_some_and(|(node, life)| *node == hello.node && *life == hello.incarnation) {
            let what = format!("node {} had only lost its connection to the coordinator", hello.node);
            self.forgive(now, &what, out);
        }
    }

    /// Nothing but lost connections was heard of around an incident.
    pub(super) fn only_connections(&mut self, now: Time, out: &mut Vec<Command>) {
        if self.charge.as_ref().is_some_and(|c| c.consequence) {
            self.forgive(now, "nothing but lost connections was reported", out);
        }
    }

    fn forgive(&mut self, now: Time, what: &str, out: &mut Vec<Command>) {
        let Some(charge) = self.charge.take() else { return };
        self.record.network.retain(|at| now.since(*at) < DAY);
        let daily = matches!(self.record.spec.restarts, RestartBudget::PerDayAfterFirstStep(_));
        if !daily || self.record.network.len() >= NETWORK_RESTARTS_PER_DAY {
            return;
        }
        let Some(index) = self.record.recent.iter().rposition(|at| *at == charge.at) else { return };
        self.record.recent.remove(index);
        self.record.network.push(charge.at);
        let what = format!("{what}: the restart is not counted in the daily budget");
        let to: Vec<_> = self.sessions().map(|(_, session)| session).collect();
        out.extend(to.into_iter().map(|session| Command::Send {
            session,
            order: Order::Notice { what: what.clone() },
            after: None,
        }));
    }
}
