//! Events on machines: agents, workers, and training, one second at a time.

use crate::host::Crew;
use crate::oracle::Violation;
use crate::world::{Happening, World};
use everstep_core::agent::command::{Command as AgentCommand, CrewCommand};
use everstep_core::agent::event::{CrewEvent, Event as AgentEvent};
use everstep_core::agent::observation::{Interpreter, Observation, Process};
use everstep_core::agent::{Agent, Config};
use everstep_core::coordinator::event::Event;
use everstep_core::id::{Generation, Incarnation, Rank, Session, Step};
use everstep_core::invariant::InvariantId;
use everstep_core::message::{
    ExitReason, Holdings, Offers, Publish, Purpose, RankOffers, Restore, ShardFile, ShardWritten, Source, Start, Tier,
    Unreadable,
};
use everstep_core::progress::RankProgress;
use everstep_core::severity::Table;
use everstep_core::time::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

impl World {
    pub(crate) fn start_agent(&mut self, host: usize) {
        let h = &mut self.hosts[host];
        if !h.up || h.frozen || h.agent.is_some() || h.exited.is_some() {
            return;
        }
        if h.guard_ending || h.crews.iter().any(Crew::alive) {
            // The guard of the previous life still has the node lock.
            return self.at(200, Happening::StartAgent { host });
        }
        h.life += 1;
        h.next_port += 1;
        let config = Config {
            replica_port: u16::try_from(1000 + host).unwrap_or(0),
            domain: String::new(),
            role: String::new(),
            held: h.all().map(|m| m.of.generation).max().unwrap_or_default(),
            node: h.node.clone(),
            incarnation: Incarnation(self.now * 100 + host as u64 + 1),
            spec: self.spec.clone(),
            host: format!("host{host}"),
            workers: 2,
            store_port: h.next_port,
            named: true,
            shutdown_grace: Duration::from_secs(30),
            stop_signals: Vec::new(),
            table: Table::built_in().clone(),
        };
        #[allow(unused_mut)]
        let mut agent = Agent::new(config, Time(self.now));
        #[cfg(feature = "planted")]
        {
            agent.planted = self.options.planted;
        }
        h.agent = Some(agent);
        *h.last_mut() = <_>::default();
        #[cfg(feature = "planted")]
        {
            h.last_mut().step.planted = self.options.planted;
        }
        h.session = None;
        let life = h.life;
        self.at(5, Happening::Connect { host, life });
    }

    /// Hands an event of the workers of one generation to the host's agent.
    pub(crate) fn crew_event(&mut self, host: usize, generation: Generation, event: CrewEvent) {
        self.agent(host, AgentEvent::Crew(generation, event));
    }

    pub(crate) fn agent(&mut self, host: usize, event: AgentEvent) {
        let now = Time(self.now);
        let Some(agent) = self.hosts[host].agent.as_mut() else { return };
        agent.handle(now, event);
        let mut commands = Vec::new();
        while let Some(command) = agent.poll() {
            commands.push(command);
        }
        let deadline = agent.deadline();
        if !agent.accounts_are_whole(now) {
            let what = format!("{:?}", agent.accounts(now).last());
            self.oracle.violations.push(Violation { invariant: InvariantId::TimeIsWhole, at: self.now, what });
        }
        let life = self.hosts[host].life;
        for command in commands {
            self.execute(host, command);
        }
        let at = deadline.map(|at| self.wakes(at.0));
        if std::mem::replace(&mut self.hosts[host].wake_at, at) != at
            && let Some(at) = at
        {
            self.at(at - self.now, Happening::AgentTick { host, life });
        }
    }

    pub(crate) fn execute(&mut self, host: usize, command: AgentCommand) {
        match command {
            AgentCommand::Send(report) => {
                let Some(session) = self.hosts[host].session else { return };
                if std::mem::take(&mut self.network.links[host].duplicate_next) {
                    let report = Some(report.clone());
                    self.transmit(session, true, |_| Happening::ToCoordinator { session, hello: None, report });
                }
                let report = Some(report);
                self.transmit(session, true, |_| Happening::ToCoordinator { session, hello: None, report });
            }
            AgentCommand::Crew(generation, command) => self.execute_for_crew(host, generation, command),
            AgentCommand::Check(check) => self.take_part(host, &check),
            AgentCommand::Forward { .. } | AgentCommand::Warm | AgentCommand::Say { .. } => {}
            AgentCommand::Exit { reason, first_error, .. } => {
                self.check_first_error(host, first_error);
                self.agent_exits(host, reason);
            }
        }
    }

