//! The oracle: it watches after every event for what must never happen.

use crate::host::Host;
use everstep_core::coordinator::command::Fact;
use everstep_core::id::{Generation, NodeId, Rank, Step};
use everstep_core::invariant::{InvariantId, rank_once};
use everstep_core::message::{Holding, Offer, Parity, Place, Tier, World};
use std::collections::{BTreeMap, BTreeSet};

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub invariant: InvariantId,
    /// When it was detected, in simulated milliseconds.
    pub at: u64,
    /// What was observed.
    pub what: String,
}

/// Something in a machine's memory when all nodes held a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// A rank's own shard.
    Own(Holding),
    /// A copy of a shard.
    Copy(Holding),
    /// A parity shard.
    Parity(Parity),
}

impl Kept {
    /// Returns true if it was kept for other machines.
    #[must_use]
    pub fn for_others(&self) -> bool {
        !matches!(self, Kept::Own(_))
    }

    /// Returns the shard, unless this is parity.
    #[must_use]
    pub fn shard(&self) -> Option<Holding> {
        if let Kept::Own(of) | Kept::Copy(of) = self { Some(*of) } else { None }
    }

    /// Returns the parity, unless this is a shard.
    #[must_use]
    pub fn parity(&self) -> Option<&Parity> {
        if let Kept::Parity(of) = self { Some(of) } else { None }
    }
}

/// Which machines were given faults, and which were blamed.
#[derive(Clone, Debug, Default)]
pub struct Blames {
    causes: BTreeMap<Generation, BTreeSet<NodeId>>,
    /// The generation of the latest incident and the blamed node, or `None` if the failure follows
    /// from others.
    open: Option<(Generation, Option<NodeId>)>,
    /// Nodes whose connection had a fault.
    cut: BTreeSet<NodeId>,
    /// Incidents blamed on a machine that had a fault.
    pub right: u64,
    /// Incidents blamed on a machine that had none.
    pub wrong: u64,
    /// Incidents of which only consequences were reported.
    pub unknown: u64,
}

impl Blames {
    /// Records a fault of a machine that runs workers of `generation`.
    pub fn cause(&mut self, generation: Generation, node: &NodeId) {
        self.causes.entry(generation).or_default().insert(node.clone());
    }

    /// Records a fault of a machine's connection.
    pub fn cut(&mut self, node: &NodeId) {
        self.cut.insert(node.clone());
    }

    fn recorded(&mut self, fact: &Fact) {
        match fact {
            Fact::IncidentOpened { generation, node, failure, .. } => {
                self.close();
                let follows = failure.as_ref().is_some_and(|f| f.verdict.follows);
                self.open = Some((*generation, (!follows).then(|| node.clone())));
            }
            Fact::Blamed { node, verdict, .. } => {
                if let Some((_, blamed)) = &mut self.open {
                    *blamed = (!verdict.follows).then(|| node.clone());
                }
            }
            _ => {}
        }
    }

    /// Counts the latest incident, which will not change any more.
    pub fn close(&mut self) {
        let Some((generation, blamed)) = self.open.take() else { return };
        // Only the network had a fault. A node that is cut off is then at fault, which is not
        // counted.
        let Some(causes) = self.causes.get(&generation) else { return };
        match blamed {
            Some(node) if causes.contains(&node) || self.cut.contains(&node) => self.right += 1,
            Some(_) => self.wrong += 1,
            None => self.unknown += 1,
        }
    }
}

/// A world as the agents' start orders describe it.
#[derive(Clone, Debug, Default)]
pub struct StartedWorld {
    /// The number of ranks.
    pub size: u32,
    /// The number of nodes.
    pub nodes: u32,
    leader: (String, u16),
    world: World,
}

/// A step that every node is known to hold.
#[derive(Clone, Copy, Debug)]
pub struct Committed {
    pub generation: Generation,
    pub step: Step,
    pub world_size: u32,
}

/// What the oracle remembers.
#[derive(Debug, Default)]
pub struct Oracle {
    /// Worlds by generation, as far as agents have received start orders for them.
    pub worlds: BTreeMap<Generation, StartedWorld>,
    /// Worlds formed anew without using up a restart of the budget.
    pub regrouped: u64,
    /// Starts before this run of the job. Starting the job again gives it a new budget.
    pub of_earlier_runs: u64,
    growing: bool,
    /// Generations whose workers were started anywhere.
    pub started: BTreeSet<Generation>,
    newest_on_host: BTreeMap<usize, Generation>,
    offers: BTreeMap<(Generation, Rank), Vec<Offer>>,
    restored: BTreeMap<Generation, Option<Step>>,
    /// The ranks whose shards agents have written last, by what they are of.
    pub last_steps: BTreeMap<(Generation, Step), BTreeSet<Rank>>,
    /// The number of ranks that were ordered to restore, by tier.
    pub tiers: BTreeMap<Tier, u64>,
    newest_stored: Generation,
    /// The newest step that all nodes hold, as far as any node was told.
    pub committed: Option<Committed>,
    /// What held that step and on which host, minus what faults have removed since. Nothing else
    /// may remove it.
    pub kept: Vec<(usize, Kept)>,
    /// Nodes whose machine has failed at some time.
    pub ailed: BTreeSet<NodeId>,
    /// Nodes whose machine was slowed down at some time.
    pub slowed: BTreeSet<NodeId>,
    reported: BTreeMap<(Generation, Rank), Step>,
    /// Whether the blamed machines were at fault.
    pub blames: Blames,
    /// Completed checks of the nodes, and nodes that they found faulty.
    pub checks: (u64, u64),
    /// Steps that a rank could not read.
    pub unreadable: BTreeSet<Step>,
    /// All violations found.
    pub violations: Vec<Violation>,
}

