//! The coordinator's driver: receive, handle, execute. No policy lives here.

mod event_log;
mod exclusive;
mod hearing;
mod questions;
mod records;
mod watcher;

use crate::books::{Books, Owner};
use crate::detect::settings::Ready;
use crate::listening::Place;
use crate::notify::{Desk, routes::Route};
use crate::places;
use crate::store::{redb::RedbStore, writer::Writer};
use event_log::EventLog;
use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::command::{Command, Fact, Precondition};
use everstep_core::coordinator::event::{Event, StoreFailure, Version};
use everstep_core::coordinator::unlike::Finding;
use everstep_core::id::{Epoch, Generation, JobId, PersistId, Session, Step};
use everstep_core::message::Order;
use everstep_core::slow::SlowWatch;
use everstep_core::time::Time;
use everstep_planner::Problem;
use everstep_wire::envelope::{Progress, ToAgent, ToCoordinator, VERSION};
use everstep_wire::raw::Raw;
use everstep_wire::server::{Inbound, serve};
use everstep_wire::token::Token;
use records::{load, take_epoch};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc as blocking;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use watcher::Watcher;

/// How often a job's progress is recorded for the ledger.
const PROGRESS: Duration = Duration::from_secs(5);
/// How often peers are checked for silence.
const PULSE: Duration = Duration::from_millis(25);
/// An idle coordinator ends after this time.
const LINGER: Duration = Duration::from_secs(2);
/// The same while notices have not arrived yet.
const NOTICES: Duration = Duration::from_secs(60);
/// A coordinator that no agent has ever joined ends after this time.
const UNUSED: Duration = Duration::from_secs(60);

/// Why a coordinator could not start.
pub struct StartError {
    /// Exit code.
    pub code: i32,
    /// The cause and its remedy, for the user.
    pub why: String,
}

/// Returns the file in the store's directory that names the coordinator's endpoint.
pub fn endpoint_file(directory: &Path) -> PathBuf {
    directory.join("endpoint.json")
}

/// Returns the file with the facts about all jobs of a store.
pub fn events_file(directory: &Path) -> PathBuf {
    directory.join("events.jsonl")
}

enum Input {
    Server(Inbound),
    Line(Session, Option<ToCoordinator>),
    Persisted(PersistId, Result<Version, StoreFailure>),
    /// A notice that the store cannot be written any more, and why, or that it can be again.
    Store(String),
    Provisioned(JobId, u64, Result<(), String>),
    /// A detector's finding in this generation of a job.
    Unlike(JobId, Generation, Finding),
}

/// How well the ranks of one generation keep up.
#[derive(Default)]
struct Pace {
    generation: Generation,
    slow: SlowWatch,
    written: Option<Instant>,
}

struct Peer {
    orders: mpsc::UnboundedSender<ToAgent>,
    heard: Instant,
    pinged: Instant,
    silence: Duration,
    ping: Duration,
    job: Option<String>,
    owner: Option<Owner>,
    progress: Vec<Progress>,
    /// Checksum of the machine's role, see [`ToCoordinator::Samples`]; 0 until it is known.
    role: u32,
}

type StoreWrite = (PersistId, String, Vec<u8>, Precondition);

struct Driver {
    core: Coordinator,
    epoch: Epoch,
    base: (u64, Instant),
    peers: BTreeMap<Session, Peer>,
    sessions: u64,
    waiting: BTreeMap<PersistId, Vec<(Session, Order)>>,
    writer: blocking::Sender<StoreWrite>,
    inbox: mpsc::UnboundedSender<Input>,
    events: EventLog,
    records: PathBuf,
    provisioner: Option<PathBuf>,
    idle_since: Instant,
    used: bool,
    endpoint: String,
    paces: BTreeMap<JobId, Pace>,
    books: Books,
    desk: Desk,
    pulsed: Instant,
    watcher: Watcher,
}

