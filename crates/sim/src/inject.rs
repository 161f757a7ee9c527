//! Carries out one fault.

use crate::fault::Fault;
use crate::host::Host;
use crate::oracle::Kept;
use crate::world::{Happening, World};
use everstep_core::coordinator::command::Precondition;
use std::collections::BTreeSet;

impl World {
    /// Injects `fault` on something suitable; when there is nothing, another kind instead. Counts what took effect.
    pub(crate) fn inject(&mut self, fault: Fault) {
        let mut next = fault;
        for _ in 0..8 {
            if self.try_inject(next).is_some() {
                *self.counts.entry(next).or_default() += 1;
                return;
            }
            next = *self.rng.pick(Fault::ALL).unwrap_or(&fault);
        }
    }

    pub(crate) fn any_host(&mut self, suits: impl Fn(&Host) -> bool) -> Option<usize> {
        let suitable: Vec<usize> = (0..self.hosts.len()).filter(|i| suits(&self.hosts[*i])).collect();
        self.rng.pick(&suitable).copied()
    }

    pub(crate) fn running(&mut self) -> Option<usize> {
        self.any_host(|h| h.up && !h.frozen && h.agent.is_some() && h.crews.iter().any(crate::host::Crew::alive))
    }

    pub(crate) fn attached(&mut self) -> Option<usize> {
        self.any_host(|h| h.up && !h.frozen && h.agent.is_some() && h.session.is_some())
    }

    fn leader(&mut self) -> Option<usize> {
        (0..self.processes.len()).rev().find(|i| self.processes[*i].alive)
    }

