//! The event loop of a simulation: one queue, one clock, one seed.

use crate::control::{Effect, Process, Store};
use crate::fault::{Fault, FaultCounts};
use crate::host::{Crew, Host};
use crate::network::Network;
use crate::oracle::{Oracle, Violation};
use crate::rng::Rng;
use crate::trace::Trace;
use everstep_core::agent::command::Command as AgentCommand;
use everstep_core::agent::event::Event as AgentEvent;
use everstep_core::agent::watch::Observation;
use everstep_core::agent::{Agent, Config};
use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::command::Precondition;
use everstep_core::coordinator::event::{Event, StoreFailure, Version};
use everstep_core::coordinator::state::{JobRecord, Phase};
use everstep_core::id::{Epoch, Generation, Incarnation, JobId, NodeId, PersistId, Rank, Session, Step};
use everstep_core::invariant::InvariantId;
use everstep_core::message::{Hello, Order, Outcome as Exit, Report, ShardFile, Tier};
use everstep_core::spec::{JobSpec, RestartBudget};
use everstep_core::time::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What to simulate.
#[derive(Clone, Debug)]
pub struct Options {
    /// Decides everything else.
    pub seed: u64,
    /// Simulated minutes.
    pub minutes: u64,
    /// Machines that run an agent.
    pub nodes: usize,
    /// Faults to inject.
    pub faults: usize,
    /// A budget of few restarts, which the faults will use up.
    pub tight_budget: bool,
    /// Keep the trace's lines.
    pub keep_trace: bool,
    /// The bug to switch on.
    #[cfg(feature = "planted")]
    pub planted: Option<everstep_core::planted::Bug>,
}

impl Options {
    /// The usual size: 16 nodes, 30 minutes, 24 faults.
    #[must_use]
    pub fn usual(seed: u64) -> Self {
        Options {
            seed,
            minutes: 32,
            nodes: 16,
            faults: 24,
            tight_budget: false,
            keep_trace: false,
            #[cfg(feature = "planted")]
            planted: None,
        }
    }
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    /// Broken invariants, in order.
    pub violations: Vec<Violation>,
    /// Faults injected by kind.
    pub faults: FaultCounts,
    /// Hash of the whole trace.
    pub hash: u64,
    /// Events handled.
    pub events: u64,
    /// Generations whose workers ran.
    pub generations: usize,
    /// The trace, if kept.
    pub trace: Vec<String>,
}

/// Something that will happen.
#[derive(Debug)]
pub(crate) enum Happening {
    ToAgent { session: Session, epoch: Epoch, order: Order },
    ToCoordinator { session: Session, hello: Option<Box<Hello>>, report: Option<Report> },
    AgentSeesEnd { session: Session },
    CoordinatorSeesEnd { session: Session },
    Connect { host: usize, life: u64 },
    AgentTick { host: usize, life: u64 },
    CoordinatorTick { index: usize },
    Killed { host: usize, generation: Generation },
    Apply { index: usize, id: PersistId, key: String, value: Vec<u8>, when: Precondition },
    Persisted { index: usize, id: PersistId, result: Result<Version, StoreFailure> },
    Superseded { index: usize },
    StartAgent { host: usize },
    StartCoordinator,
    GuardDone { host: usize },
    Thaw { host: usize },
    Workload,
    Inject(Fault),
}

/// A cluster in mid-simulation.
pub(crate) struct World {
    pub now: u64,
    pub options: Options,
    pub rng: Rng,
    pub queue: BTreeMap<(u64, u64), Happening>,
    pub order: u64,
    pub hosts: Vec<Host>,
    pub links: Vec<crate::network::Link>,
    pub network: Network,
    pub processes: Vec<Process>,
    pub store: Store,
    pub spec: JobSpec,
    pub budget: u64,
    pub oracle: Oracle,
    pub trace: Trace,
    pub counts: FaultCounts,
    pub durable: Option<u64>,
    pub quiet_at: u64,
    pub events: u64,
}

/// Runs one simulation.
#[must_use]
pub fn run(options: &Options) -> Outcome {
    let mut world = World::new(options.clone());
    world.prepare();
    let end = options.minutes * 60_000;
    while let Some(((at, _), happening)) = world.queue.pop_first() {
        if at > end || !world.oracle.violations.is_empty() {
            break;
        }
        world.now = at;
        world.events += 1;
        world.happen(happening);
        world.check();
    }
    world.check_liveness();
    Outcome {
        violations: world.oracle.violations,
        faults: world.counts,
        hash: world.trace.hash(),
        events: world.events,
        generations: world.oracle.started.len(),
        trace: world.trace.lines().to_vec(),
    }
}

