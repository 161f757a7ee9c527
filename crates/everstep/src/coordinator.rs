//! The coordinator's driver: receive, handle, execute. No policy lives here.

mod endpoint;
mod event_log;
mod exclusive;
mod questions;
mod records;
mod watcher;

use crate::detect::settings::Ready;
use crate::events_file;
use crate::listening::Place;
use crate::notify::{Dispatcher, routes::Route};
use crate::paths;
use crate::store::{redb::RedbStore, writer::Writer};
use crate::time_ledger::{Owner, TimeLedger};
pub use endpoint::EndpointFile;
use event_log::EventLog;
use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::command::{Command, Fact, Precondition};
use everstep_core::coordinator::event::{Event, StoreFailure, Version};
use everstep_core::coordinator::finding::Finding;
use everstep_core::coordinator::request::NotProvisioned;
use everstep_core::exit_code::ExitCode;
use everstep_core::id::{Epoch, Generation, JobId, PersistId, Session};
use everstep_core::idle_exit::{IdleExit, Needs};
use everstep_core::keep_alive::{CHECK_EVERY, Due, KeepAlive, WakingClock};
use everstep_core::message::{ExitReason, Order};
use everstep_core::time::Time;
use everstep_planner::Problem;
use everstep_wire::envelope::{ToAgent, ToCoordinator, VERSION};
use everstep_wire::raw::Raw;
use everstep_wire::server::{Inbound, serve};
use everstep_wire::token::Token;
use records::{load, take_epoch};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc as blocking;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tracing::Span;
use watcher::Watcher;

/// Why a coordinator could not start.
pub struct StartError {
    /// Exit code.
    pub code: i32,
    /// The cause and its remedy, for the user.
    pub why: String,
}

enum Input {
    Server(Inbound),
    Line(Session, Option<ToCoordinator>),
    Persisted(PersistId, Result<Version, StoreFailure>),
    /// A notice that the store cannot be written any more (`failing`), and why, or that it can be
    /// again.
    Store {
        what: String,
        failing: bool,
    },
    Provisioned(JobId, u64, Result<(), NotProvisioned>),
    /// A detector's finding in this generation of a job.
    Unlike(JobId, Generation, Finding),
}

struct Peer {
    orders: mpsc::UnboundedSender<ToAgent>,
    job: Option<String>,
    owner: Option<Owner>,
    /// Checksum of the machine's role, see [`ToCoordinator::Samples`]; 0 until it is known.
    role: u32,
}

impl Peer {
    /// Returns the span of what is exchanged with this agent, in its job's current generation.
    fn span(&self, session: Session, core: &Coordinator) -> Span {
        let (job, node) = self.owner.as_ref().map(|(job, node, _)| (job.as_str(), node.0.as_str())).unzip();
        let generation = job.and_then(|name| core.jobs().get(name)).map(|job| job.record().generation.0);
        tracing::info_span!("session", session = session.0, job, node, generation)
    }
}

type StoreWrite = (PersistId, String, Vec<u8>, Precondition);

struct Driver {
    core: Coordinator,
    epoch: Epoch,
    base: (u64, Instant),
    /// The clock of the core: for its jobs, no time passes while this process is suspended.
    clock: WakingClock,
    peers: BTreeMap<Session, Peer>,
    sessions: u64,
    waiting: BTreeMap<PersistId, Vec<(Session, Order)>>,
    writer: blocking::Sender<StoreWrite>,
    inbox: mpsc::UnboundedSender<Input>,
    events: EventLog,
    records: PathBuf,
    provisioner: Option<PathBuf>,
    keep_alive: KeepAlive,
    idle_exit: IdleExit,
    endpoint: String,
    ledger: TimeLedger,
    dispatcher: Dispatcher,
    watcher: Watcher,
}

/// What a coordinator is started with.
pub struct Setup<'a> {
    /// The address to listen at.
    pub place: Place,
    /// The port to listen at; 0 for any.
    pub port: u16,
    /// The directory of its store.
    pub directory: &'a Path,
    /// The file with the token; `None`: a file in `directory`.
    pub token_file: Option<&'a Path>,
    /// Where notices are sent.
    pub routes: Vec<Route>,
    /// The program that provides machines.
    pub provisioner: Option<PathBuf>,
    /// The cluster and the jobs to plan for.
    pub known: Option<Problem>,
    /// The detector, which finds machines that behave unlike their peers.
    pub detector: Ready,
}