    fn execute_for_crew(&mut self, host: usize, generation: Generation, command: CrewCommand) {
        let slow = if self.now < self.hosts[host].faults.slow_until { 8 } else { 1 };
        match command {
            CrewCommand::Spawn(start) => self.spawn(host, generation, start, slow),
            CrewCommand::Kill { grace } => {
                let grace = u64::try_from(grace.as_millis()).unwrap_or(0);
                let delay = self.rng.range(1, 40 + grace) * slow;
                self.at(delay, Happening::Killed { host, generation });
            }
            CrewCommand::Restore(Restore { step: None, found: true, .. }) => {
                self.refuse_fresh_start(host, generation);
            }
            CrewCommand::Restore(Restore { step, sources, persist, .. }) => {
                self.goes_on_from(host, generation, step, persist);
                self.restore(host, generation, step, &sources);
            }
            CrewCommand::Replicate { plan, round, base } => {
                let sending = crate::world::Sending { plan, base, round: round.round, patience: 5000 };
                self.replicate(host, generation, round.next, sending);
            }
            CrewCommand::Committed { step, keeps, keeps_parity } => {
                self.committed(host, generation, step, &keeps, &keeps_parity);
            }
            CrewCommand::HoldAt(step) => {
                if let Some(crew) = self.hosts[host].crews.last_mut() {
                    crew.hold_at = step.map(|s| s.0);
                }
            }
            CrewCommand::Publish(Publish { step, .. }) => {
                self.durable = self.durable.max(Some(step.0));
                self.hosts[host].last_mut().step.durable(step);
                self.crew_event(host, generation, CrewEvent::Published(step));
            }
            CrewCommand::StopAt(_)
            | CrewCommand::PersistAt(_)
            | CrewCommand::SnapshotEvery(_)
            | CrewCommand::Stacks => {}
            CrewCommand::HeldByAll(step) => self.held_by_all(host, generation, step),
            CrewCommand::Durable(step) => self.hosts[host].last_mut().step.durable(step),
        }
    }

    /// Starts the workers of a generation, `slow` times as slowly as usual.
    fn spawn(&mut self, host: usize, generation: Generation, start: Start, slow: u64) {
        let Start { place, restarts, .. } = start;
        self.oracle.spawned(self.now, host, generation, &place, self.budget);
        self.begins(host, generation, &place);
        let slot = place.slot;
        let ready_at = self.now + self.rng.range(1500, 4000) * slow;
        let living = (0..slot.workers).map(|l| (l, true)).collect();
        let workers = slot.workers;
        self.hosts[host].copies.floor = generation;
        self.hosts[host].memory.values_mut().flatten().for_each(|m| m.pinned = false);
        self.hosts[host].crews.push(Crew {
            generation,
            restarts,
            slot,
            workers,
            living,
            hung: Vec::new(),
            stuck: false,
            ready_at,
            offered: false,
            training: false,
            step: 0,
            restored: 0,
            beats: 0,
            hold_at: None,
        });
        if self.hosts[host].faults.gpu.is_some() {
            let delay = self.rng.range(500, 6000);
            self.at(delay, Happening::Ails { host, generation });
        }
        if self.hosts[host].faults.crash_loop > 0 {
            self.hosts[host].faults.crash_loop -= 1;
            self.worker_dies(host, 0);
        }
    }

    /// Ends an agent that has nothing more to do. A scheduler may start it again.
    fn agent_exits(&mut self, host: usize, reason: ExitReason) {
        let ExitReason { code, why } = reason;
        if code != 0 {
            self.saves_last(host);
        }
        let h = &mut self.hosts[host];
        h.agent = None;
        let session = h.session.take();
        let again = code != 0 && h.restart && matches!(code, 69 | 75 | 78);
        if again {
            let delay = self.rng.range(1000, 20_000);
            self.at(delay, Happening::StartAgent { host });
        } else {
            self.hosts[host].exited = Some((code, why));
        }
        if let Some(session) = session {
            self.close_agent_end(session);
        }
    }