impl World {
    fn new(options: Options) -> Self {
        let mut rng = Rng::new(options.seed);
        let nodes = u32::try_from(options.nodes).unwrap_or(16);
        let max = nodes - u32::try_from(rng.range(0, 3)).unwrap_or(0);
        let min = if rng.percent(50) { max } else { max - u32::try_from(rng.range(1, 4)).unwrap_or(1) };
        let budget = if options.tight_budget { rng.range(3, 9) } else { 100_000 };
        let spec = JobSpec {
            job: JobId("sim".into()),
            nodes_min: min,
            nodes_max: max,
            node_unit: 1,
            restarts: RestartBudget::Exactly(u32::try_from(budget).unwrap_or(u32::MAX)),
            detect_timeout_ms: 2000,
            join_timeout_ms: 20 * 60_000,
        };
        let spares = 4;
        let mut hosts: Vec<Host> = (0..options.nodes).map(|n| Host::new(NodeId(n.to_string()))).collect();
        hosts.extend((0..spares).map(|_| {
            let mut h = Host::new(NodeId("0".into()));
            h.up = false;
            h
        }));
        let links = vec![crate::network::Link::default(); hosts.len()];
        let quiet_at = options.minutes * 60_000 - 6 * 60_000;
        World {
            now: 0,
            rng,
            queue: BTreeMap::new(),
            order: 0,
            hosts,
            links,
            network: Network::default(),
            processes: Vec::new(),
            store: Store::default(),
            spec,
            budget,
            oracle: Oracle::default(),
            trace: Trace::new(options.keep_trace),
            counts: FaultCounts::new(),
            durable: None,
            quiet_at,
            events: 0,
            options,
        }
    }

    fn prepare(&mut self) {
        self.at(0, Happening::StartCoordinator);
        for host in 0..self.options.nodes {
            let delay = self.rng.range(10, 3000);
            self.at(delay, Happening::StartAgent { host });
        }
        self.at(1000, Happening::Workload);
        for _ in 0..self.options.faults {
            let fault = *self.rng.pick(Fault::ALL).unwrap_or(&Fault::WorkerCrash);
            let at = self.rng.range(20_000, self.quiet_at);
            self.at(at, Happening::Inject(fault));
        }
        // The last one: a machine is lost for good, so that a spare has to take its place.
        self.at(self.quiet_at - 1, Happening::Inject(Fault::NodeGone));
    }

    /// Schedules something `delay` milliseconds from now.
    pub(crate) fn at(&mut self, delay: u64, happening: Happening) {
        self.order += 1;
        self.queue.insert((self.now + delay, self.order), happening);
    }

    pub(crate) fn note(&mut self, text: &str) {
        self.trace.line(self.now, text);
    }

    fn happen(&mut self, happening: Happening) {
        if !matches!(happening, Happening::Workload) {
            let text = format!("{happening:?}");
            self.note(&text);
        }
        match happening {
            Happening::ToAgent { session, epoch, order } => self.agent_receives(session, epoch, order),
            Happening::ToCoordinator { session, hello, report } => self.coordinator_receives(session, hello, report),
            Happening::AgentSeesEnd { session } => self.agent_sees_end(session),
            Happening::CoordinatorSeesEnd { session } => self.coordinator_sees_end(session),
            Happening::Connect { host, life } => self.connect(host, life),
            Happening::AgentTick { host, life } => {
                if self.hosts[host].life == life {
                    self.hosts[host].wake_at = None;
                    self.agent(host, AgentEvent::Tick);
                }
            }
            Happening::CoordinatorTick { index } => {
                self.processes[index].wake_at = None;
                self.coordinator(index, Event::Tick);
            }
            Happening::Killed { host, generation } => self.killed(host, generation),
            Happening::Apply { index, id, key, value, when } => self.apply(index, id, &key, value, when),
            Happening::Persisted { index, id, result } => self.persisted(index, id, result),
            Happening::Superseded { index } => self.coordinator(index, Event::Superseded),
            Happening::StartAgent { host } => self.start_agent(host),
            Happening::StartCoordinator => self.start_coordinator(false),
            Happening::GuardDone { host } => {
                self.hosts[host].crews.clear();
                self.hosts[host].guard_ending = false;
            }
            Happening::Thaw { host } => self.hosts[host].frozen = false,
            Happening::Workload => {
                self.workload();
                self.at(1000, Happening::Workload);
            }
            Happening::Inject(fault) => self.inject(fault),
        }
    }

