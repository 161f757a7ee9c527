//! Keeps network problems from being charged to the script. A node whose messages arrive late gets
//! longer to reconnect. A restart explained only by lost connections is taken off the daily budget.

use super::command::Command;
use super::state::{Job, Node};
use crate::id::{Incarnation, NodeId};
use crate::message::{Cause, Failure, Hello, Order};
use crate::spec::{Ladder, RestartBudget};
use crate::time::Time;
use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 3600);
/// Two late messages within this time are a bad network, not a hiccup.
const LATE_WITHIN: Duration = Duration::from_secs(60);
/// The network counts as bad for this long after the last late message.
const BAD_FOR: Duration = Duration::from_secs(10 * 60);
/// Maximum number of restarts within a day that are put down to the network: an error that only
/// looks like it must not restart a job forever.
const NETWORK_RESTARTS_PER_DAY: usize = 50;

/// A restart charged to the daily budget, while it is unknown whether the network was the cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charge {
    at: Time,
    /// The node that counted as lost, and the life of its agent.
    lost: Option<(NodeId, Incarnation)>,
    /// Whether the first failure only followed from another one, in a generation that had completed
    /// steps.
    consequence: bool,
}

impl Node {
    /// Records a message that arrived late on a living connection.
    fn late(&mut self, now: Time) {
        if self.late.is_some_and(|at| now.since(at) < LATE_WITHIN) {
            self.bad_network_until = now.after(BAD_FOR);
        }
        self.late = Some(now);
    }

    /// Returns how long this node may take to reconnect before it counts as lost.
    pub(super) fn reconnect(&self, ladder: &Ladder) -> Duration {
        let bad = self.lost_at.is_some_and(|at| at < self.bad_network_until);
        if bad { ladder.reconnect_late } else { ladder.reconnect }
    }
}

impl Job {
    /// Records a late message of a node.
    pub(super) fn late(&mut self, now: Time, id: &NodeId) {
        if let Some(node) = self.nodes.get_mut(id) {
            node.late(now);
        }
    }

    /// Records that a failure was charged to the daily budget; the network may have caused it.
    pub(super) fn charged(&mut self, now: Time, node: &NodeId, failure: Option<&Failure>) {
        let life = self.record.world.slot(node).map(|s| s.incarnation);
        let fenced = |f: &Failure| f.cause == Cause::Fenced;
        self.charge = Some(Charge {
            at: now,
            lost: life.filter(|_| failure.is_none()).map(|life| (node.clone(), life)),
            consequence: failure.is_some_and(|f| f.verdict.follows && (f.progressed || fenced(f))),
        });
    }

    /// Takes a restart off the budget if the agent that counted as lost is back in the same life:
    /// only its connection was lost.
    pub(super) fn came_back(&mut self, now: Time, hello: &Hello, out: &mut Vec<Command>) {
        let lost = self.charge.as_ref().and_then(|c| c.lost.as_ref());
        if lost.is_some_and(|(node, life)| *node == hello.node && *life == hello.incarnation) {
            let what = format!("node {} had only lost its connection to the coordinator", hello.node);
            self.forgive(now, &what, out);
        }
    }

    /// Takes a restart off the budget if only lost connections were reported around the incident.
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
