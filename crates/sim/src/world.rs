//! The event loop of a simulation: one queue, one clock, one seed.

use crate::control::{Process, Store};
use crate::fault::{Fault, FaultCounts};
use crate::host::Host;
use crate::network::Network;
use crate::oracle::{Oracle, Violation};
use crate::trace::{Keep, Trace};
use everstep_core::agent::event::Event as AgentEvent;
use everstep_core::coordinator::command::Precondition;
use everstep_core::coordinator::event::{Event, StoreFailure, Version};
use everstep_core::coordinator::job::Phase;
use everstep_core::coordinator::request::NotProvisioned;
use everstep_core::id::{Epoch, Generation, JobId, NodeId, PersistId, Session, Step};
use everstep_core::invariant::InvariantId;
use everstep_core::message::{Checked, Hello, Order, Replication, Report, Tier};
use everstep_core::spec::{CheckWhen, JobSpec, Policy, RestartBudget};
use everstep_rng::Rng;
use std::collections::{BTreeMap, BTreeSet};

/// One deadline in `LATE_ONE_OF` is noticed `LATE_MS` milliseconds late.
const LATE_ONE_OF: u64 = 5;
const LATE_MS: u64 = 30;

/// What to simulate.
#[derive(Clone, Debug)]
pub struct Options {
    /// The seed, which decides everything else.
    pub seed: u64,
    /// The simulated time in minutes.
    pub minutes: u64,
    /// The number of machines that run an agent.
    pub nodes: usize,
    /// The number of faults to inject.
    pub faults: usize,
    /// Gives the job a small restart budget, which the faults will use up.
    pub tight_budget: bool,
    /// How often a rank dies between its own seal and its neighbour's.
    pub between_seals: usize,
    /// What to keep of the trace.
    pub trace: Keep,
    /// The bug to switch on.
    #[cfg(feature = "planted")]
    pub planted: Option<everstep_core::planted_bugs::Bug>,
}

impl Options {
    /// Returns the usual options: 16 nodes, 32 minutes, 24 faults.
    #[must_use]
    pub fn usual(seed: u64) -> Self {
        Options {
            seed,
            minutes: 32,
            nodes: 16,
            faults: 24,
            tight_budget: false,
            between_seals: 0,
            trace: Keep::Nothing,
            #[cfg(feature = "planted")]
            planted: None,
        }
    }
}

/// The result of a simulation.
#[derive(Debug)]
pub struct Outcome {
    /// Broken invariants, in the order of detection.
    pub violations: Vec<Violation>,
    /// The number of injected faults by kind.
    pub faults: FaultCounts,
    /// The hash of the whole trace.
    pub hash: u64,
    /// The number of events handled.
    pub events: u64,
    /// The number of generations whose workers ran.
    pub generations: usize,
    /// The number of ranks that were ordered to restore, by tier.
    pub restores: BTreeMap<Tier, u64>,
    /// Incidents blamed on a machine at fault, on another machine, and on none.
    pub blames: (u64, u64, u64),
    /// Completed checks of the nodes, and nodes that they found faulty.
    pub checks: (u64, u64),
    /// The lines of the trace, if kept.
    pub trace: Vec<String>,
}

/// A step on its way to other machines, or into parity.
#[derive(Clone, Debug)]
pub struct Sending {
    pub plan: Replication,
    pub base: Option<Step>,
    pub round: u64,
    /// How long to wait for a machine that has not begun the round, in milliseconds.
    pub patience: u64,
}

/// A scheduled event.
#[derive(Debug)]
pub(crate) enum Happening {
    ToAgent { session: Session, epoch: Epoch, order: Order },
    ToCoordinator { session: Session, hello: Option<Box<Hello>>, report: Option<Report> },
    AgentSeesEnd { session: Session },
    CoordinatorSeesEnd { session: Session },
    Connect { host: usize, life: u64 },
    AgentTick { host: usize, life: u64 },
    Checked { host: usize, life: u64, answer: Checked },
    CoordinatorTick { index: usize },
    CheckConnections { index: usize },
    Killed { host: usize, generation: Generation },
    Sent { host: usize, life: u64, generation: Generation, step: Option<Step>, sending: Sending },
    Apply { index: usize, id: PersistId, key: String, value: Vec<u8>, when: Precondition },
    Persisted { index: usize, id: PersistId, result: Result<Version, StoreFailure> },
    Provisioned { index: usize, job: JobId, id: u64, result: Result<(), NotProvisioned> },
    Superseded { index: usize },
    StartAgent { host: usize },
    StartCoordinator,
    GuardDone { host: usize },
    Thaw { host: usize },
    WorkerDies { host: usize },
    WorkerErrs { host: usize, local_rank: u32, text: &'static str },
    Ails { host: usize, generation: Generation },
    Mended { host: usize },
    Signs { host: usize, line: &'static str, times: u32 },
    Workload,
    BetweenSeals,
    Inject(Fault),
}

/// Everything that is to happen, in order.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    queue: BTreeMap<(u64, u64), Happening>,
    order: u64,
    /// The number of events that have happened.
    past: u64,
}

impl Agenda {
    fn add(&mut self, at: u64, happening: Happening) {
        self.order += 1;
        self.queue.insert((at, self.order), happening);
    }