    /// Closes the agent's end of a session because its process has ended.
    pub(crate) fn close_agent_end(&mut self, session: Session) {
        let Some(c) = self.network.connections.get_mut(&session) else { return };
        c.agent_end = false;
        let host = c.host;
        self.notices_end(host, session, 30);
    }

    pub(crate) fn killed(&mut self, host: usize, generation: Generation) {
        if self.hosts[host].agent.is_none() {
            return;
        }
        self.kill_workers(host, generation);
        let h = &mut self.hosts[host];
        h.crews.retain(|c| c.generation != generation);
        h.next_port += 1;
        let store_port = h.next_port;
        self.crew_event(host, generation, CrewEvent::WorkersGone { store_port });
    }

    /// There are checkpoints, and none that all ranks can read: the workers fail.
    fn refuse_fresh_start(&mut self, host: usize, generation: Generation) {
        let Some(crew) = self.hosts[host].crews.last().filter(|c| c.generation == generation && !c.training) else {
            return;
        };
        for local in 0..crew.workers {
            self.worker_errs(host, local, crate::ailing::NO_COMMON_STEP);
        }
    }

    pub(crate) fn restore(&mut self, host: usize, generation: Generation, step: Option<Step>, sources: &[Source]) {
        let now = self.now;
        let h = &mut self.hosts[host];
        let Some(crew) = h.crews.iter_mut().find(|c| c.generation == generation) else { return };
        if crew.training {
            return;
        }
        crew.training = true;
        crew.step = step.map_or(0, |s| s.0);
        crew.restored = crew.step;
        let (first, workers) = (crew.slot.first_rank.0, crew.workers);
        let size = self.oracle.worlds.get(&generation).map_or(0, |w| w.size);
        let stands_in = (0..).zip(sources).any(|(local, s)| {
            s.tier == Tier::Peer
                && s.copies.as_ref().is_some_and(|c| c.of.rank != Rank(first + local) || c.of.world_size != size)
        });
        if let Some(step) = step.filter(|_| stands_in) {
            self.check_own(generation, step);
        }
        for local in 0..workers {
            let rank = Rank(first + local);
            let source = sources.get(local as usize);
            self.oracle.restored(now, generation, rank, step, source.map(|s| s.tier));
            let Some((step, source)) = step.zip(source) else { continue };
            if !self.read(host, local, step, source) {
                if let Some(crew) = self.hosts[host].crews.iter_mut().find(|c| c.generation == generation) {
                    crew.training = false;
                }
                let missing = Unreadable { step, tier: source.tier };
                let event = if self.is_damaged(source) {
                    self.oracle.unreadable.insert(step);
                    CrewEvent::RestoreFailed(rank, missing)
                } else {
                    CrewEvent::FetchFailed(rank, missing)
                };
                self.crew_event(host, generation, event);
            } else if let Some(held) = self.hosts[host].memory.get_mut(&local) {
                held.iter_mut().filter(|m| m.of.step == step).for_each(|m| m.pinned = true);
            }
        }
    }

    /// One second of training on every host.
    pub(crate) fn workload(&mut self) {
        let mut present: BTreeMap<Generation, u32> = BTreeMap::new();
        let mut broken: BTreeSet<Generation> = BTreeSet::new();
        for host in self.hosts.iter().filter(|h| h.up && !h.frozen) {
            for crew in &host.crews {
                if crew.able_to_train() && crew.training {
                    *present.entry(crew.generation).or_default() += crew.workers;
                } else if crew.living.values().any(|a| !*a) {
                    broken.insert(crew.generation);
                }
            }
        }
        let complete: BTreeSet<Generation> = present
            .iter()
            .filter(|(g, n)| self.oracle.worlds.get(g).is_some_and(|w| w.size == **n))
            .map(|(g, _)| *g)
            .collect();
        for host in 0..self.hosts.len() {
            if self.hosts[host].up && !self.hosts[host].frozen {
                self.work_on(host, &complete, &broken);
                self.report_progress(host);
            }
        }
    }