/// Runs a coordinator at this address and port, with its store in `directory`, until it is no
/// longer needed. It plans for several jobs if they are `known`. With a `detector`, it looks for
/// machines that behave unlike their peers.
///
/// # Errors
/// Returns a [`StartError`] if it cannot start.
pub async fn run(
    (place, port): (Place, u16),
    directory: &Path,
    token_file: Option<&Path>,
    routes: Vec<Route>,
    provisioner: Option<PathBuf>,
    (known, detector): (Option<Problem>, Ready),
) -> Result<(), StartError> {
    let fail = |why: String| StartError { code: 78, why };
    let Some(_lock) = exclusive::alone(directory).await.map_err(fail)? else { return Ok(()) };
    let token = match token_file {
        Some(path) => Token::read(path),
        None => Token::at(&directory.join("token")),
    };
    let token = token.map_err(|e| fail(format!("cannot use the token: {e}")))?;
    let listener = place
        .bind(port)
        .await
        .map_err(|e| fail(format!("cannot listen on port {port}: {e}; give --rdzv-endpoint another port")))?;
    let endpoint = listener.local_addr().map_err(|e| fail(format!("cannot listen on port {port}: {e}")))?.to_string();
    let store = RedbStore::open(&directory.join("store.redb")).map_err(fail)?;
    let epoch = take_epoch(&store).map_err(|why| fail(format!("{why} (in {})", directory.display())))?;
    let records = load(&store).map_err(fail)?;
    let events = EventLog::open(&events_file(directory))
        .map_err(|e| fail(format!("cannot write {}: {e}", events_file(directory).display())))?;
    let token_file = token_file.map_or_else(|| directory.join("token"), Path::to_path_buf);
    let about =
        json!({"endpoint": endpoint, "pid": std::process::id(), "epoch": epoch.0, "token_file": Raw::from(token_file)});
    places::write_whole(&endpoint_file(directory), about.to_string().as_bytes())
        .map_err(|e| fail(format!("cannot write {}: {e}", directory.display())))?;

    let (inbox, mut inputs) = mpsc::unbounded_channel();
    let (server_inbox, mut from_server) = mpsc::unbounded_channel();
    tokio::spawn(serve(listener, token, server_inbox, |line| crate::say!("{line}")));
    let forward = inbox.clone();
    tokio::spawn(async move {
        while let Some(inbound) = from_server.recv().await {
            let _ = forward.send(Input::Server(inbound));
        }
    });
    let (writer, writes) = blocking::channel::<StoreWrite>();
    let results = inbox.clone();
    let mut records_of = Writer::new(store, directory.join("store.redb"));
    let write = move || {
        while let Ok((id, key, value, when)) = writes.recv() {
            let result = records_of.put(&key, &value, when);
            if let Some(what) = records_of.news() {
                let _ = results.send(Input::Store(what));
            }
            let _ = results.send(Input::Persisted(id, result));
        }
    };
    let thread = std::thread::Builder::new().name("everstep-store".into()).spawn(write);
    thread.map_err(|e| fail(format!("cannot start a thread: {e}; raise the limit of processes (ulimit -u)")))?;
    let watcher = Watcher::start(detector, directory.join("unlike"), inbox.clone());
    let start = (places::unix_millis(), Instant::now());
    let now = Time(start.0);
    let core = Coordinator::new(epoch, records, now);
    let mut driver = Driver {
        core: match known {
            Some(known) => core.planning(known, now),
            None => core,
        },
        epoch,
        base: start,
        peers: BTreeMap::new(),
        sessions: 0,
        waiting: BTreeMap::new(),
        writer,
        inbox,
        events,
        records: events_file(directory),
        provisioner,
        idle_since: Instant::now(),
        used: false,
        endpoint,
        paces: BTreeMap::new(),
        books: Books::default(),
        desk: Desk::open(routes, &events_file(directory)),
        pulsed: Instant::now(),
        watcher,
    };
    driver.event(Event::Tick);
    let mut pulse = tokio::time::interval(PULSE);
    loop {
        let now = driver.now();
        let deadline = driver.core.deadline(now).map_or(Duration::from_secs(3600), |at| at.since(now));
        tokio::select! {
            input = inputs.recv() => match input {
                Some(input) => driver.input(input),
                None => return Ok(()),
            },
            () = tokio::time::sleep(deadline) => driver.event(Event::Tick),
            _ = pulse.tick() => {
                if driver.pulse() {
                    let _ = std::fs::remove_file(endpoint_file(directory));
                    return Ok(());
                }
            }
        }
    }
}