/// Runs a coordinator until it is no longer needed.
///
/// # Errors
/// Returns a [`StartError`] if it cannot start.
pub async fn run(setup: Setup<'_>) -> Result<(), StartError> {
    let Setup { place, port, directory, token_file, routes, provisioner, known, detector } = setup;
    crate::signals::outlive();
    let fail = |why: String| StartError { code: ExitCode::Refused.number(), why };
    let lock = exclusive::alone(directory).await.map_err(|e| fail(e.to_string()))?;
    let Some(_lock) = lock else { return Ok(()) };
    let token = match token_file {
        Some(path) => Token::read(path),
        None => Token::at(&directory.join("token")),
    };
    let token = token.map_err(|e| fail(format!("cannot use the token: {e}")))?;
    let listener = place
        .bind(port)
        .await
        .map_err(|e| fail(format!("cannot listen on port {port}: {e}; use another port in --rdzv-endpoint")))?;
    let endpoint = listener.local_addr().map_err(|e| fail(format!("cannot listen on port {port}: {e}")))?.to_string();
    let store = RedbStore::open(&directory.join("store.redb")).map_err(|e| fail(e.to_string()))?;
    let epoch = take_epoch(&store).map_err(|why| fail(format!("{why} (in {})", directory.display())))?;
    crate::log::set("epoch", epoch.0);
    let records = load(&store).map_err(|e| fail(e.to_string()))?;
    let events = EventLog::open(&events_file::path(directory))
        .map_err(|e| fail(format!("cannot write {}: {e}", events_file::path(directory).display())))?;
    let token_file = token_file.map_or_else(|| directory.join("token"), Path::to_path_buf);
    let about =
        EndpointFile { endpoint: endpoint.clone(), pid: std::process::id(), epoch, token_file: Raw::from(token_file) };
    about.write(directory).map_err(|e| fail(format!("cannot write {}: {e}", directory.display())))?;

    let (inbox, mut inputs) = mpsc::unbounded_channel();
    let (server_inbox, mut from_server) = mpsc::unbounded_channel();
    tokio::spawn(serve(listener, token, server_inbox, |line| crate::say_warning!("{line}")));
    let forward = inbox.clone();
    tokio::spawn(async move {
        while let Some(inbound) = from_server.recv().await {
            let _ = forward.send(Input::Server(inbound));
        }
    });
    let records_of = Writer::new(store, directory.join("store.redb"));
    let writer = write_in_thread(records_of, inbox.clone())
        .map_err(|e| fail(format!("cannot start a thread: {e}; raise the limit of processes (ulimit -u)")))?;
    let watcher = Watcher::start(detector, directory.join("unlike"), inbox.clone());
    let start = (paths::unix_millis(), Instant::now());
    let now = Time(start.0);
    let core = Coordinator::new(epoch, records, now);
    let mut driver = Driver {
        core: match known {
            Some(known) => core.planning(known, now),
            None => core,
        },
        epoch,
        base: start,
        clock: WakingClock::new(now),
        peers: BTreeMap::new(),
        sessions: 0,
        waiting: BTreeMap::new(),
        writer,
        inbox,
        events,
        records: events_file::path(directory),
        provisioner,
        keep_alive: KeepAlive::new(now),
        idle_exit: IdleExit::new(now),
        endpoint,
        ledger: TimeLedger::default(),
        dispatcher: Dispatcher::open(routes, &events_file::path(directory)),
        watcher,
    };
    driver.serve(&mut inputs).await;
    let _ = std::fs::remove_file(EndpointFile::path(directory));
    Ok(())
}

/// Starts the thread that writes records. Returns the channel for what it is to write.
fn write_in_thread(
    mut records: Writer,
    results: mpsc::UnboundedSender<Input>,
) -> std::io::Result<blocking::Sender<StoreWrite>> {
    let (writer, writes) = blocking::channel::<StoreWrite>();
    let write = move || {
        while let Ok((id, key, value, when)) = writes.recv() {
            let result = records.put(&key, &value, when);
            if let Some(what) = records.news() {
                let _ = results.send(Input::Store { what, failing: records.failing() });
            }
            let _ = results.send(Input::Persisted(id, result));
        }
    };
    std::thread::Builder::new().name("everstep-store".into()).spawn(write)?;
    Ok(writer)
}