    /// A keep-alive with the progress of a host's workers.
    fn report_progress(&mut self, host: usize) {
        let h = &self.hosts[host];
        let Some(crew) = h.crews.last().filter(|c| c.training && c.alive()) else { return };
        let (generation, first, step) = (crew.generation, crew.slot.first_rank.0, crew.step);
        let own_us = if self.now < h.faults.slow_until { 150_000 } else { 50_000 };
        let ranks: Vec<RankProgress> = (first..first + crew.workers)
            .map(|rank| RankProgress {
                rank,
                step: Some(step),
                step_us: Some(own_us),
                own_us: Some(own_us),
                ..RankProgress::default()
            })
            .collect();
        let Some(session) = h.session.filter(|_| self.network.links[host].open(self.now)) else { return };
        let Some(c) = self.network.connections.get(&session).filter(|c| c.coordinator_end) else { return };
        let index = c.coordinator;
        for rank in &ranks {
            self.oracle.reported(generation, Rank(rank.rank), Step(step));
        }
        self.coordinator(index, Event::Progress { session, generation, ranks });
    }

    /// Workers that are ready report what they could restore.
    fn offer(&mut self, host: usize, durable: Option<u64>) {
        let Some(crew) = self.hosts[host].crews.last() else { return };
        let (generation, first, workers) = (crew.generation, crew.slot.first_rank.0, crew.workers);
        let held = self.hosts[host].all().map(|m| m.of).collect();
        let parity = self.hosts[host].copies.parity.iter().map(|p| p.of.clone()).collect();
        self.crew_event(host, generation, CrewEvent::Holds(Holdings { held, parity }));
        let shared = self.shared();
        let size = self.oracle.worlds.get(&generation).map_or(0, |w| w.size);
        for local in 0..workers {
            let rank = Rank(first + local);
            let offers = self.hosts[host].offers(local, (rank, size), shared, durable);
            self.oracle.offered(generation, rank, offers.clone());
            let offers = Offers::any(offers, shared);
            self.crew_event(host, generation, CrewEvent::Offers(RankOffers { rank, offers }));
        }
    }

    pub(crate) fn work_on(&mut self, host: usize, complete: &BTreeSet<Generation>, broken: &BTreeSet<Generation>) {
        let now = self.now;
        let durable = self.durable.filter(|_| now >= self.hosts[host].faults.stale_until);
        let Some(crew) = self.hosts[host].crews.last_mut() else { return };
        let (generation, first, workers) = (crew.generation, crew.slot.first_rank.0, crew.workers);
        if !crew.training && now >= crew.ready_at && !crew.offered {
            crew.offered = true;
            return self.offer(host, durable);
        }
        if complete.contains(&generation) {
            crew.beats += 5;
            let holds = crew.hold_at.filter(|at| *at <= crew.step + 5);
            let arrives = holds.is_some_and(|at| at > crew.step);
            crew.step = holds.unwrap_or(crew.step + 5).max(crew.step);
            let step = crew.step;
            // Not every second, because simulating a message costs more than sending it.
            if arrives || (step / 5).is_multiple_of(3) {
                self.seal(host, generation, step);
            }
            for local in 0..workers {
                let rank = Rank(first + local);
                if arrives || (step / 5).is_multiple_of(60) {
                    let shard = ShardFile {
                        rank,
                        file: format!("{rank}"),
                        bytes: 1,
                        crc: String::new(),
                        purpose: Purpose::Recovery,
                        objects: std::collections::BTreeSet::new(),
                    };
                    let directory = String::new();
                    self.crew_event(
                        host,
                        generation,
                        CrewEvent::ShardWritten(ShardWritten {
                            step: Step(step),
                            captured: generation,
                            directory,
                            shard,
                        }),
                    );
                }
            }
        } else if broken.contains(&generation) && self.rng.percent(30) {
            // A peer is gone, so the collective fails here too.
            let local = u32::from(self.rng.percent(50));
            return self.worker_errs(host, local, crate::ailing::CASCADE);
        }
        let Some(crew) = self.hosts[host].crews.last().cloned() else { return };
        for (local_rank, alive) in &crew.living {
            let seen = Observation {
                step: crew.training.then_some(crew.step),
                restored: crew.restored,
                numbered: true,
                beats: crew.beats,
                process: Process {
                    stopped: crew.hung.contains(local_rank),
                    cpu_ms: crew.beats * 100,
                    ..Process::default()
                },
                interpreter: Interpreter { ticks: now, stack_changes: now, ..Interpreter::default() },
                ..Observation::default()
            };
            if *alive {
                self.crew_event(host, generation, CrewEvent::Sample { local_rank: *local_rank, pid: 1, seen });
            }
        }
    }
}