    // ---- coordinators and the store -------------------------------------------------------

    pub(crate) fn start_coordinator(&mut self, beside: bool) {
        if !beside && self.processes.iter().any(|p| p.alive) {
            return;
        }
        let version = self.store.entries.get("epoch").map(|(_, v)| *v);
        let when = version.map_or(Precondition::Absent, Precondition::Version);
        let Ok(epoch) = self.store.put(self.now, "epoch", Vec::new(), when) else {
            return self.at(500, Happening::StartCoordinator);
        };
        for index in (0..self.processes.len()).filter(|i| self.processes[*i].alive).collect::<Vec<_>>() {
            let delay = self.rng.range(1, 2000);
            self.at(delay, Happening::Superseded { index });
        }
        let clock_offset = i64::try_from(self.rng.range(0, 20_000)).unwrap_or(0) - 10_000;
        let epoch = Epoch(epoch);
        let now = self.clock(clock_offset);
        #[allow(unused_mut)]
        let mut core = Coordinator::new(epoch, self.store.records(), now);
        #[cfg(feature = "planted")]
        {
            core.planted = self.options.planted;
        }
        let waiting = BTreeMap::new();
        self.processes.push(Process {
            core,
            epoch,
            alive: true,
            clock_offset,
            waiting,
            crash_at_persist: None,
            wake_at: None,
        });
        let index = self.processes.len() - 1;
        self.coordinator(index, Event::Tick);
    }

    fn clock(&self, offset: i64) -> Time {
        Time((self.now + 100_000_000).saturating_add_signed(offset))
    }

    pub(crate) fn kill_coordinator(&mut self, index: usize) {
        if !self.processes[index].alive {
            return;
        }
        self.processes[index].alive = false;
        let open: Vec<Session> = self
            .network
            .connections
            .iter()
            .filter(|(_, c)| c.coordinator == index && c.agent_end)
            .map(|(s, _)| *s)
            .collect();
        for session in open {
            if let Some(c) = self.network.connections.get_mut(&session) {
                c.coordinator_end = false;
            }
            let delay = self.rng.range(1, 20);
            self.at(delay, Happening::AgentSeesEnd { session });
        }
        let delay = self.rng.range(100, 2000);
        self.at(delay, Happening::StartCoordinator);
    }

    fn coordinator(&mut self, index: usize, event: Event) {
        let Some(process) = self.processes.get_mut(index).filter(|p| p.alive) else { return };
        let now = Time((self.now + 100_000_000).saturating_add_signed(process.clock_offset));
        process.core.handle(now, event);
        let effects = process.drain();
        let epoch = process.epoch;
        for effect in effects {
            match effect {
                Effect::Send(session, order) => self.send_order(session, epoch, order),
                Effect::Write(id, key, value, when) => {
                    match self.processes[index].crash_at_persist.take() {
                        Some(true) => return self.kill_coordinator(index),
                        Some(false) => {
                            self.apply(index, id, &key, value, when);
                            return self.kill_coordinator(index);
                        }
                        None => {}
                    }
                    let delay = self.rng.range(1, 25);
                    self.at(delay, Happening::Apply { index, id, key, value, when });
                }
                Effect::StepDown => {
                    self.kill_coordinator(index);
                }
            }
        }
        let process = &mut self.processes[index];
        if let Some(deadline) = process.core.deadline(now) {
            let wait = deadline.since(now).as_millis();
            let at = self.now + u64::try_from(wait).unwrap_or(1).max(1);
            if process.wake_at.is_none_or(|w| at < w || w <= self.now) {
                process.wake_at = Some(at);
                self.at(at - self.now, Happening::CoordinatorTick { index });
            }
        }
    }

    fn apply(&mut self, index: usize, id: PersistId, key: &str, value: Vec<u8>, when: Precondition) {
        // A write on its way reaches the store even if its writer has died meanwhile.
        let record: Option<JobRecord> = serde_json::from_slice(&value).ok();
        let result = self.store.put(self.now, key, value, when);
        if let (Ok(_), Some(record)) = (&result, record) {
            self.oracle.stored(self.now, record.generation);
        }
        let delay = self.rng.range(1, 10);
        self.at(delay, Happening::Persisted { index, id, result });
    }

