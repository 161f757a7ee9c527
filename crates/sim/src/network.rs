//! Sessions between agents and coordinators. A session is a byte stream: what it delivers is what
//! was sent, late perhaps, or the session breaks. The simulation is harsher than TCP: it also
//! delivers twice and out of order.

use everstep_core::id::Session;
use std::collections::BTreeMap;

/// State of the path between one host and the coordinator's machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    /// Nothing from the host arrives until then.
    pub to_blocked_until: u64,
    /// Nothing from the coordinator arrives until then.
    pub from_blocked_until: u64,
    /// Extra delay per message, in milliseconds, until the second value.
    pub slow: (u64, u64),
    /// The next message is lost.
    pub drop_next: bool,
    /// The next message to the coordinator arrives twice.
    pub duplicate_next: bool,
    /// What the coordinator sends arrives twice, up to the next start.
    pub duplicate_order: bool,
    /// The next message is overtaken.
    pub reorder_next: bool,
}

impl Link {
    /// True when a connection can be opened.
    #[must_use]
    pub fn open(&self, now: u64) -> bool {
        now >= self.to_blocked_until && now >= self.from_blocked_until
    }
}

/// One connection.
#[derive(Clone, Debug)]
pub struct Connection {
    /// Host at one end.
    pub host: usize,
    /// Life of the host's agent that opened it.
    pub life: u64,
    /// Coordinator process at the other end.
    pub coordinator: usize,
    /// The agent's end is open.
    pub agent_end: bool,
    /// The coordinator's end is open.
    pub coordinator_end: bool,
    /// Earliest arrival of the next message in each direction (streams keep their order).
    pub next_arrival: [u64; 2],
}

/// All connections ever opened.
#[derive(Debug, Default)]
pub struct Network {
    /// By session number.
    pub connections: BTreeMap<Session, Connection>,
    next: u64,
}

impl Network {
    /// Opens a connection.
    pub fn open(&mut self, host: usize, life: u64, coordinator: usize) -> Session {
        self.next += 1;
        let session = Session(self.next);
        let c = Connection { host, life, coordinator, agent_end: true, coordinator_end: true, next_arrival: [0; 2] };
        self.connections.insert(session, c);
        session
    }
}
