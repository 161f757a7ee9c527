//! When coordinators notice that a connection is silent, and when they end because nobody needs
//! them: the product's own [`KeepAlive`](everstep_core::keep_alive::KeepAlive) and
//! [`IdleExit`](everstep_core::idle_exit::IdleExit), in virtual time.
//!
//! Agents that can be heard send something with every check. While all of a coordinator's agents
//! can be heard, checking them changes nothing, so it is left out. To the coordinator, that looks
//! like time in which its process was suspended, which is nobody's silence.

use crate::world::{Happening, World};
use everstep_core::coordinator::event::Event;
use everstep_core::id::Session;
use everstep_core::idle_exit::Needs;
use everstep_core::keep_alive::{CHECK_EVERY, Due};
use everstep_core::time::Time;

impl World {
    /// Accepts a connection.
    pub(crate) fn accept(&mut self, index: usize, session: Session) {
        let process = &mut self.processes[index];
        process.idle_exit.used();
        process.keep_alive.opened(Time(self.now), session);
        process.sessions.insert(session);
    }

    /// Records that something has arrived on a connection.
    pub(crate) fn received(&mut self, index: usize, session: Session) {
        if self.processes[index].keep_alive.received(Time(self.now), session) {
            self.coordinator(index, Event::Late { session });
        }
    }

    /// Checks the coordinator's connections from now on, as the agent at one of them may be silent.
    pub(crate) fn fell_silent(&mut self, session: Session) {
        let Some(index) = self.network.connections.get(&session).map(|c| c.coordinator) else { return };
        if !std::mem::replace(&mut self.processes[index].checking, true) {
            // Until now, all could be heard.
            self.check_connections(index);
        }
    }

    /// The agent's end is closed. The coordinator notices within this time if the path is open,
    /// else by silence.
    pub(crate) fn notices_end(&mut self, host: usize, session: Session, within: u64) {
        if !self.network.links[host].open(self.now) {
            return self.fell_silent(session);
        }
        let delay = self.rng.range(1, within);
        self.at(delay, Happening::CoordinatorSeesEnd { session });
    }

    /// Closes the connections that have been silent for too long, and checks again soon while an
    /// agent cannot be heard.
    pub(crate) fn check_connections(&mut self, index: usize) {
        if !self.processes[index].alive {
            return;
        }
        for session in self.processes[index].sessions.clone() {
            if self.can_be_heard(session) {
                self.received(index, session);
            }
        }
        for due in self.processes[index].keep_alive.check(Time(self.now)) {
            if let Due::Close(session) = due {
                self.coordinator_sees_end(session);
            }
        }
        let silent = self.processes[index].sessions.iter().any(|session| !self.can_be_heard(*session));
        self.processes[index].checking = silent;
        if silent {
            let wait = u64::try_from(CHECK_EVERY.as_millis()).unwrap_or(u64::MAX);
            self.at(wait, Happening::CheckConnections { index });
        }
    }

    /// Returns whether what the agent at the other end sends arrives now.
    fn can_be_heard(&self, session: Session) -> bool {
        self.network.connections.get(&session).is_some_and(|c| {
            let host = &self.hosts[c.host];
            let there = host.up && !host.frozen && host.life == c.life && c.agent_end && !c.broken;
            there && self.now >= self.network.links[c.host].to_blocked_until
        })
    }

    /// Ends the coordinators that nobody needs. An agent that needs one later starts it.
    pub(crate) fn end_unneeded_coordinators(&mut self) {
        for index in 0..self.processes.len() {
            let process = &mut self.processes[index];
            let job = !process.core.idle() || !process.sessions.is_empty();
            if process.alive && process.idle_exit.is_over(Time(self.now), Needs { job, notices: false }) {
                self.kill_coordinator(index);
            }
        }
    }
}