    fn persisted(&mut self, index: usize, id: PersistId, result: Result<Version, StoreFailure>) {
        if !self.processes[index].alive {
            return;
        }
        let promises = self.processes[index].waiting.remove(&id).unwrap_or_default();
        if result.is_ok() {
            let epoch = self.processes[index].epoch;
            for (session, order) in promises {
                self.send_order(session, epoch, order);
            }
        }
        self.coordinator(index, Event::Persisted { id, result });
    }

    // ---- sessions ---------------------------------------------------------------------------

    fn connect(&mut self, host: usize, life: u64) {
        let h = &self.hosts[host];
        if h.life != life || h.agent.is_none() || h.session.is_some() {
            return;
        }
        let living: Vec<usize> = (0..self.processes.len()).filter(|i| self.processes[*i].alive).collect();
        let target = self.rng.pick(&living).copied();
        let Some(index) = target.filter(|_| self.links[host].open(self.now) && !self.hosts[host].frozen) else {
            let delay = self.rng.range(200, 400);
            return self.at(delay, Happening::Connect { host, life });
        };
        let session = self.network.open(host, life, index);
        self.hosts[host].session = Some(session);
        let hello = self.hosts[host].agent.as_ref().map(|a| Box::new(a.hello()));
        self.transmit(session, true, |_| Happening::ToCoordinator { session, hello, report: None });
        self.agent(host, AgentEvent::Connected);
    }

    /// Sends one message in one direction, with whatever the link does to it.
    fn transmit(&mut self, session: Session, to_coordinator: bool, make: impl FnOnce(bool) -> Happening) {
        let Some(c) = self.network.connections.get(&session).cloned() else { return };
        let link = &mut self.links[c.host];
        let blocked = if to_coordinator { link.to_blocked_until } else { link.from_blocked_until };
        let silence = self.spec.detect_timeout_ms;
        let direction = usize::from(to_coordinator);
        let lost = std::mem::take(&mut link.drop_next) || blocked > self.now + silence;
        let reorder = std::mem::take(&mut link.reorder_next);
        let slow = if self.now < link.slow.1 { link.slow.0 } else { 0 };
        if lost {
            self.at(silence, Happening::CoordinatorSeesEnd { session });
            return self.at(silence + 5, Happening::AgentSeesEnd { session });
        }
        let mut arrival = blocked.max(self.now) + self.rng.range(1, 15) + slow;
        if reorder {
            arrival += 300;
        } else {
            arrival = arrival.max(c.next_arrival[direction]);
            if let Some(c) = self.network.connections.get_mut(&session) {
                c.next_arrival[direction] = arrival;
            }
        }
        self.at(arrival - self.now, make(false));
    }

    fn send_order(&mut self, session: Session, epoch: Epoch, order: Order) {
        let Some(c) = self.network.connections.get(&session).filter(|c| c.coordinator_end) else { return };
        if std::mem::take(&mut self.links[c.host].duplicate_order) {
            let again = order.clone();
            self.transmit(session, false, |_| Happening::ToAgent { session, epoch, order: again });
        }
        self.transmit(session, false, |_| Happening::ToAgent { session, epoch, order });
    }

    fn coordinator_receives(&mut self, session: Session, hello: Option<Box<Hello>>, report: Option<Report>) {
        let Some(c) = self.network.connections.get(&session).filter(|c| c.coordinator_end) else { return };
        let index = c.coordinator;
        if let Some(hello) = hello {
            self.coordinator(index, Event::Joined { session, hello });
        }
        if let Some(report) = report {
            self.coordinator(index, Event::Report { session, report });
        }
    }

    fn agent_receives(&mut self, session: Session, epoch: Epoch, order: Order) {
        let Some(c) = self.network.connections.get(&session).filter(|c| c.agent_end) else { return };
        let (host, life) = (c.host, c.life);
        if self.hosts[host].frozen {
            return self.at(500, Happening::ToAgent { session, epoch, order });
        }
        if self.hosts[host].life == life {
            let refused = matches!(order, Order::Refused { .. });
            self.agent(host, AgentEvent::Order { epoch, order });
            if refused {
                self.agent_sees_end(session);
            }
        }
    }

