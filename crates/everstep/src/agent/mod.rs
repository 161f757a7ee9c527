//! The agent's driver: it receives events, hands them to the core, and executes the core's
//! commands. No policy lives here.

pub mod agent_file;
pub mod connection;
mod console;
pub mod counters;
mod crew;
pub mod external;
pub mod file_timer;
mod final_save;
mod guard_connection;
mod inject;
mod input;
pub mod kernel_log;
pub mod launch;
mod leftovers;
mod listen;
mod machine_samples;
mod macros;
mod memory_watch;
mod node_check;
mod numa;
mod own_slots;
mod ownership;
mod pace;
mod parity;
mod persist_queue;
mod pinned;
mod remote_shard;
mod replicas;
mod slot_files;
mod stacks;
pub mod streams;
mod warm_up;
mod worker_sample;
mod worker_words;
mod workers;

use crate::guard::protocol::Request as GuardRequest;
use crate::listening::Place;
use crate::tcp_store::PgStore;
use connection::Target;
use crew::Crew;
use everstep_core::agent::command::{Command, CrewCommand};
use everstep_core::agent::event::{CrewEvent, Event};
use everstep_core::agent::first_error::FirstError;
use everstep_core::agent::{Agent, Config};
use everstep_core::id::{Generation, Rank, Step};
use everstep_core::message::{Check, CrewOrder, ExitReason, Order, Restore, ShardWritten};
use everstep_core::progress::RankProgress;
use everstep_core::severity::Table;
use everstep_core::time::Time;
use everstep_wire::envelope::{ToAgent, ToCoordinator, VERSION};
use everstep_wire::worker::Reply;
use final_save::FinalSave;
use guard_connection::start_guard;
pub use input::Input;
use launch::Template;
use persist_queue::PersistQueue;
use replicas::Replicas;
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{mpsc, oneshot};

/// How long the guard gets to exit.
const GUARD_END: Duration = Duration::from_secs(3);
/// How often the coordinator receives this node's time account.
const ACCOUNT: Duration = Duration::from_secs(2);

/// How an agent ended.
pub struct End {
    /// Exit code of `everstep run`.
    pub code: i32,
    pub why: String,
    /// Error file of the worker that failed first on this node, and that worker's exit code;
    /// negative for a signal.
    pub first_error: Option<(std::path::PathBuf, i32)>,
    /// The user has said not to wait for storage.
    pub hurried: bool,
}

struct Driver {
    core: Agent,
    start: Instant,
    template: Template,
    inbox: mpsc::UnboundedSender<Input>,
    link: Option<mpsc::UnboundedSender<ToCoordinator>>,
    guard: OwnedWriteHalf,
    guard_outbox: Vec<u8>,
    store: PgStore,
    target: Target,
    replicas: Replicas,
    crew: Option<Crew>,
    restores: BTreeMap<Rank, oneshot::Sender<Reply>>,
    persist_queue: PersistQueue,
    memory: memory_watch::MemoryWatch,
    claims: ownership::Claims,
    final_save: FinalSave,
    end: Option<End>,
    /// The state in memory is of no use to the next attempt.
    discard: bool,
    /// The latest generation that had workers here.
    latest: Generation,
    /// The latest progress of each of them, including workers that have exited.
    progress: BTreeMap<u32, RankProgress>,
    /// Number of workers on this node.
    workers: u32,
    /// Number of restarts of the job so far.
    restarts: u32,
    /// This agent has started workers at least once.
    started: bool,
    /// Some of them have used a checkpoint manager.
    checkpointed: bool,
    /// A process with torch imported is ready.
    warm: bool,
    /// By local rank, the variables of the latest crew that differ from this process's environment.
    own_variables: BTreeMap<u32, BTreeMap<String, String>>,
    table: Arc<Table>,
    silenced: inject::Silenced,
    ring: counters::host_sampler::Ring,
    /// Performs this node's part in node checks. Created by the first check.
    checker: Option<mpsc::UnboundedSender<Check>>,
    /// When the coordinator last received the time account.
    accounted: Instant,
    /// Checksum of the machine's role, as last sent to this coordinator.
    role: u32,
    /// The job is over.
    over: bool,
    /// A stop signal has arrived.
    stopping: bool,
    /// A signal arrived after the end of the job.
    impatient: bool,
}

