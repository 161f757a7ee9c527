//! Machines: an agent (the real state machine), worker processes, and what memory holds.

use everstep_core::agent::Agent;
use everstep_core::id::{Generation, NodeId, Session, Step};
use everstep_core::message::{Offer, Slot, Tier};
use std::collections::BTreeMap;

/// The worker processes of one generation on one host.
#[derive(Clone, Debug)]
pub struct Crew {
    /// Their generation.
    pub generation: Generation,
    /// This host's part of the world.
    pub slot: Slot,
    /// Number of workers.
    pub workers: u32,
    /// Local rank → alive.
    pub living: BTreeMap<u32, bool>,
    /// Local ranks that make no progress.
    pub hung: Vec<u32>,
    /// When they are ready to offer checkpoints.
    pub ready_at: u64,
    /// Their offers were made.
    pub offered: bool,
    /// They were told what to restore; training since.
    pub training: bool,
    /// Steps completed.
    pub step: u64,
    /// Step it was told to restore.
    pub restored: u64,
    /// Counts observations.
    pub beats: u64,
    /// Waits at this step for the next world.
    pub hold_at: Option<u64>,
}

impl Crew {
    /// Some process is left.
    #[must_use]
    pub fn alive(&self) -> bool {
        self.living.values().any(|a| *a)
    }

    /// All processes run.
    #[must_use]
    pub fn able_to_train(&self) -> bool {
        self.living.values().all(|a| *a) && self.hung.is_empty() && !self.living.is_empty()
    }
}

/// One machine.
#[derive(Debug)]
pub struct Host {
    /// The id its agent uses.
    pub node: NodeId,
    /// Powered on.
    pub up: bool,
    /// Frozen: alive, but nothing runs.
    pub frozen: bool,
    /// The agent process.
    pub agent: Option<Agent>,
    /// Rises with every start of the agent.
    pub life: u64,
    /// Workers: normally none or one generation.
    pub crews: Vec<Crew>,
    /// The agent died and its guard is ending the workers.
    pub guard_ending: bool,
    /// The agent's end of its connection.
    pub session: Option<Session>,
    /// Next port for a process-group store.
    pub next_port: u16,
    /// Memory tier: sealed steps by local rank. Ranks hold the same state, so a rank may restore another's.
    pub memory: BTreeMap<u32, Vec<(Generation, u64)>>,
    /// Starts that will crash at once.
    pub crash_loop: u32,
    /// Everything takes longer until then.
    pub slow_until: u64,
    /// Exit of the agent, when it ended by itself.
    pub exited: Option<(i32, String)>,
    /// Whether a scheduler starts the agent again when it ends.
    pub restart: bool,
    /// Latest scheduled wake-up.
    pub wake_at: Option<u64>,
}

impl Host {
    /// A machine that is up and runs nothing.
    #[must_use]
    pub fn new(node: NodeId) -> Self {
        Host {
            node,
            up: true,
            frozen: false,
            agent: None,
            life: 0,
            crews: Vec::new(),
            guard_ending: false,
            session: None,
            next_port: 20_000,
            memory: BTreeMap::new(),
            crash_loop: 0,
            slow_until: 0,
            exited: None,
            restart: true,
            wake_at: None,
        }
    }

    /// Somebody will end the workers.
    #[must_use]
    pub fn agent_or_guard_alive(&self) -> bool {
        self.up && (self.agent.is_some() || self.guard_ending)
    }

    /// What the rank with this local rank could restore here.
    #[must_use]
    pub fn offers(&self, local: u32, durable: Option<u64>) -> Vec<Offer> {
        let memory = self.memory.get(&local).into_iter().flatten();
        let mut offers: Vec<Offer> =
            memory.map(|(g, s)| Offer { step: Step(*s), tier: Tier::Memory, generation: *g }).collect();
        offers.extend(durable.map(|s| Offer { step: Step(s), tier: Tier::Durable, generation: Generation(0) }));
        offers.sort_by(|a, b| b.cmp(a));
        offers
    }

    /// A step is sealed in memory: the two newest stay.
    pub fn seal(&mut self, local: u32, generation: Generation, step: u64) {
        let held = self.memory.entry(local).or_default();
        held.retain(|(_, s)| *s != step);
        held.push((generation, step));
        let surplus = held.len().saturating_sub(2);
        held.drain(..surplus);
    }
}