impl Oracle {
    fn violation(&mut self, invariant: InvariantId, at: u64, what: String) {
        self.violations.push(Violation { invariant, at, what });
    }

    /// A coordinator has recorded a fact.
    pub fn recorded(&mut self, now: u64, fact: &Fact) {
        self.blames.recorded(fact);
        match fact {
            Fact::Growing { .. } => {
                self.regrouped += 1;
                self.growing = true;
            }
            Fact::LeftOut { .. } => self.regrouped += 1,
            Fact::Ended { .. } => (self.of_earlier_runs, self.regrouped) = (self.started.len() as u64, 0),
            Fact::Checked { found, .. } => {
                self.checks.0 += 1;
                self.checks.1 += found.faulty.len() as u64;
            }
            Fact::Diverged { step, ranks, .. } => {
                let what = format!("ranks {ranks:?} were said to hold something else at step {step}, and nobody does");
                self.violation(InvariantId::OnlyTheOddAreNamed, now, what);
            }
            Fact::SlowRank { rank, node, slow: true, .. } if !self.slowed.contains(node) => {
                let what = format!("rank {rank} on node {node} is called slow, and nothing slows it down");
                self.violation(InvariantId::OnlyTheOddAreNamed, now, what);
            }
            Fact::CaughtUp { generation, step, incident } => self.caught_up(now, *generation, *step, *incident),
            Fact::Excluded { node, verdict, .. } if verdict.is_of_machine() && !self.ailed.contains(node) => {
                let what = format!("node {node} is left out for {}, and nothing is wrong with it", verdict.class);
                self.violation(InvariantId::OnlyTheBrokenAreLeftOut, now, what);
            }
            Fact::RestoreFailed { .. } => self.regrouped += 1,
            Fact::IncidentOpened { .. } | Fact::NodeLost { .. } | Fact::CoordinatorStarted { .. } => {
                self.growing = false;
            }
            Fact::Restored { generation, steps_lost, .. } if std::mem::take(&mut self.growing) && *steps_lost > 0 => {
                let what = format!("generation {generation} grew and lost {steps_lost} steps");
                self.violation(InvariantId::GrowingLosesNothing, now, what);
            }
            _ => {}
        }
    }

    /// A rank has reported its step.
    pub fn reported(&mut self, generation: Generation, rank: Rank, step: Step) {
        self.reported.insert((generation, rank), step);
    }

    fn caught_up(&mut self, now: u64, generation: Generation, step: Step, incident: u64) {
        let size = self.worlds.get(&generation).map_or(0, |w| w.size);
        let there = |rank: &Rank| self.reported.get(&(generation, *rank)).is_some_and(|at| *at >= step);
        if let Some(rank) = (0..size).map(Rank).find(|rank| !there(rank)) {
            let what = format!("incident {incident} is made good at step {step}, and rank {rank} is not there");
            self.violation(InvariantId::CaughtUpTogether, now, what);
        }
    }

    /// The store has accepted a record with this generation.
    pub fn stored(&mut self, now: u64, generation: Generation) {
        if generation < self.newest_stored {
            let what = format!("store went from {} to {generation}", self.newest_stored);
            self.violation(InvariantId::GenerationNeverDecreases, now, what);
        }
        self.newest_stored = self.newest_stored.max(generation);
    }