impl Driver {
    fn now(&self) -> Time {
        Time(self.base.0 + u64::try_from(self.base.1.elapsed().as_millis()).unwrap_or(0))
    }

    fn input(&mut self, input: Input) {
        match input {
            Input::Server(Inbound::Attached { orders, mut lines }) => {
                self.sessions += 1;
                self.used = true;
                let session = Session(self.sessions);
                let second = Duration::from_secs(2);
                let peer = Peer {
                    orders,
                    heard: Instant::now(),
                    pinged: Instant::now(),
                    silence: second,
                    ping: second / 8,
                    job: None,
                    owner: None,
                    progress: vec![],
                    role: 0,
                };
                self.peers.insert(session, peer);
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
                    let text = std::fs::read_to_string(records).unwrap_or_default();
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
            Input::Store(what) => self.tell(&what),
            Input::Persisted(id, result) => {
                let promises = self.waiting.remove(&id).unwrap_or_default();
                if result.is_ok() {
                    for (session, order) in promises {
                        self.send(session, order);
                    }
                }
                self.event(Event::Persisted { id, result });
            }
        }
    }

    fn line(&mut self, session: Session, line: ToCoordinator) {
        self.listened(session);
        let Some(peer) = self.peers.get_mut(&session) else { return };
        match line {
            ToCoordinator::Hello { version, hello } if version == VERSION => {
                let ladder = hello.spec.ladder();
                (peer.silence, peer.ping) = (ladder.silence, ladder.ping);
                peer.job = Some(hello.spec.job.0.clone());
                peer.owner = Some((hello.spec.job.0.clone(), hello.node.clone(), hello.incarnation));
                self.event(Event::Joined { session, hello });
            }
            ToCoordinator::Hello { version, .. } => {
                let why = format!(
                    "this agent speaks version {version}, the coordinator {VERSION}; install one everstep version on all nodes"
                );
                self.send(session, Order::Refused { why, code: 78 });
            }
            ToCoordinator::Stacks { generation, stacks } => {
                if let Some(job) = peer.job.clone() {
                    self.write(&job, &json!({"Stacks": {"generation": generation, "stacks": stacks}}));
                }
            }
            ToCoordinator::Spent(accounts) => {
                if let Some(owner) = peer.owner.clone() {
                    let lines = self.books.heard(&owner, accounts);
                    self.write_all(&owner.0, lines);
                }
            }
            ToCoordinator::Report(report) => self.event(Event::Report { session, report }),
            ToCoordinator::Samples { at, role, packed } => self.sampled(session, at, role, &packed),
            ToCoordinator::Burst(looks) => {
                if let Some((job, node, _)) = peer.owner.clone() {
                    self.write(&job, &json!({"Burst": {"node": node, "looks": looks}}));
                }
            }
            ToCoordinator::Ping(progress) => {
                peer.progress = progress;
                if let Some(job) = peer.job.clone() {
                    self.progressed(session, &JobId(job));
                }
            }
        }
    }

    /// Compares ranks, and records their progress from time to time.
    fn progressed(&mut self, session: Session, id: &JobId) {
        let Some(job) = self.core.jobs().get(id) else { return };
        let (generation, now) = (job.record.generation, self.now());
        let pace = self.paces.entry(id.clone()).or_default();
        if pace.generation != generation {
            *pace = Pace { generation, ..Pace::default() };
        }
        for p in self.peers.get(&session).iter().flat_map(|p| &p.progress) {
            if let (Some(step), Some(own)) = (p.step, p.own_us) {
                pace.slow.saw(p.rank, step, own);
            }
        }
        let changes = pace.slow.changes(now);
        let behind = job.behind;
        if pace.written.is_none_or(|at| at.elapsed() >= PROGRESS) {
            pace.written = Some(Instant::now());
            self.record_progress(id);
        }
        for change in changes {
            self.event(Event::Slow { job: id.clone(), change });
        }
        if let Some((_, there)) = behind
            && let Some(step) = self.all_reached(id).filter(|step| *step >= there)
        {
            self.event(Event::Reached { job: id.clone(), step });
        }
    }

    /// Returns what the workers of a job last reported.
    fn workers(&self, id: &JobId) -> impl Iterator<Item = &Progress> {
        let of_job = self.peers.values().filter(|p| p.job.as_deref() == Some(id.0.as_str()));
        of_job.flat_map(|p| &p.progress)
    }

    /// Returns the step that all ranks of a job have completed; `None` until all ranks report one.
    fn all_reached(&self, id: &JobId) -> Option<Step> {
        let ranks = self.core.jobs().get(id)?.record.world.size() as usize;
        let steps: Vec<u64> = self.workers(id).filter_map(|w| w.step).collect();
        steps.iter().min().filter(|_| steps.len() >= ranks).map(|step| Step(*step))
    }

    /// Returns the median duration of the ranks' last steps.
    fn median_step_us(&self, id: &JobId) -> Option<u64> {
        let mut micros: Vec<u64> = self.workers(id).filter_map(|w| w.step_us).collect();
        micros.sort_unstable();
        micros.get(micros.len() / 2).copied()
    }

    /// Records for the ledger the step that all ranks of a job have reached.
    fn record_progress(&mut self, id: &JobId) {
        let Some(job) = self.core.jobs().get(id) else { return };
        let ranks = job.record.world.size();
        let workers: Vec<&Progress> = self.workers(id).collect();
        let step = workers.iter().filter_map(|w| w.step).min();
        let (Some(step), Some(step_us)) = (step, self.median_step_us(id)) else { return };
        if workers.len() < ranks as usize {
            return;
        }
        let fact = json!({"Progress": {"generation": job.record.generation, "step": step, "step_us": step_us}});
        self.write(&id.0, &fact);
    }

    fn close(&mut self, session: Session) {
        if let Some(peer) = self.peers.remove(&session) {
            if let Some(owner) = peer.owner {
                let lines = self.books.silent(&owner);
                self.write_all(&owner.0, lines);
            }
            self.event(Event::Lost { session });
        }
    }

    fn send(&mut self, session: Session, order: Order) {
        if let Some(peer) = self.peers.get(&session) {
            let _ = peer.orders.send(ToAgent::Order { epoch: self.epoch, order });
        }
    }

    fn event(&mut self, event: Event) {
        self.core.handle(self.now(), event);
        while let Some(command) = self.core.poll() {
            match command {
                Command::Send { session, order, after: None } => self.send(session, order),
                Command::Send { session, order, after: Some(id) } => {
                    self.waiting.entry(id).or_default().push((session, order));
                }
                Command::Persist { id, key, value, precondition } => {
                    let _ = self.writer.send((id, key, value, precondition));
                }
                Command::Record { job, fact } => self.record(&job, &fact),
                Command::Provision { job, request } => self.provision(job, request),
                Command::StepDown { why } => {
                    eprintln!("everstep coordinator: {why}");
                    std::process::exit(0);
                }
            }
        }
    }

    fn record(&mut self, job: &JobId, fact: &Fact) {
        if matches!(fact, Fact::IncidentOpened { .. } | Fact::Growing { .. } | Fact::Ended { .. }) {
            self.record_progress(job);
        }
        self.write(&job.0, &json!(fact));
    }

    /// Sends pings and closes silent sessions. Returns true if this coordinator should end.
    fn pulse(&mut self) -> bool {
        let now = Instant::now();
        // A peer that was not heard because this process was suspended has not been silent.
        let late = now.duration_since(self.pulsed).saturating_sub(PULSE * 2);
        self.pulsed = now;
        self.peers.values_mut().for_each(|p| p.heard = (p.heard + late).min(now));
        let silent: Vec<Session> =
            self.peers.iter().filter(|(_, p)| now.duration_since(p.heard) > p.silence).map(|(s, _)| *s).collect();
        for session in silent {
            self.close(session);
        }
        for peer in self.peers.values_mut().filter(|p| now.duration_since(p.pinged) >= p.ping) {
            peer.pinged = now;
            let _ = peer.orders.send(ToAgent::Ping);
        }
        self.keep_events();
        for (job, fact) in self.desk.say(self.now().micros()) {
            self.write(&job, &fact);
        }
        if !self.core.idle() || !self.peers.is_empty() {
            self.idle_since = now;
        }
        let linger = match () {
            () if !self.used => UNUSED,
            // The end of a job is what users most need to learn.
            () if self.desk.busy() => NOTICES,
            () => LINGER,
        };
        now.duration_since(self.idle_since) > linger
    }
}
