//! Keeps network problems from being charged to the script. A node whose messages arrive late gets
//! longer to reconnect. A restart explained only by lost connections is taken off the daily budget.

use super::job::{Charge, Job};
use super::output::Output;
use crate::id::NodeId;
use crate::message::{Cause, Failure, Hello, Order};
use crate::time::Time;

/// Maximum number of restarts within a day that are attributed to the network: an error that only
/// resembles a network error must not restart a job forever.
const NETWORK_RESTARTS_PER_DAY: usize = 50;

impl Job {
    /// Records that a failure was charged to the daily budget; the network may have caused it.
    pub(super) fn charged(&mut self, now: Time, node: &NodeId, failure: Option<&Failure>) {
        let life = self.record.world.slot(node).map(|s| s.incarnation);
        let fenced = |f: &Failure| f.cause == Cause::Fenced;
        self.restarts.charge(Charge {
            at: now,
            lost: life.filter(|_| failure.is_none()).map(|life| (node.clone(), life)),
            consequence: failure.is_some_and(|f| f.verdict.follows && (f.progressed || fenced(f))),
        });
    }

    /// Takes a restart off the budget if the agent that counted as lost is back in the same life:
    /// only its connection was lost.
    pub(super) fn came_back(&mut self, now: Time, hello: &Hello, out: &mut Output) {
        let lost =
            |c: &Charge| c.lost.as_ref().is_some_and(|(node, life)| *node == hello.node && *life == hello.incarnation);
        if let Some(charge) = self.restarts.take_charge(lost) {
            let what = format!("node {} had only lost its connection to the coordinator", hello.node);
            self.forgive(now, &charge, &what, out);
        }
    }

    /// Takes a restart off the budget if only lost connections were reported around the incident.
    pub(super) fn only_connections(&mut self, now: Time, out: &mut Output) {
        if let Some(charge) = self.restarts.take_charge(|c| c.consequence) {
            self.forgive(now, &charge, "only lost connections were reported", out);
        }
    }

    fn forgive(&mut self, now: Time, charge: &Charge, what: &str, out: &mut Output) {
        if self.record.forgive_restart(now, charge.at, NETWORK_RESTARTS_PER_DAY) {
            let what = format!("{what}: the restart does not count against the daily limit");
            self.to_all(&Order::Notice { what }, out);
        }
    }
}