    /// A host starts workers.
    pub fn spawned(&mut self, now: u64, host: usize, generation: Generation, place: &Place, budget: u64) {
        let newest = self.newest_on_host.get(&host).copied().unwrap_or_default();
        if generation <= newest {
            let what = format!("host {host} started generation {generation} after {newest}");
            self.violation(InvariantId::GenerationNeverDecreases, now, what);
        }
        self.newest_on_host.insert(host, generation.max(newest));
        if generation > self.newest_stored {
            let what = format!("generation {generation} started, store holds {}", self.newest_stored);
            self.violation(InvariantId::PersistBeforePromise, now, what);
        }
        let leader = (place.leader_host.clone(), place.leader_port);
        let seen = self.worlds.entry(generation).or_insert_with(|| StartedWorld {
            size: place.world_size,
            nodes: place.group_world_size,
            leader: leader.clone(),
            world: World::default(),
        });
        let same = seen.size == place.world_size && seen.nodes == place.group_world_size && seen.leader == leader;
        seen.world.slots.retain(|s| *s != place.slot);
        seen.world.slots.push(place.slot.clone());
        seen.world.slots.sort_by_key(|s| s.first_rank);
        let machines: BTreeSet<_> = seen.world.slots.iter().map(|s| &s.host).collect();
        let ranks: Vec<_> = seen.world.slots.iter().map(|s| (s.first_rank.0, s.first_rank.0 + s.workers)).collect();
        let apart = ranks.windows(2).all(|w| w[0].1 <= w[1].0) && ranks.iter().all(|(_, end)| *end <= seen.size);
        let whole = seen.world.slots.len() < seen.nodes as usize || rank_once(&seen.world);
        if !same || !apart || !whole || machines.len() != seen.world.slots.len() {
            let what = format!("generation {generation}: {place:?} beside {:?}", seen.world.slots);
            self.violation(InvariantId::RankOnce, now, what);
        }
        self.started.insert(generation);
        let starts = self.started.len() as u64 - self.of_earlier_runs;
        if starts > budget + 1 + self.regrouped {
            let what = format!("{starts} starts with a budget of {budget} restarts");
            self.violation(InvariantId::BudgetKept, now, what);
        }
    }

    /// A fault removes something from a machine's memory.
    pub fn gone(&mut self, host: usize, what: impl Fn(&Kept) -> bool) {
        self.kept.retain(|(h, kept)| *h != host || !what(kept));
    }

    /// A rank has offered what it can restore.
    pub fn offered(&mut self, generation: Generation, rank: Rank, offers: Vec<Offer>) {
        self.offers.insert((generation, rank), offers);
    }

    /// A rank has been ordered what to restore.
    pub fn restored(&mut self, now: u64, generation: Generation, rank: Rank, step: Option<Step>, tier: Option<Tier>) {
        let first = *self.restored.entry(generation).or_insert(step);
        tier.into_iter().for_each(|t| *self.tiers.entry(t).or_default() += 1);
        let held = matches!(tier, Some(Tier::Peer | Tier::Parity))
            || self.offers.get(&(generation, rank)).is_some_and(|o| o.iter().any(|o| Some(o.step) == step));
        let of_all = self.offers.range((generation, Rank(0))..=(generation, Rank(u32::MAX)));
        if step.is_none() && of_all.flat_map(|(_, o)| o).any(|o| o.tier == Tier::Durable) {
            let what = format!("generation {generation} rank {rank}: a fresh start beside durable checkpoints");
            self.violation(InvariantId::OneRestoreStep, now, what);
        }
        if first != step || (step.is_some() && !held) {
            let what = format!("generation {generation} rank {rank}: told {step:?}, first {first:?}, offered {held}");
            self.violation(InvariantId::OneRestoreStep, now, what);
        }
    }

    /// Returns true if a capture of this step by an earlier generation belongs to the past from
    /// which generation `now` continues.
    pub fn is_of_this_past(&self, captured: Generation, step: Step, now: Generation) -> bool {
        let later = self.restored.iter().filter(|(g, _)| **g > captured && **g < now);
        later.map(|(_, restored)| restored.unwrap_or_default()).all(|restored| step <= restored)
    }

    /// A machine takes its id over from another one, so its own history no longer counts.
    pub fn new_machine(&mut self, host: usize) {
        self.newest_on_host.remove(&host);
    }

    /// Checks on all hosts who owns the workers, and which generations can train. This follows each
    /// event, so it looks without building sets where nothing is wrong.
    pub fn look(&mut self, now: u64, hosts: &[Host]) {
        let mut able: Vec<(Generation, u32)> = Vec::new();
        for (index, host) in hosts.iter().enumerate() {
            let mut alive = host.crews.iter().filter(|c| c.alive()).map(|c| c.generation);
            if let Some(first) = alive.next() {
                if alive.any(|other| other != first) {
                    let all: BTreeSet<_> = host.crews.iter().filter(|c| c.alive()).map(|c| c.generation).collect();
                    self.violation(InvariantId::OneOwner, now, format!("host {index} runs {all:?}"));
                }
                if !host.agent_or_guard_alive() {
                    self.violation(InvariantId::OneOwner, now, format!("host {index}: workers without an owner"));
                }
            }
            for crew in host.crews.iter().filter(|c| !host.frozen && c.able_to_train()) {
                match able.iter_mut().find(|(generation, _)| *generation == crew.generation) {
                    Some((_, workers)) => *workers += crew.workers,
                    None => able.push((crew.generation, crew.workers)),
                }
            }
        }
        able.retain(|(generation, workers)| self.worlds.get(generation).is_some_and(|w| w.size == *workers));
        if able.len() > 1 {
            let training: BTreeSet<_> = able.into_iter().map(|(generation, _)| generation).collect();
            self.violation(InvariantId::OneGenerationTrains, now, format!("generations {training:?} train"));
        }
    }
}
