//! Faults of connections.

use crate::world::{Happening, World};

impl World {
    /// Loses the next message.
    pub(super) fn drop_message(&mut self) -> Option<()> {
        let host = self.running()?;
        self.oracle.blames.cut(&self.hosts[host].node);
        self.network.links[host].drop_next = true;
        self.worker_dies(host, 0);
        Some(())
    }

    pub(super) fn delay_messages(&mut self, until: u64) -> Option<()> {
        let host = self.attached()?;
        self.oracle.blames.cut(&self.hosts[host].node);
        self.network.links[host].slow = (self.rng.range(100, 1500), until);
        Some(())
    }

    /// Duplicates the next message, and orders up to the next start.
    pub(super) fn duplicate_message(&mut self) -> Option<()> {
        let host = self.running()?;
        self.network.links[host].duplicate_next = true;
        self.worker_dies(host, 1);
        for link in &mut self.network.links {
            link.duplicate_order = true;
        }
        Some(())
    }

    pub(super) fn reorder_messages(&mut self) -> Option<()> {
        let host = self.running()?;
        self.network.links[host].reorder_next = true;
        self.worker_dies(host, 1);
        Some(())
    }

    /// Resets a connection while both ends stay alive.
    pub(super) fn reset_connection(&mut self) -> Option<()> {
        let host = self.attached()?;
        let session = self.hosts[host].session?;
        self.agent_sees_end(session);
        Some(())
    }

    /// Blocks messages to the coordinator, from it, or both, until the given time.
    pub(super) fn partition(&mut self, until: u64, to: bool, from: bool) -> Option<()> {
        let host = self.attached()?;
        self.oracle.blames.cut(&self.hosts[host].node);
        let link = &mut self.network.links[host];
        if to {
            link.to_blocked_until = until;
        }
        if from {
            link.from_blocked_until = until;
        }
        let session = self.hosts[host].session?;
        if to {
            self.fell_silent(session);
        }
        let silence = self.silence();
        if from && until > self.now + silence {
            self.at(silence, Happening::AgentSeesEnd { session });
        }
        Some(())
    }
}