    fn next(&mut self) -> Option<(u64, Happening)> {
        let ((at, _), happening) = self.queue.pop_first()?;
        self.past += 1;
        Some((at, happening))
    }
}

/// A cluster during the simulation.
pub(crate) struct World {
    pub now: u64,
    pub options: Options,
    pub rng: Rng,
    pub agenda: Agenda,
    pub hosts: Vec<Host>,
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
}

/// Runs one simulation.
#[must_use]
pub fn run(options: &Options) -> Outcome {
    let mut world = World::new(options.clone());
    world.prepare();
    let end = options.minutes * 60_000;
    while let Some((at, happening)) = world.agenda.next() {
        if at > end || !world.oracle.violations.is_empty() {
            break;
        }
        world.now = at;
        world.happen(happening);
        world.check();
    }
    world.check_liveness();
    world.oracle.blames.close();
    let blames = &world.oracle.blames;
    let blames = (blames.right, blames.wrong, blames.unknown);
    Outcome {
        violations: world.oracle.violations,
        faults: world.counts,
        hash: world.trace.hash(),
        events: world.agenda.past,
        generations: world.oracle.started.len(),
        restores: std::mem::take(&mut world.oracle.tiers),
        blames,
        checks: world.oracle.checks,
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
            spares: 0,
            restarts: RestartBudget::Exactly(u32::try_from(budget).unwrap_or(u32::MAX)),
            detect_timeout_ms: 2000,
            join_timeout_ms: 20 * 60_000,
            policy: if options.seed % 3 == 1 { Policy::Act } else { Policy::Observe },
            check: if options.seed % 5 == 2 { CheckWhen::First } else { CheckWhen::OnTrouble },
        };
        let spares = 4;
        let mut hosts: Vec<Host> = (0..options.nodes).map(|n| Host::new(NodeId(n.to_string()))).collect();
        hosts.extend((0..spares).map(|_| {
            let mut h = Host::new(NodeId("0".into()));
            h.up = false;
            h
        }));
        let quiet_at = options.minutes * 60_000 - 6 * 60_000;
        World {
            now: 0,
            rng,
            agenda: Agenda::default(),
            network: Network::new(hosts.len()),
            hosts,
            processes: Vec::new(),
            store: Store::default(),
            spec,
            budget,
            oracle: Oracle::default(),
            trace: Trace::new(options.trace),
            counts: FaultCounts::new(),
            durable: None,
            quiet_at,
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
        for _ in 0..self.options.between_seals {
            let at = self.rng.range(20_000, self.quiet_at);
            self.at(at, Happening::BetweenSeals);
        }
        // The last fault: a machine is lost for good, so that a spare has to take its place.
        self.at(self.quiet_at - 1, Happening::Inject(Fault::NodeGone));
    }

    /// Returns the number of milliseconds after which a silent connection counts as lost.
    pub(crate) fn silence(&self) -> u64 {
        u64::try_from(self.spec.ladder().silence.as_millis()).unwrap_or(u64::MAX)
    }

    /// Schedules an event `delay` milliseconds from now.
    pub(crate) fn at(&mut self, delay: u64, happening: Happening) {
        self.agenda.add(self.now + delay, happening);
    }

    /// Returns when a process that sleeps until `deadline` runs again. Like a real driver, it knows
    /// only the deadline that followed from its latest event. A busy machine wakes some late, so
    /// that another event may come before the tick.
    pub(crate) fn wakes(&self, deadline: u64) -> u64 {
        let late = if deadline.is_multiple_of(LATE_ONE_OF) { LATE_MS } else { 0 };
        (deadline + late).max(self.now + 1)
    }

    fn happen(&mut self, happening: Happening) {
        if !matches!(happening, Happening::Workload | Happening::CheckConnections { .. }) {
            self.trace.line(self.now, format_args!("{happening:?}"));
        }
        match happening {
            Happening::ToAgent { session, epoch, order } => self.agent_receives(session, epoch, order),
            Happening::ToCoordinator { session, hello, report } => self.coordinator_receives(session, hello, report),
            Happening::AgentSeesEnd { session } => self.agent_sees_end(session),
            Happening::CoordinatorSeesEnd { session } => self.coordinator_sees_end(session),
            Happening::Connect { host, life } => self.connect(host, life),
            Happening::AgentTick { host, life } => {
                if self.hosts[host].life == life && self.hosts[host].wake_at == Some(self.now) {
                    self.hosts[host].wake_at = None;
                    self.agent(host, AgentEvent::Tick);
                }
            }
            Happening::CoordinatorTick { index } => {
                if self.processes[index].wake_at == Some(self.now) {
                    self.processes[index].wake_at = None;
                    self.coordinator(index, Event::Tick);
                }
            }
            Happening::CheckConnections { index } => self.check_connections(index),
            Happening::Killed { host, generation } => self.killed(host, generation),
            Happening::Sent { host, life, generation, step, sending } => {
                self.sent(host, life, generation, step, sending);
            }
            Happening::Apply { index, id, key, value, when } => self.apply(index, id, &key, value, when),
            Happening::Provisioned { index, job, id, result } => {
                self.coordinator(index, Event::Provisioned { job, id, result });
            }
            Happening::Persisted { index, id, result } => self.persisted(index, id, result),
            Happening::Superseded { index } => self.coordinator(index, Event::Superseded),
            Happening::StartAgent { host } => self.start_agent(host),
            Happening::StartCoordinator => self.start_coordinator(false),
            Happening::GuardDone { host } => {
                self.hosts[host].crews.clear();
                self.hosts[host].guard_ending = false;
            }
            Happening::Thaw { host } => self.hosts[host].frozen = false,
            Happening::WorkerDies { host } => self.worker_dies(host, 0),
            Happening::WorkerErrs { host, local_rank, text } => self.worker_errs(host, local_rank, text),
            Happening::Ails { host, generation } => self.ails(host, generation),
            Happening::Checked { host, life, answer } => self.checked(host, life, answer),
            Happening::Mended { host } => self.mended(host),
            Happening::Signs { host, line, times } => self.signs(host, line, times),
            Happening::Workload => {
                self.workload();
                self.end_unneeded_coordinators();
                self.at(1000, Happening::Workload);
            }
            Happening::BetweenSeals => self.dies_between_seals(),
            Happening::Inject(fault) => self.inject(fault),
        }
    }

    fn check(&mut self) {
        self.oracle.look(self.now, &self.hosts);
        let lost = self.hosts.iter().enumerate().find_map(|(host, h)| Some((h, self.attached_but_lost(host, h)?)));
        if let Some((host, session)) = lost {
            let what = format!("node {} is attached on session {session} but counted as lost", host.node);
            self.oracle.violations.push(Violation { invariant: InvariantId::LiveNodeIsMember, at: self.now, what });
        }
    }

    /// Returns the session of a host that is open at both ends, but whose node does not count as a
    /// member although it joined on this very connection.
    fn attached_but_lost(&self, index: usize, host: &Host) -> Option<Session> {
        let session = host.session?;
        let c = self.network.connections.get(&session).filter(|c| c.coordinator_end && c.agent_end)?;
        let process = self.processes.get(c.coordinator).filter(|p| p.alive)?;
        let node = process.core.jobs().get(&self.spec.job)?.nodes().get(&host.node)?;
        let lost = node.session.is_none() && node.hello.incarnation.0 % 100 == index as u64 + 1;
        (lost && process.core.knows(session)).then_some(session)
    }

    /// Checks INV-06 at the end, a while after the last fault.
    fn check_liveness(&mut self) {
        if !self.oracle.violations.is_empty() {
            return;
        }
        let Some(process) = self.processes.iter().rev().find(|p| p.alive) else { return };
        let Some(job) = process.core.jobs().get(&self.spec.job) else { return };
        // A machine with a broken GPU is of no use, even if it is attached.
        let well = self.hosts.iter().filter(|h| h.agent.is_some() && h.session.is_some() && h.faults.gpu.is_none());
        // If two machines use the same name, one of them is being refused.
        let usable = well.map(|h| &h.node).collect::<BTreeSet<_>>().len();
        if usable < self.spec.nodes_min as usize {
            // The job waits for other machines.
            return;
        }
        let full = u32::try_from(usable).unwrap_or(0).min(self.spec.nodes_max);
        // A machine that returns after the job has failed starts it anew and waits for the others.
        let failed = self.hosts.iter().any(|h| h.exited.as_ref().is_some_and(|(code, _)| *code == 1));
        let budget_used = u64::from(job.record().restarts()) >= self.budget || (failed && self.options.tight_budget);
        let what = match job.phase() {
            Phase::Training { .. } if job.record().world.slots.len() as u32 >= self.spec.nodes_min => {
                let generation = job.record().generation;
                let crews = self.hosts.iter().flat_map(|h| &h.crews);
                let n: u32 = crews
                    .filter(|c| c.generation == generation && c.able_to_train() && c.training)
                    .map(|c| c.workers)
                    .sum();
                let size = job.record().world.size();
                let nodes = u32::try_from(job.record().world.slots.len()).unwrap_or(u32::MAX);
                let may_grow = job.growth().all_are_able() && job.growth().not_before().0 < self.now;
                match () {
                    () if n != size => Some(format!("{n} of {size} workers train")),
                    () if nodes < full && may_grow => Some(format!("{nodes} nodes train, {full} could")),
                    () => None,
                }
            }
            _ if budget_used => None,
            phase => Some(format!("{phase:?}, reason {:?}, {full} nodes could train", job.reason())),
        };
        if let Some(what) = what {
            let violation = Violation { invariant: InvariantId::FullSizeAfterQuiet, at: self.now, what };
            self.oracle.violations.push(violation);
        }
    }
}
