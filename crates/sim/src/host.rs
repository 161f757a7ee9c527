//! Machines: an agent (the real state machine), worker processes, and the contents of memory.

use everstep_core::agent::Agent;
use everstep_core::agent::final_step::FinalStep;
use everstep_core::id::{Generation, NodeId, Rank, Session, Step};
use everstep_core::message::{Holding, Offer, Parity, Slot, Tier};
use std::collections::BTreeMap;

/// The worker processes of one generation on one host.
#[derive(Clone, Debug)]
pub struct Crew {
    pub generation: Generation,
    /// Number of restarts before it.
    pub restarts: u32,
    /// This host's part of the world.
    pub slot: Slot,
    /// The number of workers.
    pub workers: u32,
    /// Whether the worker with this local rank is alive.
    pub living: BTreeMap<u32, bool>,
    /// Local ranks that make no progress.
    pub hung: Vec<u32>,
    /// Their GPU does not respond, so no rank of the world makes progress.
    pub stuck: bool,
    /// When they are ready to offer checkpoints.
    pub ready_at: u64,
    /// They have made their offers.
    pub offered: bool,
    /// They have been ordered what to restore, and have trained since.
    pub training: bool,
    /// The number of completed steps.
    pub step: u64,
    /// The step that they were ordered to restore.
    pub restored: u64,
    /// The counter of heartbeats that the agent observes.
    pub beats: u64,
    /// The step at which they wait for the next world.
    pub hold_at: Option<u64>,
}

impl Crew {
    /// Returns true if any process is alive.
    #[must_use]
    pub fn alive(&self) -> bool {
        self.living.values().any(|a| *a)
    }

    /// Returns true if all processes run and make progress.
    #[must_use]
    pub fn able_to_train(&self) -> bool {
        self.living.values().all(|a| *a) && self.hung.is_empty() && !self.stuck && !self.living.is_empty()
    }
}

/// A slot in memory.
#[derive(Clone, Debug)]
pub struct Held {
    /// The shard in the slot.
    pub of: Holding,
    /// It may not be overwritten.
    pub pinned: bool,
    /// Its bytes have changed.
    pub rotten: bool,
}

/// A parity shard in memory.
#[derive(Clone, Debug)]
pub struct HeldParity {
    /// Its identity.
    pub of: Parity,
    /// Its bytes have changed.
    pub rotten: bool,
}

/// How a broken GPU shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shows {
    /// The worker exits with an error that names the GPU.
    Said,
    /// The kernel reports it; the worker makes no progress.
    Hang,
    /// The worker is killed without a message; the kernel reports the GPU a moment later.
    SilentThenSign,
    /// Nothing reports it: the worker exits with the message of a lost peer.
    Never,
}

/// What a machine keeps for others.
#[derive(Debug, Default)]
pub struct Copies {
    /// Copies of other nodes' steps.
    pub replicas: Vec<Held>,
    /// Parity of other nodes' steps.
    pub parity: Vec<HeldParity>,
    /// The current replication round, and the step that was taken for it.
    pub taken: (Generation, u64, Option<Step>),
    /// Copies of older generations are refused.
    pub floor: Generation,
}

/// The faults of a machine.
#[derive(Debug, Default)]
pub struct Faults {
    /// How many of the next transfers arrive incomplete.
    pub cut_next: u32,
    /// The machine is lost after the last of those transfers.
    pub doomed: bool,
    /// How many of the next starts crash at once.
    pub crash_loop: u32,
    /// How a broken GPU shows, if one has failed.
    pub gpu: Option<Shows>,
    /// Everything takes longer until this time.
    pub slow_until: u64,
    /// Its ranks do not find durable checkpoints until this time.
    pub stale_until: u64,
}

/// What an agent ends with: the step that it makes durable, and the error that it passes on.
#[derive(Debug, Default)]
pub struct Last {
    /// What the agent knows about it.
    pub step: FinalStep,
    /// The ranks of its newest workers.
    pub ranks: Vec<Rank>,
    /// The newest generation that was ordered to restore here, and the step.
    pub restored: Option<(Generation, Step)>,
    /// The worker that failed first in each attempt, by the number of restarts: its local rank and
    /// exit code.
    pub errors: BTreeMap<u32, (u32, i32)>,
}

/// One machine.
#[derive(Debug)]
pub struct Host {
    /// The id that its agent uses.
    pub node: NodeId,
    /// Powered on.
    pub up: bool,
    /// Alive, but nothing runs.
    pub frozen: bool,
    /// The agent process.
    pub agent: Option<Agent>,
    last: Last,
    /// The number of the agent's life; it rises when the agent starts and when it is killed.
    pub life: u64,
    /// The workers, normally of at most one generation.
    pub crews: Vec<Crew>,
    /// The agent has died and its guard is ending the workers.
    pub guard_ending: bool,
    /// The agent's end of its connection.
    pub session: Option<Session>,
    /// The next port for a process-group store.
    pub next_port: u16,
    /// Sealed steps by local rank.
    pub memory: BTreeMap<u32, Vec<Held>>,
    /// What it keeps for other nodes.
    pub copies: Copies,
    /// The faults that will show, or show now.
    pub faults: Faults,
    /// The exit code and reason of an agent that has ended.
    pub exited: Option<(i32, String)>,
    /// A scheduler starts the agent again when it ends.
    pub restart: bool,
    /// When the agent's timer wakes it.
    pub wake_at: Option<u64>,
}

