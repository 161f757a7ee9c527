//! Faults of machines and their agents.

use crate::world::{Happening, World};
use std::collections::BTreeSet;

impl World {
    /// Makes a machine's kernel report the same line `times` times.
    pub(super) fn notes(&mut self, line: &'static str, times: u32) -> Option<()> {
        let host = self.attached()?;
        self.at(1, Happening::Signs { host, line, times });
        Some(())
    }

    /// Kills an agent, which is started again.
    pub(super) fn agent_crash(&mut self) -> Option<()> {
        let host = self.attached()?;
        self.crash_agent(host);
        let delay = self.rng.range(200, 10_000);
        self.at(delay, Happening::StartAgent { host });
        Some(())
    }

    pub(super) fn node_crash(&mut self) -> Option<()> {
        let host = self.attached()?;
        self.lose_node(host);
        Some(())
    }

    pub(super) fn two_nodes_crash(&mut self) -> Option<()> {
        let first = self.attached()?;
        let second = self.attached()?;
        for host in BTreeSet::from([first, second]) {
            self.lose_node(host);
        }
        Some(())
    }

    /// Loses a machine for good, provided that the job can train without it.
    pub(super) fn node_gone(&mut self) -> Option<()> {
        let gone = self.hosts.iter().filter(|h| !h.up && h.life > 0).count();
        if gone + self.spec.nodes_max as usize >= self.options.nodes {
            return None;
        }
        let host = self.attached()?;
        self.crash_node(host);
        Some(())
    }

    /// Loses a machine for good; another one takes its id.
    pub(super) fn node_replaced(&mut self) -> Option<()> {
        let spare = self.any_host(|h| !h.up && h.life == 0)?;
        let host = self.attached()?;
        self.crash_node(host);
        self.take_over(spare, host);
        Some(())
    }

    /// Freezes a machine, which comes back after another one has taken its id.
    pub(super) fn old_incarnation_returns(&mut self) -> Option<()> {
        let spare = self.any_host(|h| !h.up && h.life == 0)?;
        let host = self.attached()?;
        self.hosts[host].frozen = true;
        self.oracle.blames.cut(&self.hosts[host].node);
        let frozen_for = self.rng.range(3000, 20_000);
        self.at(frozen_for, Happening::Thaw { host });
        self.network.links[host].to_blocked_until = self.now + frozen_for;
        self.network.links[host].from_blocked_until = self.now + frozen_for;
        let session = self.hosts[host].session?;
        self.fell_silent(session);
        self.at(frozen_for + 5, Happening::AgentSeesEnd { session });
        self.hosts[host].restart = false;
        self.take_over(spare, host);
        Some(())
    }

    /// Starts a second agent with the id of a living one.
    pub(super) fn duplicate_node_id(&mut self) -> Option<()> {
        let host = self.attached()?;
        let spare = self.any_host(|h| !h.up && h.life == 0)?;
        self.hosts[spare].node = self.hosts[host].node.clone();
        self.hosts[spare].up = true;
        self.hosts[spare].restart = false;
        self.at(1, Happening::StartAgent { host: spare });
        Some(())
    }

    /// Loses two machines, and hides durable checkpoints from another one.
    pub(super) fn listing_stale(&mut self) -> Option<()> {
        let host = self.running()?;
        self.hosts[host].faults.stale_until = (self.now + 60_000).min(self.quiet_at);
        self.two_nodes_crash()
    }

    /// Slows down a machine and its link.
    pub(super) fn slow_node(&mut self, until: u64) -> Option<()> {
        let host = self.attached()?;
        self.oracle.blames.cut(&self.hosts[host].node);
        self.hosts[host].faults.slow_until = until;
        self.oracle.slowed.insert(self.hosts[host].node.clone());
        self.network.links[host].slow = (400, until);
        Some(())
    }

    fn take_over(&mut self, spare: usize, host: usize) {
        self.hosts[spare].node = self.hosts[host].node.clone();
        self.hosts[spare].up = true;
        let delay = self.rng.range(2000, 30_000);
        self.at(delay, Happening::StartAgent { host: spare });
    }

    pub(crate) fn crash_agent(&mut self, host: usize) {
        if let Some(crew) = self.hosts[host].crews.last() {
            self.oracle.blames.cause(crew.generation, &self.hosts[host].node);
        }
        let h = &mut self.hosts[host];
        h.agent = None;
        h.life += 1;
        h.guard_ending = true;
        let session = h.session.take();
        let delay = self.rng.range(5, 1500);
        self.at(delay, Happening::GuardDone { host });
        if let Some(session) = session {
            self.close_agent_end(session);
        }
    }

    /// Loses a machine with its memory; it comes back empty after a while.
    pub(crate) fn lose_node(&mut self, host: usize) {
        self.crash_node(host);
        let delay = self.rng.range(2000, 60_000);
        self.hosts[host].up = true;
        self.at(delay, Happening::StartAgent { host });
    }

    fn crash_node(&mut self, host: usize) {
        self.crash_agent(host);
        let h = &mut self.hosts[host];
        h.crews.clear();
        h.memory.clear();
        h.copies.replicas.clear();
        h.copies.parity.clear();
        h.up = false;
        self.oracle.gone(host, |_| true);
    }
}