/// Runs an agent until its job is over.
///
/// # Errors
/// Fails if the guard or the sockets cannot be set up.
pub async fn run(
    mut config: Config,
    template: Template,
    place: Place,
    target: Target,
    lock: &File,
) -> std::io::Result<End> {
    let (inbox, mut inputs) = mpsc::unbounded_channel();
    let (guard, mut guard_process) = start_guard(&inbox, lock)?;
    let control = (config.store_port > 0).then(|| target.clone());
    let store = PgStore::start(&place, config.store_port, control).await?;
    config.store_port = store.port();
    let directories = vec![template.memory.clone(), crate::paths::node_spill(&template.job, &template.node)];
    // SAFETY: `lock` is this node's; the previous agent had it until it ended.
    let replicas = unsafe { Replicas::start(&place, &template.job, directories)? };
    config.replica_port = replicas.port;
    config.held = replicas.newest_generation();
    listen::to_workers(&template, &inbox)?;
    let memory = memory_watch::MemoryWatch::of(&template.memory);
    if let Some(path) = &template.timer_file {
        file_timer::serve(path, guard_process.id())?;
    }
    listen::to_signals(&inbox)?;
    let (ladder, workers, table) = (config.spec.ladder(), config.workers, config.table.clone());
    let ring = counters::host_sampler::Ring::default();
    listen::to_machine(&template, &table, &ring, &inbox);
    tokio::spawn(connection::run(target.clone(), inbox.clone()));
    let mut driver = Driver {
        target,
        replicas,
        core: Agent::new(config, Time(0)),
        start: Instant::now(),
        template,
        inbox,
        link: None,
        guard,
        guard_outbox: Vec::new(),
        store,
        crew: None,
        restores: BTreeMap::new(),
        persist_queue: PersistQueue::default(),
        memory,
        claims: ownership::Claims::default(),
        final_save: FinalSave::default(),
        end: None,
        discard: false,
        latest: Generation(0),
        progress: BTreeMap::new(),
        workers,
        started: false,
        checkpointed: false,
        restarts: 0,
        warm: false,
        own_variables: BTreeMap::new(),
        table,
        silenced: None,
        ring,
        checker: None,
        accounted: Instant::now(),
        role: 0,
        over: false,
        stopping: false,
        impatient: false,
    };
    let mut end = driver.serve(&mut inputs, ladder.ping).await;
    driver.wind_down(&mut end, &mut inputs).await;
    let waited = tokio::task::spawn_blocking(move || guard_process.wait());
    let _ = tokio::time::timeout(GUARD_END, waited).await;
    Ok(end)
}

impl Driver {
    /// Handles what reaches the agent, until the job is over.
    async fn serve(&mut self, inputs: &mut mpsc::UnboundedReceiver<Input>, ping_every: Duration) -> End {
        let mut ping = tokio::time::interval(ping_every);
        let mut look = tokio::time::interval(ping_every.min(Duration::from_millis(100)));
        loop {
            let deadline = self.core.deadline();
            let deadline = deadline.map_or(Duration::from_hours(1), |at| at.since(self.now()));
            tokio::select! {
                input = inputs.recv() => if let Some(input) = input { self.input(input).await },
                () = tokio::time::sleep(deadline) => self.event(Event::Tick).await,
                _ = ping.tick() => self.ping(false),
                _ = look.tick() => self.look().await,
            }
            if let Some(end) = self.end.take() {
                return end;
            }
        }
    }

    /// Makes the newest step durable if the job failed, and removes what is no longer needed.
    async fn wind_down(&mut self, end: &mut End, inputs: &mut mpsc::UnboundedReceiver<Input>) {
        if end.code != 0 {
            let (own, run) = (self.replicas.own().clone(), self.replicas.holder.run());
            end.hurried = !std::mem::take(&mut self.final_save).persist(own, run, self.impatient, inputs).await;
        }
        // If the job continues elsewhere, its directory must not look free.
        self.claims.end(self.over).await;
        if self.discard || !slot_files::holds_slots(&self.template.job, &self.template.node) {
            slot_files::discard(&self.template.job, &self.template.node);
        }
        let _ = everstep_wire::private::remove(&self.template.socket);
        let _ = tokio::time::timeout(GUARD_END, self.store.drained()).await;
        let _ = self.guard.shutdown().await;
    }