    fn try_inject(&mut self, fault: Fault) -> Option<()> {
        // Everything heals before the quiet time begins.
        let span = self.rng.range(200, 15_000);
        let until = (self.now + span).min(self.quiet_at);
        match fault {
            Fault::WorkerCrash => {
                let host = self.running()?;
                let local = u32::from(self.rng.percent(50));
                self.worker_dies(host, local);
            }
            Fault::CrashLoop => {
                let host = self.running()?;
                self.hosts[host].crash_loop = 2;
                self.worker_dies(host, 0);
            }
            Fault::WorkerErrs | Fault::TwoWorkersErr => {
                let host = self.running()?;
                self.worker_errs_soon(host, 1);
                if fault == Fault::TwoWorkersErr {
                    let other = self.running()?;
                    self.worker_errs_soon(other, 300);
                }
            }
            Fault::RecoveryFails => {
                let host = self.running()?;
                self.worker_errs_soon(host, 1);
                let other = self.running()?;
                self.worker_errs_soon(other, 8000);
            }
            Fault::GpuFails => self.gpu_fails()?,
            Fault::EccStorm => {
                let host = self.attached()?;
                self.at(1, Happening::Signs { host, line: crate::ailing::ECC, times: 200 });
            }
            Fault::LinkFlaps => {
                let host = self.attached()?;
                self.at(1, Happening::Signs { host, line: crate::ailing::LINK, times: 12 });
            }
            Fault::WorkerHang => {
                let host = self.running()?;
                let h = &mut self.hosts[host];
                let crew = h.crews.last_mut()?;
                crew.hung.push(1);
                self.oracle.blames.cause(crew.generation, &h.node);
            }
            Fault::AgentCrash => {
                let host = self.attached()?;
                self.crash_agent(host);
                let delay = self.rng.range(200, 10_000);
                self.at(delay, Happening::StartAgent { host });
            }
            Fault::NodeCrash => {
                let host = self.attached()?;
                self.lose_node(host);
            }
            Fault::TwoNodesCrash => {
                let first = self.attached()?;
                let second = self.any_host(|h| h.up && !h.frozen && h.agent.is_some() && h.session.is_some())?;
                for host in BTreeSet::from([first, second]) {
                    self.lose_node(host);
                }
            }
            Fault::ReplicasLost => {
                let host = self.any_host(|h| !h.replicas.is_empty() || !h.parity.is_empty())?;
                self.hosts[host].replicas.clear();
                self.hosts[host].parity.clear();
                self.oracle.gone(host, Kept::for_others);
            }
            Fault::ReplicasStale => {
                let host = self.any_host(|h| !h.replicas.is_empty() || !h.parity.is_empty())?;
                let h = &mut self.hosts[host];
                let copies = h.replicas.iter().map(|m| (m.of.generation, m.of.step));
                let newest = copies.chain(h.parity.iter().map(|p| (p.of.generation, p.of.step))).max()?;
                h.replicas.retain(|m| (m.of.generation, m.of.step) < newest);
                h.parity.retain(|p| (p.of.generation, p.of.step) < newest);
                self.oracle.gone(host, Kept::for_others);
            }
            Fault::ReplicasPartial => {
                let host = self.running()?;
                if self.rng.percent(50) {
                    self.hosts[host].cut_next = 1;
                    self.worker_dies_soon(host);
                } else {
                    // Two steps in a row; then the machine is lost, so that what those before them have left counts.
                    (self.hosts[host].cut_next, self.hosts[host].doomed) = (2, true);
                }
            }
            Fault::SlotRots => {
                let host = self.any_host(|h| h.all().next().is_some())?;
                let shards = self.hosts[host].all().count();
                let slots = (shards + self.hosts[host].parity.len()) as u64;
                let which = usize::try_from(self.rng.range(0, slots)).unwrap_or(0);
                let h = &mut self.hosts[host];
                if which < shards {
                    let slot = h.memory.values_mut().flatten().chain(&mut h.replicas).nth(which)?;
                    slot.rotten = true;
                    let of = slot.of;
                    self.oracle.gone(host, |kept| kept.shard() == Some(of));
                } else {
                    let slot = h.parity.get_mut(which - shards)?;
                    slot.rotten = true;
                    let of = slot.of.clone();
                    self.oracle.gone(host, |kept| kept.parity() == Some(&of));
                }
                self.worker_dies_soon(host);
            }
            Fault::NodeGone => {
                let gone = self.hosts.iter().filter(|h| !h.up && h.life > 0).count();
                if gone + self.spec.nodes_max as usize >= self.options.nodes {
                    return None;
                }
                let host = self.attached()?;
                self.crash_node(host);
            }
            Fault::NodeReplaced => {
                let spare = self.any_host(|h| !h.up && h.life == 0)?;
                let host = self.attached()?;
                self.crash_node(host);
                self.take_over(spare, host);
            }
            Fault::OldIncarnationReturns => {
                let spare = self.any_host(|h| !h.up && h.life == 0)?;
                let host = self.attached()?;
                self.hosts[host].frozen = true;
                self.oracle.blames.cut(&self.hosts[host].node);
                let frozen_for = self.rng.range(3000, 20_000);
                self.at(frozen_for, Happening::Thaw { host });
                self.links[host].to_blocked_until = self.now + frozen_for;
                self.links[host].from_blocked_until = self.now + frozen_for;
                let session = self.hosts[host].session?;
                let silence = self.silence();
                self.at(silence, Happening::CoordinatorSeesEnd { session });
                self.at(frozen_for + 5, Happening::AgentSeesEnd { session });
                self.hosts[host].restart = false;
                self.take_over(spare, host);
            }
            Fault::DuplicateNodeId => {
                let host = self.attached()?;
                let spare = self.any_host(|h| !h.up && h.life == 0)?;
                self.hosts[spare].node = self.hosts[host].node.clone();
                self.hosts[spare].up = true;
                self.hosts[spare].restart = false;
                self.at(1, Happening::StartAgent { host: spare });
            }
            Fault::SlowNode => {
                let host = self.attached()?;
                self.oracle.blames.cut(&self.hosts[host].node);
                self.hosts[host].slow_until = until;
                self.links[host].slow = (400, until);
            }
            Fault::Drop => {
                let host = self.running()?;
                self.oracle.blames.cut(&self.hosts[host].node);
                self.links[host].drop_next = true;
                self.worker_dies(host, 0);
            }
            Fault::Delay => {
                let host = self.attached()?;
                self.oracle.blames.cut(&self.hosts[host].node);
                self.links[host].slow = (self.rng.range(100, 1500), until);
            }
            Fault::Duplicate => {
                let host = self.running()?;
                self.links[host].duplicate_next = true;
                self.worker_dies(host, 1);
                for link in &mut self.links {
                    link.duplicate_order = true;
                }
            }
            Fault::Reorder => {
                let host = self.running()?;
                self.links[host].reorder_next = true;
                self.worker_dies(host, 1);
            }
            Fault::Reset => {
                let host = self.attached()?;
                let session = self.hosts[host].session?;
                self.agent_sees_end(session);
            }
            Fault::PartitionToCoordinator => self.partition(until, true, false)?,
            Fault::PartitionFromCoordinator => self.partition(until, false, true)?,
            Fault::PartitionFull => self.partition(until, true, true)?,
            Fault::CoordinatorCrash => {
                let index = self.leader()?;
                self.kill_coordinator(index);
            }
            Fault::CoordinatorCrashBeforePersist | Fault::CoordinatorCrashAfterPersist => {
                let index = self.leader()?;
                self.processes[index].crash_at_persist = Some(fault == Fault::CoordinatorCrashBeforePersist);
                // Something must be written for it to strike.
                let host = self.running()?;
                self.worker_dies(host, 0);
            }
            Fault::TwoCoordinators => {
                self.start_coordinator(true);
                // Half of the agents find the new one.
                let sessions: Vec<_> = self.hosts.iter().filter_map(|h| h.session).collect();
                for session in sessions {
                    if self.rng.percent(50) {
                        self.agent_sees_end(session);
                    }
                }
            }
            Fault::StoreConflict => {
                let (key, (value, version)) = self.store.entries.iter().find(|(k, _)| k.starts_with("job/"))?;
                let (key, value, version) = (key.clone(), value.clone(), *version);
                self.store.put(self.now, &key, value, Precondition::Version(version)).ok()?;
                let host = self.running()?;
                self.worker_dies(host, 0);
            }
            Fault::StoreUnavailable => {
                self.store.unavailable_until = until;
                if let Some(host) = self.running() {
                    self.worker_dies(host, 0);
                }
            }
            Fault::ClockJump => {
                let index = self.leader()?;
                let jump = i64::try_from(self.rng.range(0, 7_200_000)).ok()? - 3_600_000;
                self.processes[index].clock_offset += jump;
                // A sleeping timer is re-armed by the next event at the latest.
                self.processes[index].wake_at = Some(self.now + 1);
                self.at(1, Happening::CoordinatorTick { index });
            }
        }
        Some(())
    }

    /// Something must be restored for the fault to show, after a while.
    fn worker_dies_soon(&mut self, host: usize) {
        let delay = self.rng.range(500, 5000);
        self.at(delay, Happening::WorkerDies { host });
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

    /// A machine is lost with its memory, and comes back empty after a while.
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
        h.replicas.clear();
        h.parity.clear();
        h.up = false;
        self.oracle.gone(host, |_| true);
    }

    fn partition(&mut self, until: u64, to: bool, from: bool) -> Option<()> {
        let host = self.attached()?;
        self.oracle.blames.cut(&self.hosts[host].node);
        let link = &mut self.links[host];
        if to {
            link.to_blocked_until = until;
        }
        if from {
            link.from_blocked_until = until;
        }
        let session = self.hosts[host].session?;
        let silence = self.silence();
        if until > self.now + silence {
            if to {
                self.at(silence, Happening::CoordinatorSeesEnd { session });
            }
            if from {
                self.at(silence, Happening::AgentSeesEnd { session });
            }
        }
        Some(())
    }
}
