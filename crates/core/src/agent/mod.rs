//! The agent's state machine: one node, its workers, and the coordinator's orders.
//!
//! The contract is the same as the coordinator's. Losing the coordinator changes nothing for the
//! workers until the orphan time is over. A generation at or below [`Agent::seen`] is never started
//! (again).

pub mod command;
pub mod event;
pub mod final_step;
pub mod first_error;
mod machine_signs;
mod node_check;
pub mod observation;
mod orders;
mod refusal;
mod replicas;
mod stopping;
pub mod trainer;
pub mod watch;
mod workers;

use crate::exit_code::ExitCode;
use crate::id::{Epoch, Generation, Incarnation, NodeId, Rank, Step};
use crate::ledger::{Account, NodeLedger};
use crate::message::{Checked, CrewReport, Ended, ExitReason, Failure, Hello, Report, Running, Slot, Start};
use crate::severity::Table;
use crate::spec::JobSpec;
use crate::time::Time;
use command::{Command, CrewCommand};
use event::Event;
use first_error::FirstError;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use watch::Watch;

/// The configuration of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Id of this node.
    pub node: NodeId,
    /// This life of the agent.
    pub incarnation: Incarnation,
    /// What the job needs.
    pub spec: JobSpec,
    /// Host at which other nodes reach this one.
    pub host: String,
    /// Number of workers on this node.
    pub workers: u32,
    /// Port of the first process-group store.
    pub store_port: u16,
    /// Port for sending and fetching replicas; 0 for none.
    pub replica_port: u16,
    /// Failure domain, or empty if unknown.
    pub domain: String,
    /// Role of the workers.
    pub role: String,
    /// Newest generation found in this node's memory: numbers up to it are used, whatever the store
    /// contains. The agent holds the node lock, so no worker of those generations is left here.
    pub held: Generation,
    /// Whether the job has a name under which it can be started again.
    pub named: bool,
    /// Time between the stop signal and KILL when the job stops (`--shutdown-timeout`).
    pub shutdown_grace: Duration,
    /// Signals that stop the job instead of being passed on to the workers (`--signals-to-handle`).
    pub stop_signals: Vec<i32>,
    /// The failure table (`--failure-table`).
    pub table: Arc<Table>,
}

/// The workers of one generation.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Crew {
    generation: Generation,
    /// Number of restarts before it.
    restarts: u32,
    slot: Slot,
    /// Workers that have not exited, by local rank.
    alive: BTreeMap<u32, Watch>,
    /// Steps completed by workers that have exited, by local rank.
    exited_at: BTreeMap<u32, Option<u64>>,
    /// Failures that were reported, in this order.
    failures: Vec<Failure>,
    killing: bool,
    finished: bool,
    /// A worker that has exited had completed a new step.
    progressed: bool,
    /// Workers whose scripts are over, by local rank.
    ended: BTreeMap<u32, Ended>,
    /// Local ranks whose failure was reported.
    reported: BTreeSet<u32>,
    /// Local ranks that died of a signal that no process on this node had sent.
    killed: BTreeSet<u32>,
    /// Local ranks that have reported an uncaught exception, whatever was made of it.
    uncaught: BTreeSet<u32>,
    /// Local ranks shutting down after an exception; true: it follows from a failure elsewhere.
    raised: BTreeMap<u32, bool>,
    /// If the crew must end: the deadline of workers that are shutting themselves down.
    end_by: Option<Time>,
    /// Ranks that wait for the step to restore.
    restoring: BTreeSet<Rank>,
    /// The job is stopping: exits are not failures.
    stopping: Option<Stopping>,
    first_step_sent: bool,
    /// The step that was reported as the one the workers continue from.
    from: Option<Step>,
    replicas: replicas::Replicas,
    /// Reports that must reach the coordinator even if the connection breaks.
    unacknowledged: Vec<CrewReport>,
}

/// Workers may end on their own until a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stopping {
    until: Time,
    /// Time between TERM and KILL for those that did not.
    grace: Duration,
}

/// The state machine of one node.
#[derive(Clone, Debug)]
pub struct Agent {
    config: Config,
    epoch: Epoch,
    seen: Generation,
    crew: Option<Crew>,
    /// Generation of the latest crew, which may be gone.
    latest: Option<Generation>,
    /// A start that waits until older workers have ended.
    queued: Option<(Generation, Start)>,
    connected: bool,
    /// Since when there has been no coordinator.
    alone_since: Time,
    /// The run of the job that it was last welcomed to, by the agent that began it.
    began: Option<Incarnation>,
    /// Workers were asked to hold at a step.
    holding: bool,
    /// A warm process was requested.
    warmed: bool,
    refused_since: Option<Time>,
    /// The job is refused, which no restart changes.
    refusal: Option<refusal::Refusal>,
    last_reached: Option<Step>,
    signs: machine_signs::Signs,
    /// The latest part in a check of the nodes, and its result.
    checked: Option<((Time, u32), Option<Checked>)>,
    ledger: NodeLedger,
    /// Time of the latest event, and of the latest tick.
    now: Time,
    ticked: Time,
    signals: u32,
    /// The stop that was asked for or ordered.
    stop: Option<stopping::Stage>,
    over: Option<ExitReason>,
    first_error: Option<FirstError>,
    exited: bool,
    out: VecDeque<Command>,
    /// The planted bug to exhibit, if any.
    #[cfg(feature = "planted")]
    pub planted: Option<crate::planted_bugs::Bug>,
}