impl Host {
    /// Returns what the agent ends with if the job ends now.
    pub(crate) fn last(&self) -> &Last {
        &self.last
    }

    /// As [`Host::last`], to be changed.
    pub(crate) fn last_mut(&mut self) -> &mut Last {
        &mut self.last
    }

    /// Returns a machine that is up and runs nothing.
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
            copies: Copies::default(),
            faults: Faults::default(),
            last: <_>::default(),
            exited: None,
            restart: true,
            wake_at: None,
        }
    }

    /// Returns true if an agent or a guard can end the workers.
    #[must_use]
    pub fn agent_or_guard_alive(&self) -> bool {
        self.up && (self.agent.is_some() || self.guard_ending)
    }

    /// Counts down `cut_next`, and returns true if the data being sent arrives incomplete.
    pub fn cuts(&mut self) -> bool {
        let cut = self.faults.cut_next > 0;
        self.faults.cut_next = self.faults.cut_next.saturating_sub(1);
        cut
    }

    /// Returns all shards in memory.
    pub fn all(&self) -> impl Iterator<Item = &Held> {
        self.memory.values().flatten().chain(&self.copies.replicas)
    }

    /// Returns what a rank could restore from its own slots or from durable storage.
    #[must_use]
    pub fn offers(&self, local: u32, rank: (Rank, u32), shared: bool, durable: Option<u64>) -> Vec<Offer> {
        let fits = |m: &&Held| shared || (m.of.rank, m.of.world_size) == rank;
        let memory = self.memory.get(&local).into_iter().flatten().filter(fits);
        let mut offers: Vec<Offer> =
            memory.map(|m| Offer { step: m.of.step, tier: Tier::Memory, generation: m.of.generation }).collect();
        offers.extend(durable.map(|s| Offer { step: Step(s), tier: Tier::Durable, generation: Generation(0) }));
        offers.sort_by(|a, b| b.cmp(a));
        offers
    }

    /// Adds a sealed step; the two newest and all pinned ones stay.
    pub fn seal(&mut self, local: u32, of: Holding) {
        let held = self.memory.entry(local).or_default();
        held.retain(|m| m.of.step != of.step);
        held.push(Held { of, pinned: false, rotten: false });
        let mut surplus = held.iter().filter(|m| !m.pinned).count().saturating_sub(2);
        held.retain(|m| {
            let goes = surplus > 0 && !m.pinned;
            surplus -= usize::from(goes);
            !goes
        });
    }

    /// Stores a shard that was restored from another machine, in a free slot or in place of the
    /// oldest, but never in place of one of the same step, which by now belongs to another rank.
    pub fn fetched(&mut self, local: u32, of: Holding) {
        let held = self.memory.entry(local).or_default();
        held.retain(|m| m.of != of);
        if held.len() > 2 {
            let free = held.iter().enumerate().filter(|(_, m)| !m.pinned && m.of.step != of.step);
            let oldest = free.min_by_key(|(_, m)| (m.of.generation, m.of.step)).map(|(i, _)| i);
            if let Some(i) = oldest {
                held.remove(i);
            }
        }
        held.push(Held { of, pinned: false, rotten: false });
    }

    /// Stores a copy. One other copy of the rank's shard stays: that of the `base` step if present,
    /// otherwise the newest.
    pub fn keep(&mut self, of: Holding, base: Option<Step>) {
        let same = |m: &Held| (m.of.rank, m.of.world_size) == (of.rank, of.world_size);
        self.copies.replicas.retain(|m| m.of != of);
        let others = self.copies.replicas.iter().filter(|m| same(m)).map(|m| (m.of.generation, m.of.step));
        let stays = stays(others, base);
        self.copies.replicas.retain(|m| !same(m) || Some((m.of.generation, m.of.step)) == stays);
        self.copies.replicas.push(Held { of, pinned: false, rotten: false });
    }

    /// Does the same for parity.
    pub fn keep_parity(&mut self, of: Parity, base: Option<Step>) {
        let name = |p: &Parity| (p.stripe, p.number, p.world_size);
        self.copies.parity.retain(|p| p.of != of);
        let others =
            self.copies.parity.iter().filter(|p| name(&p.of) == name(&of)).map(|p| (p.of.generation, p.of.step));
        let stays = stays(others, base);
        self.copies.parity.retain(|p| name(&p.of) != name(&of) || Some((p.of.generation, p.of.step)) == stays);
        self.copies.parity.push(HeldParity { of, rotten: false });
    }
}

/// Returns the version to keep: that of the `base` step if present, otherwise the newest.
fn stays(versions: impl Iterator<Item = (Generation, Step)> + Clone, base: Option<Step>) -> Option<(Generation, Step)> {
    versions.clone().filter(|v| Some(v.1) == base).max().or_else(|| versions.max())
}