    /// Writes the requests collected for the guard.
    async fn flush_guard(&mut self) {
        let bytes = std::mem::take(&mut self.guard_outbox);
        if !bytes.is_empty() {
            let _ = self.guard.write_all(&bytes).await;
        }
    }

    fn now(&self) -> Time {
        Time(u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// A shard could not be written. The workers of an earlier generation no longer wait for it.
    fn not_written(&mut self, local_rank: u32, generation: Generation, captured: Generation, step: Step, why: &str) {
        if self.runs(generation) && captured == generation {
            self.not_durable(Some(local_rank), step, why);
        } else {
            crate::say_warning!("{why}");
        }
    }

    /// Handles a line of the coordinator.
    async fn line(&mut self, line: ToAgent) {
        match line {
            ToAgent::Ping => {}
            ToAgent::Inject(injection) => self.inject(injection).await,
            ToAgent::Stacks => self.ask_for_stacks(),
            ToAgent::Burst => {
                let looks = self.ring.lock().map(|ring| ring.iter().copied().collect()).unwrap_or_default();
                if let Some(link) = &self.link {
                    let _ = link.send(ToCoordinator::Burst(looks));
                }
            }
            ToAgent::Order { epoch, order } => {
                crate::log::exchange::order(&order);
                self.over |= matches!(order, Order::End(_));
                if matches!(order, Order::Crew(_, CrewOrder::Fence { .. })) {
                    // Whoever has ended by itself is known before all are ended.
                    self.look().await;
                }
                self.event(Event::Order { epoch, order }).await;
            }
        }
    }

    async fn input(&mut self, input: Input) {
        match input {
            Input::Connected(lines) if self.silenced.is_some() => self.silenced = Some(lines),
            Input::Disconnected if self.silenced.is_some() => {}
            Input::Connected(lines) => {
                if let Ok(token) = self.target.token() {
                    self.replicas.set_token(token);
                }
                let hello = Box::new(self.core.hello());
                let _ = lines.send(ToCoordinator::Hello { version: VERSION, hello });
                self.link = Some(lines);
                self.role = 0;
                self.event(Event::Connected).await;
            }
            Input::Disconnected => {
                self.link = None;
                self.event(Event::Disconnected).await;
            }
            Input::Line(_) if self.silenced.is_some() => {}
            Input::Line(line) => self.line(line).await,
            Input::Stacks(generation, stacks) => {
                if let Some(link) = &self.link {
                    let _ = link.send(ToCoordinator::Stacks { generation, stacks });
                }
            }
            Input::Sampled(at, kind, samples) => self.sampled(at, &kind, samples),
            Input::Heard => self.silenced = None,
            Input::Fatal { code, why } => self.fatal(code, why),
            Input::Guard(event) => self.guard_says(event).await,
            Input::Worker(request, answer) => self.worker_asks(request, answer).await,
            Input::Shard { local_rank, generation, captured, step, directory, result } => match result {
                Ok(shard) => {
                    let written = ShardWritten { step, captured, directory, shard };
                    self.crew_event(generation, CrewEvent::ShardWritten(written)).await;
                }
                Err(why) => self.not_written(local_rank, generation, captured, step, &why.to_string()),
            },
            Input::Published(generation, step, result) => match result {
                Ok(()) => self.crew_event(generation, CrewEvent::Published(step)).await,
                Err(why) if self.runs(generation) => self.not_durable(None, step, &why.to_string()),
                Err(why) => crate::say_warning!("{why}"),
            },
            Input::Signal(signal) => {
                if self.core.stops_on(signal)
                    && !self.over
                    && self.started
                    && !std::mem::replace(&mut self.stopping, true)
                {
                    let what = match &self.crew {
                        Some(crew) if crew.has_checkpoints() => ": the newest step is kept",
                        Some(_) => ": the script may save what it has",
                        None => "",
                    };
                    crate::say!("stopping{what}; the same signal again stops at once");
                }
                // Whoever signals a job that is over does not want to wait for the disk.
                self.impatient |= self.over;
                self.event(Event::Signal { signal }).await;
            }
            Input::Owned(owned) => self.owned(*owned).await,
            Input::Core(event) => self.event(event).await,
        }
        self.flush_guard().await;
    }

    fn fatal(&mut self, code: i32, why: String) {
        // While workers run, an unreachable coordinator is only a reason to keep trying.
        if self.crew.is_none() {
            self.end = Some(End { code, why, first_error: None, hurried: false });
        } else {
            crate::say_warning!("{why}");
        }
    }

    fn ping(&mut self, now: bool) {
        if let Some(link) = &self.link {
            let warm = self.warm;
            let ranks = self.progress.values().map(|p| RankProgress { warm, ..p.clone() }).collect();
            let _ = link.send(ToCoordinator::Ping { generation: self.latest, ranks });
            // Accounts are totals: the next one includes what is not sent now.
            if now || self.accounted.elapsed() >= ACCOUNT {
                self.accounted = Instant::now();
                let _ = link.send(ToCoordinator::Spent(self.core.accounts(self.now())));
            }
        }
    }

    /// Hands an event to the core and executes its commands until there are no more.
    async fn event(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            self.core.handle(self.now(), event);
            while let Some(command) = self.core.poll() {
                events.extend(self.execute(command));
            }
        }
        self.flush_guard().await;
    }

    async fn crew_event(&mut self, generation: Generation, event: CrewEvent) {
        self.event(Event::Crew(generation, event)).await;
    }

    fn step_is_durable(&mut self, step: Step) {
        self.final_save.durable(step);
        if let Some(crew) = &self.crew {
            crew.durable(step);
            self.replicas.durable(step, crew.slot.workers);
        }
        let pinned = self.pinned_steps();
        self.persist_queue.published(step, &pinned);
    }

    fn execute(&mut self, command: Command) -> Option<Event> {
        crate::log::exchange::command(&command);
        match command {
            Command::Send(report) => {
                self.announce(&report);
                if let Some(link) = &self.link {
                    let _ = link.send(ToCoordinator::Report(report));
                }
            }
            Command::Crew(generation, command) => return self.execute_for_crew(generation, command),
            Command::Say { what } => crate::say!("{what}"),
            Command::Warm => self.warm_up(),
            Command::Check(check) => self.check(check),
            Command::Forward { signal } => drop(self.ask_guard(&GuardRequest::Signal { signal })),
            Command::Exit { reason: ExitReason { code, why }, discard_memory, first_error } => {
                self.ping(true);
                if code == 0 && self.started {
                    self.announce_end();
                }
                self.discard = discard_memory;
                let error_file =
                    |of: FirstError| (self.template.streams.error_file(of.restarts, of.local_rank), of.code);
                self.end = Some(End { code, why, first_error: first_error.map(error_file), hurried: false });
            }
        }
        None
    }

    fn execute_for_crew(&mut self, generation: Generation, command: CrewCommand) -> Option<Event> {
        let crew = self.crew.as_ref().filter(|c| c.generation == generation);
        match command {
            CrewCommand::Spawn(start) => return self.spawn(generation, &start),
            CrewCommand::Kill { grace } => {
                let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
                let _ = self.ask_guard(&GuardRequest::End { generation, grace_ms });
            }
            CrewCommand::Stacks => self.ask_for_stacks(),
            CrewCommand::StopAt(stop) => crew.into_iter().for_each(|c| c.request_stop(stop)),
            CrewCommand::PersistAt(step) => crew.into_iter().for_each(|c| c.persist_at(step)),
            CrewCommand::SnapshotEvery(change) => crew.into_iter().for_each(|c| c.snapshot_every(change)),
            CrewCommand::HoldAt(step) => crew.into_iter().for_each(|c| c.hold_at(step)),
            CrewCommand::Restore(Restore { step, sources, persist, found, .. }) => {
                self.answer_restores(generation, step, persist, &sources, found);
            }
            CrewCommand::Replicate { plan, round, base } => {
                self.replicate(generation, round.next, plan, base, round.round);
            }
            CrewCommand::Committed { step, keeps, keeps_parity } => {
                if let Some(crew) = crew {
                    let keeps = replicas::Keeps { shards: &keeps, parity: &keeps_parity };
                    self.replicas.committed(generation, step, keeps, crew.slot.workers, crew.world_size);
                    crew.replicated(step);
                }
            }
            CrewCommand::HeldByAll(step) => self.final_save.held_by_all(generation, step),
            CrewCommand::Publish(publish) => self.publish(generation, publish),
            CrewCommand::Durable(step) => self.step_is_durable(step),
        }
        None
    }
}