impl Driver {
    /// Handles what reaches the coordinator, until no job needs it any more.
    async fn serve(&mut self, inputs: &mut mpsc::UnboundedReceiver<Input>) {
        self.event(Event::Tick);
        let mut pulse = tokio::time::interval(CHECK_EVERY);
        loop {
            let now = self.now_of_core();
            let deadline = self.core.deadline(now).map_or(Duration::from_hours(1), |at| at.since(now));
            tokio::select! {
                input = inputs.recv() => match input {
                    Some(input) => self.input(input),
                    None => return,
                },
                () = tokio::time::sleep(deadline) => {
                    // What has arrived may be what was waited for.
                    self.drain(inputs);
                    self.event(Event::Tick);
                }
                _ = pulse.tick() => {
                    if self.pulse() {
                        return;
                    }
                }
            }
        }
    }

    fn now(&self) -> Time {
        Time(self.base.0 + u64::try_from(self.base.1.elapsed().as_millis()).unwrap_or(0))
    }

    /// Returns the time for the core.
    fn now_of_core(&mut self) -> Time {
        let now = self.now();
        self.clock.read(now)
    }

    /// Handles what has arrived so far.
    fn drain(&mut self, inputs: &mut mpsc::UnboundedReceiver<Input>) {
        for _ in 0..inputs.len() {
            match inputs.try_recv() {
                Ok(input) => self.input(input),
                Err(_) => return,
            }
        }
    }

    fn input(&mut self, input: Input) {
        match input {
            Input::Server(Inbound::Attached { orders, mut lines }) => {
                self.sessions += 1;
                let session = Session(self.sessions);
                self.idle_exit.used();
                self.keep_alive.opened(self.now(), session);
                tracing::debug!(session = session.0, "an agent has connected");
                self.peers.insert(session, Peer { orders, job: None, owner: None, role: 0 });
                let inbox = self.inbox.clone();
                tokio::spawn(async move {
                    while let Some(line) = lines.recv().await {
                        let _ = inbox.send(Input::Line(session, Some(line)));
                    }
                    let _ = inbox.send(Input::Line(session, None));
                });
            }
            Input::Server(Inbound::Status(answer)) => {
                let _ = answer.send(self.status());
            }
            Input::Server(Inbound::Metrics(answer)) => {
                let (live, now, records) = (self.live(), self.now().micros(), self.records.clone());
                // The records of a long run are large, so reading them must not delay other
                // requests.
                tokio::task::spawn_blocking(move || {
                    let text = events_file::read(&records).unwrap_or_default();
                    let _ = answer.send(crate::metrics::page(&live, &text, now));
                });
            }
            Input::Server(Inbound::Stop { job, done }) => {
                let job = JobId(job);
                let _ = done.send(self.core.jobs().contains_key(&job));
                self.event(Event::StopJob { job, signal: 15 });
            }
            Input::Server(Inbound::Stacks { job, done }) => {
                let _ = done.send(self.ask_for_stacks(&job));
            }
            Input::Server(Inbound::Inject { job, injection, done }) => {
                let _ = done.send(self.inject(&JobId(job), injection));
            }
            Input::Unlike(job, generation, finding) => self.unlike(job, generation, finding),
            Input::Provisioned(job, id, result) => self.event(Event::Provisioned { job, id, result }),
            Input::Server(Inbound::Approve { job, request, done }) => {
                let _ = done.send(self.approve(JobId(job), request));
            }
            Input::Line(session, Some(line)) => self.line(session, line),
            Input::Line(session, None) => self.close(session),
            Input::Store { what, failing: true } => self.warn_users(&what),
            Input::Store { what, failing: false } => self.notify_users(&what),
            Input::Persisted(id, result) => {
                let orders = self.waiting.remove(&id).unwrap_or_default();
                if result.is_ok() {
                    for (session, order) in orders {
                        self.send(session, order);
                    }
                }
                self.event(Event::Persisted { id, result });
            }
        }
    }

