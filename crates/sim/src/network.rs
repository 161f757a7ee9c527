//! Sessions between agents and coordinators. A session is a byte stream: it delivers what was sent,
//! possibly late, or it breaks. The simulation is harsher than TCP: it also delivers messages twice
//! and out of order.

use everstep_core::id::Session;
use std::collections::BTreeMap;

/// The path between one host and the coordinator's machine. Times are simulated milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    /// No message from the host arrives before this time.
    pub to_blocked_until: u64,
    /// No message from the coordinator arrives before this time.
    pub from_blocked_until: u64,
    /// The extra delay per message, in milliseconds, and the time at which it ends.
    pub slow: (u64, u64),
    /// The next message is lost.
    pub drop_next: bool,
    /// The next message to the coordinator arrives twice.
    pub duplicate_next: bool,
    /// Messages from the coordinator arrive twice, up to and including the next start.
    pub duplicate_order: bool,
    /// The next message is overtaken by later ones.
    pub reorder_next: bool,
}

impl Link {
    /// Returns true if a connection can be opened.
    #[must_use]
    pub fn open(&self, now: u64) -> bool {
        now >= self.to_blocked_until && now >= self.from_blocked_until
    }
}

/// One connection.
#[derive(Clone, Debug)]
pub struct Connection {
    /// The host at the agent's end.
    pub host: usize,
    /// The life of the host's agent that opened the connection.
    pub life: u64,
    /// The index of the coordinator process at the other end.
    pub coordinator: usize,
    /// The agent's end is open.
    pub agent_end: bool,
    /// The coordinator's end is open.
    pub coordinator_end: bool,
    /// A message was lost: nothing that is sent later arrives in order, so the coordinator hears
    /// nothing more.
    pub broken: bool,
    /// The earliest arrival of the next message in each direction, since streams keep their order.
    pub next_arrival: [u64; 2],
}

/// All connections ever opened.
#[derive(Debug, Default)]
pub struct Network {
    /// The connections by session number.
    pub connections: BTreeMap<Session, Connection>,
    /// Each host's link to the others.
    pub links: Vec<Link>,
    next: u64,
}

impl Network {
    /// Returns the network of this number of hosts.
    #[must_use]
    pub fn new(hosts: usize) -> Self {
        Network { links: vec![Link::default(); hosts], ..Network::default() }
    }

    /// Opens a connection and returns its session.
    pub fn open(&mut self, host: usize, life: u64, coordinator: usize) -> Session {
        self.next += 1;
        let session = Session(self.next);
        let c = Connection {
            host,
            life,
            coordinator,
            agent_end: true,
            coordinator_end: true,
            broken: false,
            next_arrival: [0; 2],
        };
        self.connections.insert(session, c);
        session
    }
}
