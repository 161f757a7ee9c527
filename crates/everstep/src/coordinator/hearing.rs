//! When each agent was last heard. Late lines are a sign of a network that loses packets.

use super::{Driver, PULSE};
use everstep_core::coordinator::event::Event;
use everstep_core::id::Session;
use std::time::Instant;

impl Driver {
    /// Records that an agent has sent a line.
    pub(super) fn listened(&mut self, session: Session) {
        let Some(peer) = self.peers.get_mut(&session) else { return };
        let now = Instant::now();
        // The network is not to blame for time in which this process was suspended.
        let own = now.duration_since(self.pulsed).saturating_sub(PULSE * 2);
        let gap = now.duration_since(peer.heard).saturating_sub(own);
        peer.heard = now;
        if peer.job.is_some() && gap >= peer.silence / 2 {
            self.event(Event::Late { session });
        }
    }
}