    fn line(&mut self, session: Session, line: ToCoordinator) {
        if self.keep_alive.received(self.now(), session) {
            self.event(Event::Late { session });
        }
        let Some(peer) = self.peers.get_mut(&session) else { return };
        match line {
            ToCoordinator::Hello { version, hello } if version == VERSION => {
                let ladder = hello.spec.ladder();
                self.keep_alive.introduced(session, ladder.silence, ladder.ping);
                peer.job = Some(hello.spec.job.0.clone());
                peer.owner = Some((hello.spec.job.0.clone(), hello.node.clone(), hello.incarnation));
                self.event(Event::Joined { session, hello });
            }
            ToCoordinator::Hello { version, .. } => {
                let why = format!(
                    "this agent uses protocol version {version}, but the coordinator uses {VERSION}; install the same \
                     everstep version on all nodes"
                );
                self.send(session, Order::Refused(ExitReason { code: ExitCode::Refused.number(), why }));
            }
            ToCoordinator::Stacks { generation, stacks } => {
                if let Some(job) = peer.job.clone() {
                    self.write(&job, Fact::Stacks { generation, stacks });
                }
            }
            ToCoordinator::Spent(accounts) => {
                if let Some(owner) = peer.owner.clone() {
                    let lines = self.ledger.update(&owner, accounts);
                    self.write_all(&owner.0, lines);
                }
            }
            ToCoordinator::Report(report) => {
                let _about = peer.span(session, &self.core).entered();
                crate::log::exchange::report(&report);
                self.event(Event::Report { session, report });
            }
            ToCoordinator::Samples { at, role, packed } => self.sampled(session, at, role, &packed),
            ToCoordinator::Burst(looks) => {
                if let Some((job, node, _)) = peer.owner.clone() {
                    self.write(&job, Fact::Burst { node, looks });
                }
            }
            ToCoordinator::Ping { generation, ranks } => self.event(Event::Progress { session, generation, ranks }),
        }
    }

    fn close(&mut self, session: Session) {
        self.keep_alive.closed(session);
        if let Some(peer) = self.peers.remove(&session) {
            peer.span(session, &self.core).in_scope(|| tracing::debug!("the connection is closed"));
            if let Some(owner) = peer.owner {
                let lines = self.ledger.silent(&owner);
                self.write_all(&owner.0, lines);
            }
            self.event(Event::Lost { session });
        }
    }

    fn send(&mut self, session: Session, order: Order) {
        if let Some(peer) = self.peers.get(&session) {
            let _about = peer.span(session, &self.core).entered();
            crate::log::exchange::order(&order);
            let _ = peer.orders.send(ToAgent::Order { epoch: self.epoch, order });
        }
    }

    fn event(&mut self, event: Event) {
        let now = self.now_of_core();
        self.core.handle(now, event);
        while let Some(command) = self.core.poll() {
            match command {
                Command::Send { session, order, after: None } => self.send(session, order),
                Command::Send { session, order, after: Some(id) } => {
                    self.waiting.entry(id).or_default().push((session, order));
                }
                Command::Persist { id, key, value, precondition } => {
                    let _ = self.writer.send((id, key, value, precondition));
                }
                Command::Record { job, fact } => self.write(&job.0, fact),
                Command::Provision { job, request } => self.provision(job, request),
                Command::StepDown { why } => {
                    crate::say_warning!("{why}");
                    crate::log::flush();
                    std::process::exit(0);
                }
            }
        }
    }

    /// Sends pings and closes silent sessions. Returns true if this coordinator should end.
    fn pulse(&mut self) -> bool {
        let now = self.now();
        for due in self.keep_alive.check(now) {
            match due {
                Due::Close(session) => self.close(session),
                Due::Ping(session) => {
                    if let Some(peer) = self.peers.get(&session) {
                        let _ = peer.orders.send(ToAgent::Ping);
                    }
                }
            }
        }
        self.keep_events();
        let news = self.dispatcher.send_due(now.micros());
        news.facts.into_iter().for_each(|(job, fact)| self.write(&job, fact));
        news.warnings.iter().for_each(|what| self.warn_users(what));
        let needs = Needs { job: !self.core.idle() || !self.peers.is_empty(), notices: self.dispatcher.busy() };
        self.idle_exit.is_over(now, needs)
    }
}
