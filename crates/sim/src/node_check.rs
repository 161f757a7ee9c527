//! A host's part in a check of the nodes. It fails with a broken GPU, or if its partner has one or
//! cannot be reached.

use crate::world::{Happening, World};
use everstep_core::agent::event::Event as AgentEvent;
use everstep_core::message::{Check, Checked, Partner};
use everstep_core::node_check::Speed;

impl World {
    pub(crate) fn take_part(&mut self, host: usize, check: &Check) {
        let (well, life) = (self.hosts[host].faults.gpu.is_none(), self.hosts[host].life);
        let there = |p: &&Partner| {
            self.hosts
                .iter()
                .any(|h| h.node == p.node && h.up && !h.frozen && h.agent.is_some() && h.faults.gpu.is_none())
        };
        let tested = |p: &Partner| (p.node.clone(), Some(p).filter(there).filter(|_| well).map(|_| 900));
        let pairs = check.partners.iter().map(tested).collect();
        // A broken GPU may still compute at full speed.
        let speed = check.measure.then_some(Ok(Speed { compute: 1000, memory: 500 }));
        let answer = Checked { check: check.check, round: check.round, speed, pairs, cannot: None };
        let delay = self.rng.range(300, 3000);
        self.at(delay, Happening::Checked { host, life, answer });
    }

    pub(crate) fn checked(&mut self, host: usize, life: u64, answer: Checked) {
        if self.hosts[host].life == life && !self.hosts[host].frozen {
            self.agent(host, AgentEvent::Checked(answer));
        }
    }
}