    pub(crate) fn agent_sees_end(&mut self, session: Session) {
        let Some(c) = self.network.connections.get_mut(&session) else { return };
        if !std::mem::take(&mut c.agent_end) {
            return;
        }
        let (host, life, other_open) = (c.host, c.life, c.coordinator_end);
        if other_open {
            // The coordinator hears of it when the path lets it, at the latest by silence.
            let delay =
                if self.links[host].open(self.now) { self.rng.range(1, 1500) } else { self.spec.detect_timeout_ms };
            self.at(delay, Happening::CoordinatorSeesEnd { session });
        }
        let h = &mut self.hosts[host];
        if h.life == life && h.session == Some(session) {
            h.session = None;
            self.agent(host, AgentEvent::Disconnected);
            let delay = self.rng.range(20, 300);
            self.at(delay, Happening::Connect { host, life });
        }
    }

    fn coordinator_sees_end(&mut self, session: Session) {
        let Some(c) = self.network.connections.get_mut(&session) else { return };
        if !std::mem::take(&mut c.coordinator_end) {
            return;
        }
        let (index, other_open) = (c.coordinator, c.agent_end);
        if other_open {
            self.at(20, Happening::AgentSeesEnd { session });
        }
        self.coordinator(index, Event::Lost { session });
    }

    // ---- agents and workers -----------------------------------------------------------------

    fn start_agent(&mut self, host: usize) {
        let h = &mut self.hosts[host];
        if !h.up || h.frozen || h.agent.is_some() || h.exited.is_some() {
            return;
        }
        if h.guard_ending || h.crews.iter().any(Crew::alive) {
            // The node lock is still held by the guard of the previous life.
            return self.at(200, Happening::StartAgent { host });
        }
        h.life += 1;
        h.next_port += 1;
        let config = Config {
            node: h.node.clone(),
            incarnation: Incarnation(self.now * 100 + host as u64 + 1),
            spec: self.spec.clone(),
            host: format!("host{host}"),
            workers: 2,
            store_port: h.next_port,
            shutdown_grace: Duration::from_secs(30),
        };
        #[allow(unused_mut)]
        let mut agent = Agent::new(config, Time(self.now));
        #[cfg(feature = "planted")]
        {
            agent.planted = self.options.planted;
        }
        h.agent = Some(agent);
        h.session = None;
        let life = h.life;
        self.at(5, Happening::Connect { host, life });
    }

    pub(crate) fn agent(&mut self, host: usize, event: AgentEvent) {
        let now = Time(self.now);
        let Some(agent) = self.hosts[host].agent.as_mut() else { return };
        agent.handle(now, event);
        let mut commands = Vec::new();
        while let Some(command) = agent.poll() {
            commands.push(command);
        }
        let deadline = agent.deadline(now);
        let life = self.hosts[host].life;
        for command in commands {
            self.execute(host, command);
        }
        if let Some(deadline) = deadline {
            let at = deadline.0.max(self.now + 1);
            let h = &mut self.hosts[host];
            if h.wake_at.is_none_or(|w| at < w || w <= self.now) {
                h.wake_at = Some(at);
                self.at(at - self.now, Happening::AgentTick { host, life });
            }
        }
    }

