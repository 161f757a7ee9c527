//! A coordinator with a store and a clock.

use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::command::{Command, Fact};
use everstep_core::coordinator::event::{Event, StoreFailure};
use everstep_core::coordinator::job::{Job, Phase};
use everstep_core::coordinator::request::Request;
use everstep_core::id::{Epoch, Generation, Incarnation, JobId, NodeId, Rank, Session, Step};
use everstep_core::message::{Cause, CrewOrder, CrewReport, Failure, Hello, Order, Outcome, Report, Running, Stopped};
use everstep_core::severity::Table;
use everstep_core::spec::{JobSpec, RestartBudget};
use everstep_core::time::Time;

/// A job on some nodes; node `n` uses session `n + 1`.
pub struct Scene {
    pub core: Coordinator,
    pub now: u64,
    pub version: u64,
    pub sent: Vec<Order>,
    /// Orders to check, with the node that received each.
    pub asked: Vec<(u64, Order)>,
    pub facts: Vec<Fact>,
    /// Requests about machines.
    pub provisions: Vec<Request>,
    /// No write to the store succeeds.
    pub store_fails: bool,
    /// The record in the store.
    pub stored: Vec<u8>,
    epoch: u64,
}

/// Returns the hello of a fresh node.
pub fn fresh(node: u64, incarnation: u64, workers: u32, spec: JobSpec) -> Hello {
    Hello {
        node: NodeId(node.to_string()),
        incarnation: Incarnation(incarnation),
        spec,
        host: format!("h{node}"),
        workers,
        store_port: 1,
        replica_port: 7,
        domain: String::new(),
        role: String::new(),
        seen: Generation(0),
        began: None,
        running: None,
        stop: None,
        shutdown_grace_ms: 0,
    }
}

impl Scene {
    pub fn new() -> Self {
        let core = Coordinator::new(Epoch(1), vec![], Time(0));
        Scene {
            core,
            now: 0,
            version: 0,
            sent: vec![],
            asked: vec![],
            facts: vec![],
            provisions: vec![],
            store_fails: false,
            stored: vec![],
            epoch: 1,
        }
    }

    /// The coordinator dies, and another one starts with what the store has.
    pub fn restarts(&mut self) {
        self.epoch += 1;
        let record = serde_json::from_slice(&self.stored).unwrap();
        self.core = Coordinator::new(Epoch(self.epoch), vec![(record, self.version)], Time(self.now));
        self.event(Event::Tick);
    }

    /// A node of the first generation comes back to a coordinator that has restarted.
    pub fn returns(&mut self, node: u64, incarnation: u64, spec: JobSpec, running: Option<Running>) {
        let began = Some(self.job().record().began);
        let change = |hello: &mut Hello| *hello = Hello { seen: Generation(1), began, running, ..hello.clone() };
        self.join_with(node, incarnation, 1, spec, change);
    }

    pub fn event(&mut self, event: Event) {
        self.now += 10;
        let mut next = Some(event);
        while let Some(event) = next.take() {
            self.core.handle(Time(self.now), event);
            while let Some(command) = self.core.poll() {
                match command {
                    Command::Send { session, order: order @ Order::Check(_), .. } => {
                        self.asked.push((session.0 - 1, order));
                    }
                    Command::Send { after: Some(_), .. } if self.store_fails => {}
                    Command::Send { order, .. } => self.sent.push(order),
                    Command::Record { fact, .. } => self.facts.push(fact),
                    Command::Persist { id, .. } if self.store_fails => {
                        next = Some(Event::Persisted { id, result: Err(StoreFailure::Unavailable) });
                    }
                    Command::Persist { id, value, .. } => {
                        self.version += 1;
                        self.stored = value;
                        next = Some(Event::Persisted { id, result: Ok(self.version) });
                    }
                    Command::Provision { request, .. } => self.provisions.push(request),
                    Command::StepDown { .. } => {}
                }
            }
        }
    }

    /// Advances the clock in ticks of at most 100 ms.
    pub fn passes(&mut self, milliseconds: u64) {
        let until = self.now + milliseconds;
        while self.now < until {
            self.now = (self.now + 100).min(until);
            self.event(Event::Tick);
        }
    }

    pub fn spec(nodes: (u32, u32), restarts: RestartBudget) -> JobSpec {
        JobSpec {
            job: JobId("j".into()),
            nodes_min: nodes.0,
            nodes_max: nodes.1,
            node_unit: 1,
            spares: 0,
            restarts,
            detect_timeout_ms: 2000,
            join_timeout_ms: 600_000,
            policy: everstep_core::spec::Policy::Observe,
            check: everstep_core::spec::CheckWhen::Never,
        }
    }

    pub fn join(&mut self, node: u64, incarnation: u64, workers: u32, spec: JobSpec) {
        self.join_running(node, incarnation, workers, spec, None);
    }

    /// Joins with workers that still run.
    pub fn join_running(&mut self, node: u64, incarnation: u64, workers: u32, spec: JobSpec, running: Option<Running>) {
        let seen = running.as_ref().map_or(Generation(0), |r| r.generation);
        let change = |hello: &mut Hello| *hello = Hello { seen, running, ..hello.clone() };
        self.join_with(node, incarnation, workers, spec, change);
    }

    /// Joins with a hello that differs from that of a fresh node.
    pub fn join_with(
        &mut self,
        node: u64,
        incarnation: u64,
        workers: u32,
        spec: JobSpec,
        change: impl FnOnce(&mut Hello),
    ) {
        let mut hello = fresh(node, incarnation, workers, spec);
        change(&mut hello);
        self.event(Event::Joined { session: Session(node + 1), hello: Box::new(hello) });
    }

    /// The node's connection breaks, and it does not come back.
    pub fn leaves(&mut self, node: u64) {
        self.event(Event::Lost { session: Session(node + 1) });
    }

    pub fn says(&mut self, node: u64, report: Report) {
        self.event(Event::Report { session: Session(node + 1), report });
    }

    /// Lets each of these nodes report that its workers have ended.
    pub fn stopped(&mut self, nodes: impl IntoIterator<Item = u64>) {
        let generation = self.job().record().generation;
        for node in nodes {
            self.says(node, Report::Crew(generation, CrewReport::Stopped(Stopped { store_port: 1, reached: None })));
        }
    }

    pub fn started(&self) -> Vec<u64> {
        let start =
            |o: &Order| if let Order::Crew(generation, CrewOrder::Start(_)) = o { Some(generation.0) } else { None };
        let mut all: Vec<u64> = self.sent.iter().filter_map(start).collect();
        all.dedup();
        all
    }

    pub fn job(&self) -> &Job {
        self.core.jobs().values().next().unwrap()
    }

    pub fn world(&self) -> Vec<String> {
        self.job().record().world.slots.iter().map(|s| s.node.0.clone()).collect()
    }

    pub fn over(&self) -> Option<(i32, String)> {
        match self.job().phase() {
            Phase::Over { code, why } => Some((*code, why.clone())),
            _ => None,
        }
    }
}

/// Returns the failure of a rank that ended after `step` steps, as its agent reports it.
pub fn failure(rank: u32, outcome: Outcome, text: &str, step: u64) -> Failure {
    let cause = Cause::Exited(outcome);
    let verdict = Table::built_in().judge(&cause, text);
    let message = text.into();
    Failure {
        rank: Rank(rank),
        local_rank: 0,
        pid: 100 + rank,
        cause,
        message,
        step: Some(Step(step)),
        total: None,
        passes: 0,
        progressed: true,
        verdict,
    }
}