impl Agent {
    /// Creates an agent that has just started.
    #[must_use]
    pub fn new(config: Config, now: Time) -> Self {
        let config_held = config.held;
        let ledger = NodeLedger::new(config.workers, now.micros());
        Agent {
            config,
            epoch: Epoch(0),
            seen: config_held,
            crew: None,
            latest: None,
            queued: None,
            connected: false,
            alone_since: now,
            began: None,
            holding: false,
            warmed: false,
            refused_since: None,
            refusal: None,
            last_reached: None,
            signs: machine_signs::Signs::default(),
            checked: None,
            ledger,
            now,
            ticked: now,
            signals: 0,
            stop: None,
            over: None,
            first_error: None,
            exited: false,
            out: VecDeque::new(),
            #[cfg(feature = "planted")]
            planted: None,
        }
    }

    /// Returns the first message for a new connection.
    #[must_use]
    pub fn hello(&self) -> Hello {
        Hello {
            node: self.config.node.clone(),
            incarnation: self.config.incarnation,
            spec: self.config.spec.clone(),
            host: self.config.host.clone(),
            workers: self.config.workers,
            store_port: self.config.store_port,
            replica_port: self.config.replica_port,
            domain: self.config.domain.clone(),
            role: self.config.role.clone(),
            seen: self.seen,
            began: self.began,
            running: self.crew.as_ref().map(|c| Running {
                generation: c.generation,
                failures: c.failures.clone(),
                finished: c.finished,
                progressed: c.progressed(),
                ended: c.ended.values().cloned().collect(),
            }),
            stop: self.known_stop(),
            shutdown_grace_ms: u64::try_from(self.config.shutdown_grace.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Returns the highest generation started or fenced.
    #[must_use]
    pub fn seen(&self) -> Generation {
        self.seen
    }

    /// Handles one event. Never blocks, and never panics on any input.
    pub fn handle(&mut self, now: Time, event: Event) {
        if self.exited {
            return;
        }
        self.now = now;
        match event {
            Event::Connected => self.connected = true,
            Event::Disconnected => {
                if self.connected {
                    self.alone_since = now;
                    // The coordinator that asked to hold is gone; the next one asks again.
                    self.hold(None);
                }
                self.connected = false;
            }
            // A coordinator that does not run cannot have formed a world without this node.
            Event::CoordinatorStuck if !self.connected => self.alone_since = now,
            Event::CoordinatorStuck => {}
            Event::Order { epoch, order } => self.order(now, epoch, order),
            Event::Signal { signal } => self.signal(now, signal),
            Event::Signed(sign) => self.signed(now, sign),
            Event::Checked(answer) => self.checked(answer),
            Event::Refused(reason) => self.refused(now, reason),
            Event::Tick => self.tick(now),
            Event::Crew(generation, event) if self.runs(generation) => self.crew_event(now, event),
            // Its workers are gone.
            Event::Crew(..) => {}
        }
        self.pursue_stop(now);
    }

    /// Returns the accounts of this node's places: the latest generations, the current one last.
    #[must_use]
    pub fn accounts(&self, now: Time) -> Vec<Account> {
        self.ledger.accounts(now.micros())
    }

    /// Returns whether no part of that time is missing or counted twice.
    #[must_use]
    pub fn accounts_are_whole(&self, now: Time) -> bool {
        self.ledger.is_whole(now.micros())
    }

    /// Returns the next command, or `None` if there is none.
    pub fn poll(&mut self) -> Option<Command> {
        self.out.pop_front()
    }

    /// Returns when to call [`Agent::handle`] with [`Event::Tick`]; this may already be past.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        let alone = [self.alone_since.after(self.config.spec.ladder().orphan), self.gives_up_at()];
        let orphan = alone.into_iter().filter(|_| !self.connected);
        let stop = self.crew.as_ref().and_then(|c| c.stopping.map(|s| s.until).filter(|_| !c.killing));
        let fence = self.crew.as_ref().and_then(|c| c.end_by.filter(|_| !c.killing));
        orphan
            .chain(stop)
            .chain(fence)
            .chain(self.refusal_until())
            .chain(self.stop_deadline())
            .filter(|at| *at > self.ticked)
            .min()
    }

    fn send(&mut self, report: Report) {
        self.out.push_back(Command::Send(report));
    }

    /// Sends a report about the crew.
    fn report(&mut self, report: CrewReport) {
        if let Some(crew) = &self.crew {
            self.send(Report::Crew(crew.generation, report));
        }
    }

    /// Sends a report about the crew now and after every reconnection, until it is acknowledged.
    fn report_surely(&mut self, report: CrewReport) {
        if let Some(crew) = &mut self.crew {
            crew.unacknowledged.push(report.clone());
        }
        self.report(report);
    }

    fn command(&mut self, generation: Generation, command: CrewCommand) {
        self.out.push_back(Command::Crew(generation, command));
    }

    /// Requests a warm process, once: later restarts find it ready.
    fn warm(&mut self) {
        if !std::mem::replace(&mut self.warmed, true) {
            self.out.push_back(Command::Warm);
        }
    }

    fn runs(&self, generation: Generation) -> bool {
        self.crew.as_ref().is_some_and(|c| c.generation == generation)
    }

    fn acknowledge(&mut self, covered: impl Fn(&CrewReport) -> bool) {
        if let Some(crew) = &mut self.crew {
            crew.unacknowledged.retain(|r| !covered(r));
        }
    }

    fn tick(&mut self, now: Time) {
        self.ticked = now;
        self.end_refused(now);
        let ladder = self.config.spec.ladder();
        if !self.connected && self.over.is_none() && now >= self.alone_since.after(ladder.orphan) {
            self.orphaned(now);
        }
        if self.crew.as_ref().is_some_and(|c| c.end_by.is_some_and(|at| now >= at)) {
            self.kill(ladder.fence_grace);
        }
        if let Some(crew) = &self.crew
            && let Some(Stopping { grace, .. }) = crew.stopping.filter(|s| now >= s.until)
            && !crew.killing
        {
            self.kill(grace);
        }
    }

    /// Returns when an agent without a coordinator stops waiting for one.
    fn gives_up_at(&self) -> Time {
        let orphan = self.alone_since.after(self.config.spec.ladder().orphan);
        orphan.after(Duration::from_millis(self.config.spec.join_timeout_ms))
    }

    /// Ends the workers, as others may have replaced them; a new coordinator may resume the job.
    fn orphaned(&mut self, now: Time) {
        let ladder = self.config.spec.ladder();
        let waited = ladder.orphan.as_secs();
        if self.began.is_none() {
            let why = format!(
                "no coordinator answered within {waited} s; check --rdzv-endpoint, and that the node it names is up"
            );
            return self.end(now, ExitReason { code: ExitCode::Unavailable.number(), why });
        }
        if now >= self.gives_up_at() {
            let waited = now.since(self.alone_since).as_secs();
            let why = format!(
                "no coordinator for {waited} s; the checkpoints in memory stay on this node; start the job again to \
                 resume from them"
            );
            return self.end(now, ExitReason { code: ExitCode::Requeue.number(), why });
        }
        self.queued = None;
        if self.crew.as_ref().is_none_or(|c| c.killing || c.finished) {
            return;
        }
        let patience = self.config.spec.join_timeout_ms / 1000;
        let what = format!(
            "no coordinator for {waited} s: stopping the workers on this node, because others may have replaced them; \
             the job continues from memory if the coordinator is back within {patience} s (--join-timeout)"
        );
        self.out.push_back(Command::Say { what });
        self.kill(ladder.fence_grace);
    }

    fn end(&mut self, now: Time, reason: ExitReason) {
        self.queued = None;
        let code = reason.code;
        self.over.get_or_insert(reason);
        let ladder = self.config.spec.ladder();
        match &mut self.crew {
            // Other ranks may be failing right now: their tracebacks and error files matter, too.
            Some(crew)
                if code == ExitCode::Failed.number()
                    && crew.stopping.is_none()
                    && !crew.killing
                    && !crew.alive.is_empty() =>
            {
                crew.stopping = Some(Stopping { until: now.after(ladder.last_words), grace: ladder.fence_grace });
            }
            Some(_) => self.kill(if code == 0 { Duration::ZERO } else { ladder.fence_grace }),
            None => self.exit(),
        }
    }

    fn exit(&mut self) {
        if let Some(reason) = self.over.clone() {
            self.exited = true;
            // A finished or nameless job is never continued; for others, the newest state is worth
            // keeping.
            let discard_memory = reason.code == 0 || !self.config.named;
            self.out.push_back(Command::Exit { reason, discard_memory, first_error: self.first_error });
        }
    }
}
