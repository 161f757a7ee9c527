//! Events of coordinators, their store, and the sessions to them.

use crate::control::{Effect, Process};
use crate::world::{Happening, World};
use everstep_core::agent::event::Event as AgentEvent;
use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::command::{Fact, Precondition};
use everstep_core::coordinator::event::{Event, StoreFailure, Version};
use everstep_core::coordinator::job::JobRecord;
use everstep_core::id::{Epoch, PersistId, Session};
use everstep_core::idle_exit::IdleExit;
use everstep_core::keep_alive::KeepAlive;
use everstep_core::message::{CrewOrder, Hello, Order, Report};
use everstep_core::time::Time;
use std::collections::{BTreeMap, BTreeSet};

impl World {
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
            keep_alive: KeepAlive::new(Time(self.now)),
            idle_exit: IdleExit::new(Time(self.now)),
            sessions: BTreeSet::new(),
            checking: false,
        });
        let index = self.processes.len() - 1;
        self.coordinator(index, Event::Tick);
    }

    pub(crate) fn clock(&self, offset: i64) -> Time {
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

    pub(crate) fn coordinator(&mut self, index: usize, event: Event) {
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
                Effect::Record(fact) => {
                    if let Fact::Restored { step, .. } = &fact {
                        self.check_committed(index, step.unwrap_or_default());
                    }
                    self.oracle.recorded(self.now, &fact);
                }
                Effect::Provision(job, request) => {
                    self.provision(index, job, &request);
                }
                Effect::StepDown => {
                    self.kill_coordinator(index);
                }
            }
        }
        let process = &self.processes[index];
        let wait = process.core.deadline(now).map(|at| u64::try_from(at.since(now).as_millis()).unwrap_or(0));
        let at = wait.map(|wait| self.wakes(self.now + wait));
        let process = &mut self.processes[index];
        if std::mem::replace(&mut process.wake_at, at) != at
            && let Some(at) = at
        {
            self.at(at - self.now, Happening::CoordinatorTick { index });
        }
    }

    pub(crate) fn apply(&mut self, index: usize, id: PersistId, key: &str, value: Vec<u8>, when: Precondition) {
        // A write in flight reaches the store even if its writer has died in the meantime.
        let record: Option<JobRecord> = serde_json::from_slice(&value).ok();
        let result = self.store.put(self.now, key, value, when);
        if let (Ok(_), Some(record)) = (&result, record) {
            self.oracle.stored(self.now, record.generation);
        }
        let delay = self.rng.range(1, 10);
        self.at(delay, Happening::Persisted { index, id, result });
    }

    pub(crate) fn persisted(&mut self, index: usize, id: PersistId, result: Result<Version, StoreFailure>) {
        if !self.processes[index].alive {
            return;
        }
        let orders = self.processes[index].waiting.remove(&id).unwrap_or_default();
        if result.is_ok() {
            let epoch = self.processes[index].epoch;
            for (session, order) in orders {
                self.send_order(session, epoch, order);
            }
        }
        self.coordinator(index, Event::Persisted { id, result });
    }

    pub(crate) fn connect(&mut self, host: usize, life: u64) {
        let h = &self.hosts[host];
        if h.life != life || h.agent.is_none() || h.session.is_some() {
            return;
        }
        let living: Vec<usize> = (0..self.processes.len()).filter(|i| self.processes[*i].alive).collect();
        let target = self.rng.pick(&living).copied();
        let Some(index) = target.filter(|_| self.network.links[host].open(self.now) && !self.hosts[host].frozen) else {
            let delay = self.rng.range(200, 400);
            return self.at(delay, Happening::Connect { host, life });
        };
        let session = self.network.open(host, life, index);
        self.hosts[host].session = Some(session);
        self.accept(index, session);
        let hello = self.hosts[host].agent.as_ref().map(|a| Box::new(a.hello()));
        self.transmit(session, true, |_| Happening::ToCoordinator { session, hello, report: None });
        self.agent(host, AgentEvent::Connected);
    }

    /// Sends one message in one direction, subject to the faults of the link.
    pub(crate) fn transmit(&mut self, session: Session, to_coordinator: bool, make: impl FnOnce(bool) -> Happening) {
        let Some(c) = self.network.connections.get(&session).cloned() else { return };
        let silence = self.silence();
        let link = &mut self.network.links[c.host];
        let blocked = if to_coordinator { link.to_blocked_until } else { link.from_blocked_until };
        let direction = usize::from(to_coordinator);
        let lost = std::mem::take(&mut link.drop_next) || blocked > self.now + silence;
        let reorder = std::mem::take(&mut link.reorder_next);
        let slow = if self.now < link.slow.1 { link.slow.0 } else { 0 };
        if lost {
            if let Some(c) = self.network.connections.get_mut(&session) {
                c.broken = true;
            }
            self.at(silence + 5, Happening::AgentSeesEnd { session });
            return self.fell_silent(session);
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

    pub(crate) fn send_order(&mut self, session: Session, epoch: Epoch, order: Order) {
        let Some(c) = self.network.connections.get(&session).filter(|c| c.coordinator_end) else { return };
        let link = &mut self.network.links[c.host];
        if link.duplicate_order {
            // Until the next start, the order that must not be carried out twice.
            link.duplicate_order = !matches!(order, Order::Crew(_, CrewOrder::Start(_)));
            let again = order.clone();
            self.transmit(session, false, |_| Happening::ToAgent { session, epoch, order: again });
        }
        self.transmit(session, false, |_| Happening::ToAgent { session, epoch, order });
    }

    pub(crate) fn coordinator_receives(&mut self, session: Session, hello: Option<Box<Hello>>, report: Option<Report>) {
        let Some(c) = self.network.connections.get(&session).filter(|c| c.coordinator_end) else { return };
        let (index, broken) = (c.coordinator, c.broken);
        if !broken {
            self.received(index, session);
        }
        if let Some(hello) = hello {
            let ladder = hello.spec.ladder();
            self.processes[index].keep_alive.introduced(session, ladder.silence, ladder.ping);
            self.coordinator(index, Event::Joined { session, hello });
        }
        if let Some(report) = report {
            self.coordinator(index, Event::Report { session, report });
        }
    }

    pub(crate) fn agent_receives(&mut self, session: Session, epoch: Epoch, order: Order) {
        let Some(c) = self.network.connections.get(&session).filter(|c| c.agent_end) else { return };
        let (host, life) = (c.host, c.life);
        if self.hosts[host].frozen {
            return self.at(500, Happening::ToAgent { session, epoch, order });
        }
        if self.hosts[host].life == life {
            let refused = matches!(order, Order::Refused(_));
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
            self.notices_end(host, session, 1500);
        }
        let h = &mut self.hosts[host];
        if h.life == life && h.session == Some(session) {
            h.session = None;
            self.agent(host, AgentEvent::Disconnected);
            let delay = self.rng.range(20, 300);
            self.at(delay, Happening::Connect { host, life });
        }
    }

    pub(crate) fn coordinator_sees_end(&mut self, session: Session) {
        let Some(c) = self.network.connections.get_mut(&session) else { return };
        if !std::mem::take(&mut c.coordinator_end) {
            return;
        }
        let (index, other_open) = (c.coordinator, c.agent_end);
        let process = &mut self.processes[index];
        process.keep_alive.closed(session);
        process.sessions.remove(&session);
        if other_open {
            self.at(20, Happening::AgentSeesEnd { session });
        }
        self.coordinator(index, Event::Lost { session });
    }
}
