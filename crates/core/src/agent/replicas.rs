//! This node's part in replication: the sealed steps, the step that is being sent, and the reports
//! about them to the coordinator.

use super::Agent;
use super::command::CrewCommand;
use crate::id::{Generation, Rank, Step};
use crate::message::{CrewReport, Redundancy, Replicated, Replication, Round, Sealed};
use std::collections::BTreeMap;

/// State of one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Replicas {
    /// Newest sealed step by local rank.
    sealed: BTreeMap<u32, Step>,
    /// The redundancy to keep in addition to the workers' own shards.
    wish: Redundancy,
    plan: Replication,
    /// The round that comes next; `None` until the coordinator has named a step.
    next: Option<Round>,
    /// Newest step that all nodes have with its replicas.
    committed: Option<Step>,
    /// The step that this generation began with; `None`: a fresh start.
    restored: Option<Step>,
    /// Whether a step is being sent.
    busy: bool,
    /// Whether the step being sent was named on an earlier connection, perhaps by an earlier life
    /// of the coordinator.
    stale: bool,
    /// Whether this node has reported to the coordinator that it takes part.
    announced: bool,
}

impl Replicas {
    /// Returns the newest step that all workers have sealed.
    fn newest(&self, workers: u32) -> Option<Step> {
        if self.sealed.len() < workers as usize { None } else { self.sealed.values().min().copied() }
    }
}

impl Agent {
    /// Records that a worker has sealed a step, and replicates it if it is due.
    pub(super) fn worker_sealed(&mut self, local_rank: u32, step: Step, wish: Redundancy) {
        let Some(crew) = self.crew.as_mut().filter(|c| !c.killing) else { return };
        let workers = crew.slot.workers;
        let replicas = &mut crew.replicas;
        replicas.sealed.insert(local_rank, step);
        replicas.wish = wish;
        if !replicas.announced
            && let Some(step) = replicas.newest(workers)
        {
            self.ask_for_a_step(step, None);
        }
        self.replicate();
    }

    /// Asks the coordinator to name a step. `instead` is the round of a step that cannot be
    /// replicated.
    fn ask_for_a_step(&mut self, step: Step, instead: Option<u64>) {
        let Some(crew) = self.crew.as_mut() else { return };
        let Replicas { wish, committed, .. } = &crew.replicas;
        let report = CrewReport::Sealed(Sealed { step, wish: *wish, instead, committed: *committed });
        crew.replicas.announced = true;
        self.report(report);
    }

    /// Asks for a step again after a new connection, perhaps to a new life of the coordinator.
    pub(super) fn take_part_again(&mut self) {
        if let Some(crew) = self.crew.as_mut() {
            crew.replicas.stale = crew.replicas.busy;
        }
        let announced = self.crew.as_ref().filter(|c| c.replicas.announced && !c.killing);
        if let Some(step) = announced.and_then(|c| c.replicas.newest(c.slot.workers)) {
            self.ask_for_a_step(step, None);
        }
    }

    /// Replicates the step that the coordinator has named, or notes it for later.
    pub(super) fn replicate_next(&mut self, round: Round) {
        let Some(crew) = self.crew.as_mut() else { return };
        crew.replicas.next = Some(round);
        self.replicate();
    }

    /// Takes over a new plan and the step that all nodes have: the order that named it first may
    /// have been lost with a connection, and a step that all nodes have must not be overwritten.
    pub(super) fn replicate_with(&mut self, plan: Replication, round: Round, committed: Option<Step>) {
        let Some(crew) = self.crew.as_mut() else { return };
        crew.replicas.plan = plan;
        let generation = crew.generation;
        if let Some(step) = committed.filter(|step| crew.replicas.committed.is_none_or(|own| own < *step)) {
            self.held_by_all(generation, step);
            self.committed(step);
        }
        self.replicate_next(round);
    }

    /// Records the step that all ranks continue from.
    pub(super) fn goes_on_from(&mut self, step: Option<Step>) {
        if let Some(crew) = self.crew.as_mut() {
            crew.replicas.restored = step;
        }
    }

    /// Records that all nodes have a step. Workers end sooner on one node than on another: if the
    /// job gives up, all nodes must persist the same step.
    pub(super) fn held_by_all(&mut self, generation: Generation, step: Step) {
        if self.latest == Some(generation) {
            self.command(generation, CrewCommand::HeldByAll(step));
        }
    }

    /// Records that all nodes have a step, so that older ones may be dropped.
    pub(super) fn committed(&mut self, step: Step) {
        let Some(crew) = self.crew.as_mut() else { return };
        crew.replicas.committed = Some(step);
        let (generation, plan) = (crew.generation, &crew.replicas.plan);
        let (keeps, keeps_parity) = (plan.keeps.clone(), plan.keeps_parity.clone());
        self.command(generation, CrewCommand::Committed { step, keeps, keeps_parity });
    }

    fn replicate(&mut self) {
        let forgotten = crate::is_planted!(self, BaseForgotten);
        let Some(crew) = self.crew.as_mut().filter(|c| !c.killing) else { return };
        let newest = crew.replicas.newest(crew.slot.workers);
        let due = crew.replicas.next.filter(|round| newest.is_some_and(|n| n >= round.next));
        if let Some(round) = due.filter(|_| !crew.replicas.busy) {
            crew.replicas.busy = true;
            crew.replicas.next = None;
            let base = crew.replicas.committed.or(crew.replicas.restored);
            let base = if forgotten { None } else { base };
            let (generation, plan) = (crew.generation, crew.replicas.plan.clone());
            self.command(generation, CrewCommand::Replicate { plan, round, base });
        }
    }

    /// Asks for the newest sealed step if a worker waits for its copies, but a later step was
    /// named.
    pub(super) fn awaits_copies(&mut self) {
        let Some(crew) = self.crew.as_ref().filter(|c| !c.killing) else { return };
        let replicas = &crew.replicas;
        let sealed = replicas.newest(crew.slot.workers);
        let beyond = sealed.zip(replicas.next).filter(|(sealed, round)| round.next > *sealed);
        if let Some((step, round)) = beyond.filter(|(s, _)| !replicas.busy && replicas.committed.is_none_or(|c| c < *s))
        {
            self.ask_for_a_step(step, Some(round.round));
        }
    }

    /// Reports the end of sending. `step` is the step that now has its replicas; `None`: it failed.
    pub(super) fn replica_done(&mut self, step: Option<Step>, round: u64, digests: &[(u32, u64)]) {
        let Some(crew) = self.crew.as_mut() else { return };
        crew.replicas.busy = false;
        let stale = std::mem::take(&mut crew.replicas.stale);
        let Some(sealed) = crew.replicas.newest(crew.slot.workers) else { return };
        let first = crew.slot.first_rank.0;
        match step {
            // The new connection has already asked for another step.
            _ if stale => {}
            Some(step) => {
                let digests = digests.iter().map(|(local, digest)| (Rank(first + local), *digest)).collect();
                self.report(CrewReport::Replicated(Replicated { step, sealed, digests, round }));
            }
            None => self.ask_for_a_step(sealed, Some(round)),
        }
        self.replicate();
    }
}