    fn execute(&mut self, host: usize, command: AgentCommand) {
        let slow = if self.now < self.hosts[host].slow_until { 8 } else { 1 };
        match command {
            AgentCommand::Send(report) => {
                let Some(session) = self.hosts[host].session else { return };
                if std::mem::take(&mut self.links[host].duplicate_next) {
                    let report = Some(report.clone());
                    self.transmit(session, true, |_| Happening::ToCoordinator { session, hello: None, report });
                }
                let report = Some(report);
                self.transmit(session, true, |_| Happening::ToCoordinator { session, hello: None, report });
            }
            AgentCommand::Spawn { generation, world, slot, .. } => {
                self.oracle.spawned(self.now, host, generation, &world, self.budget);
                let ready_at = self.now + self.rng.range(1500, 4000) * slow;
                let living = (0..slot.workers).map(|l| (l, true)).collect();
                let workers = slot.workers;
                self.hosts[host].crews.push(Crew {
                    generation,
                    slot,
                    workers,
                    living,
                    hung: Vec::new(),
                    ready_at,
                    offered: false,
                    training: false,
                    step: 0,
                    beats: 0,
                });
                if self.hosts[host].crash_loop > 0 {
                    self.hosts[host].crash_loop -= 1;
                    self.worker_dies(host, 0);
                }
            }
            AgentCommand::Kill { generation, grace } => {
                let grace = u64::try_from(grace.as_millis()).unwrap_or(0);
                let delay = self.rng.range(1, 40 + grace) * slow;
                self.at(delay, Happening::Killed { host, generation });
            }
            AgentCommand::Restore { generation, step, tiers } => self.restore(host, generation, step, &tiers),
            AgentCommand::Publish { generation, step, .. } => {
                self.durable = self.durable.max(Some(step.0));
                self.agent(host, AgentEvent::Published { generation, step });
            }
            AgentCommand::Forward { .. }
            | AgentCommand::StopAt { .. }
            | AgentCommand::PersistAt { .. }
            | AgentCommand::Durable { .. } => {}
            AgentCommand::Exit { code, why, .. } => {
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
        }
    }

    /// The agent's end of a session closes because its process ended.
    pub(crate) fn close_agent_end(&mut self, session: Session) {
        let Some(c) = self.network.connections.get_mut(&session) else { return };
        c.agent_end = false;
        let host = c.host;
        let delay = if self.links[host].open(self.now) { self.rng.range(1, 30) } else { self.spec.detect_timeout_ms };
        self.at(delay, Happening::CoordinatorSeesEnd { session });
    }

    fn killed(&mut self, host: usize, generation: Generation) {
        if self.hosts[host].agent.is_none() {
            return;
        }
        let h = &mut self.hosts[host];
        h.crews.retain(|c| c.generation != generation);
        h.next_port += 1;
        let store_port = h.next_port;
        self.agent(host, AgentEvent::WorkersGone { generation, store_port });
    }

    pub(crate) fn worker_dies(&mut self, host: usize, local_rank: u32) {
        let Some(crew) = self.hosts[host].crews.last_mut() else { return };
        let Some(alive) = crew.living.get_mut(&local_rank).filter(|a| **a) else { return };
        *alive = false;
        let generation = crew.generation;
        let outcome = Exit::Signal(9);
        self.agent(host, AgentEvent::WorkerExited { generation, local_rank, pid: 1, outcome, message: String::new() });
    }

    fn restore(&mut self, host: usize, generation: Generation, step: Option<Step>, tiers: &[Tier]) {
        let now = self.now;
        let durable = self.durable;
        let h = &mut self.hosts[host];
        let Some(crew) = h.crews.iter_mut().find(|c| c.generation == generation) else { return };
        if crew.training {
            return;
        }
        crew.training = true;
        crew.step = step.map_or(0, |s| s.0);
        let (first, workers) = (crew.slot.first_rank.0, crew.workers);
        for rank in first..first + workers {
            self.oracle.restored(now, generation, Rank(rank), step);
            let tier = tiers.get(rank as usize).copied();
            let there = self.hosts[host]
                .offers(Rank(rank), durable)
                .iter()
                .any(|o| Some(o.step) == step && Some(o.tier) == tier);
            if step.is_some() && !there {
                // Reading fails: the worker says so and exits.
                self.worker_dies(host, rank - first);
            }
        }
    }

    /// One second of training on every host.
    fn workload(&mut self) {
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
            .filter(|(g, n)| self.oracle.worlds.get(g).is_some_and(|w| w.size() == **n))
            .map(|(g, _)| *g)
            .collect();
        for host in 0..self.hosts.len() {
            if self.hosts[host].up && !self.hosts[host].frozen {
                self.work_on(host, &complete, &broken);
            }
        }
    }

    fn work_on(&mut self, host: usize, complete: &BTreeSet<Generation>, broken: &BTreeSet<Generation>) {
        let now = self.now;
        let durable = self.durable;
        let Some(crew) = self.hosts[host].crews.last_mut() else { return };
        let (generation, first, workers) = (crew.generation, crew.slot.first_rank.0, crew.workers);
        if !crew.training && now >= crew.ready_at && !crew.offered {
            crew.offered = true;
            for rank in (first..first + workers).map(Rank) {
                let offers = self.hosts[host].offers(rank, durable);
                self.oracle.offered(generation, rank, offers.clone());
                self.agent(host, AgentEvent::Offers { generation, rank, offers });
            }
            return;
        }
        if complete.contains(&generation) {
            crew.step += 5;
            crew.beats += 5;
            let step = crew.step;
            for rank in (first..first + workers).map(Rank) {
                self.hosts[host].seal(rank, step);
                if (step / 5).is_multiple_of(60) {
                    let shard = ShardFile { rank, file: format!("{rank}"), bytes: 1, crc: String::new() };
                    let directory = String::new();
                    self.agent(host, AgentEvent::ShardWritten { generation, step: Step(step), directory, shard });
                }
            }
        } else if broken.contains(&generation) && self.rng.percent(30) {
            // A peer is gone: the collective fails here, too.
            let local = u32::from(self.rng.percent(50));
            return self.worker_dies(host, local);
        }
        let Some(crew) = self.hosts[host].crews.last().cloned() else { return };
        for (local_rank, alive) in &crew.living {
            let seen = Observation {
                step: crew.training.then_some(crew.step),
                beats: crew.beats,
                stopped: crew.hung.contains(local_rank),
                cpu_ms: crew.beats * 100,
                interpreter_ticks: now,
                stack_changes: now,
                ..Observation::default()
            };
            if *alive {
                self.agent(host, AgentEvent::Sample { generation, local_rank: *local_rank, pid: 1, seen });
            }
        }
    }

    // ---- checks -----------------------------------------------------------------------------

    fn check(&mut self) {
        self.oracle.look(self.now, &self.hosts);
        let mut found = None;
        for (session, c) in self.network.connections.iter().rev().take(64) {
            let process = &self.processes[c.coordinator];
            let current = self.hosts[c.host].session == Some(*session) && c.coordinator_end && c.agent_end;
            if !(process.alive && current) {
                continue;
            }
            let job = process.core.jobs().get(&self.spec.job);
            let mine = job.and_then(|j| j.nodes.get(&self.hosts[c.host].node));
            // Joined on this very connection, and not lost since: it must still be a member.
            if mine.is_some_and(|n| n.session.is_none() && n.hello.incarnation.0 % 100 == c.host as u64 + 1)
                && !self.lost_is_due(*session)
                && self.joined_on(*session, c.coordinator)
            {
                found = Some(format!(
                    "node {} is attached on session {session} but counted as lost",
                    self.hosts[c.host].node
                ));
            }
        }
        if let Some(what) = found {
            self.oracle.violations.push(Violation { invariant: InvariantId::LiveNodeIsMember, at: self.now, what });
        }
    }

    fn joined_on(&self, session: Session, index: usize) -> bool {
        self.processes[index].core.knows(session)
    }

    fn lost_is_due(&self, session: Session) -> bool {
        self.network.connections.get(&session).is_none_or(|c| !c.coordinator_end)
    }

    /// INV-06, at the end: faults stopped a while ago.
    fn check_liveness(&mut self) {
        if !self.oracle.violations.is_empty() {
            return;
        }
        let Some(process) = self.processes.iter().rev().find(|p| p.alive) else { return };
        let Some(job) = process.core.jobs().get(&self.spec.job) else { return };
        let usable = self.hosts.iter().filter(|h| h.agent.is_some() && h.session.is_some()).count();
        let full = u32::try_from(usable).unwrap_or(0).min(self.spec.nodes_max);
        // A machine that comes back after the job has failed starts it anew and waits for the others.
        let failed = self.hosts.iter().any(|h| h.exited.as_ref().is_some_and(|(code, _)| *code == 1));
        let budget_used = u64::from(job.record.restarts) >= self.budget || (failed && self.options.tight_budget);
        let what = match &job.phase {
            Phase::Training { .. } if job.record.world.slots.len() as u32 >= self.spec.nodes_min => {
                let generation = job.record.generation;
                let crews = self.hosts.iter().flat_map(|h| &h.crews);
                let n: u32 = crews
                    .filter(|c| c.generation == generation && c.able_to_train() && c.training)
                    .map(|c| c.workers)
                    .sum();
                (n != job.record.world.size()).then(|| format!("{n} of {} workers train", job.record.world.size()))
            }
            _ if budget_used => None,
            phase => Some(format!("{phase:?}, reason {:?}, {full} nodes could train", job.reason)),
        };
        if let Some(what) = what {
            let violation = Violation { invariant: InvariantId::FullSizeAfterQuiet, at: self.now, what };
            self.oracle.violations.push(violation);
        }
    }
}
