//! Workers as the driver sees them: launched through the guard, sampled, and answered.

use super::crew::{Crew, Worker};
use super::launch::board_path;
use super::persist_queue::WrittenStep;
use super::replicas::watch;
use super::slot_files;
use super::{Driver, End, worker_sample, worker_words};
use crate::guard::protocol::{Event as GuardEvent, LocalWorker, ProcessExit, Request as GuardRequest, WorkerEvent};
use everstep_checkpoint::step_board::{Board, Word};
use everstep_core::agent::event::{CrewEvent, Event, Words, WorkerExit};
use everstep_core::exit_code::ExitCode;
use everstep_core::id::{Generation, Step};
use everstep_core::message::{Holdings, Outcome, Publish, RankOffers, Redundancy, Start};
use everstep_wire::worker::{Ask, Reply, Request, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Pause before another attempt to get a port for the process-group store.
const RENEW: Duration = Duration::from_millis(200);

const RESTORED_TWICE: &str = "restore() was called twice in this process: under everstep run, a rank has one \
    CheckpointManager and restores once per start; pass all objects to one manager. To return to an earlier step, exit \
    with an error and call restore(step=…) after the restart";

/// A request that is too long for the guard.
#[derive(Debug, thiserror::Error)]
#[error("cannot send a request to this node's guard process: {0}")]
pub(super) struct Unaskable(#[from] std::io::Error);

impl Driver {
    pub(super) fn spawn(&mut self, generation: Generation, start: &Start) -> Option<Event> {
        let (restarts, slot) = (start.restarts, &start.place.slot);
        crate::log::set("generation", generation.0);
        self.announce_start(start);
        self.leave_earlier_runs(start.began);
        self.store.open();
        self.latest = generation;
        self.progress.clear();
        let mut crew = Crew {
            generation,
            slot: slot.clone(),
            restarts,
            workers: BTreeMap::new(),
            world_size: start.place.world_size,
            nodes: start.place.group_world_size,
            began: start.began,
            over: Arc::default(),
            watched: BTreeSet::new(),
            asked: BTreeSet::new(),
            restored: None,
        };
        let mut launches = Vec::new();
        let mut failure = None;
        if let Err(e) = self.template.streams.prepare(restarts, slot.workers) {
            failure = Some((0, format!("cannot write logs to {}: {e}", self.template.streams.logs.display())));
        }
        for local in 0..slot.workers {
            match Board::create(&board_path(&self.template.memory, local), generation.0) {
                Ok(board) => {
                    crew.workers.insert(local, Worker { pid: 0, board, destination: None, error: None });
                }
                Err(e) => failure = Some((local, format!("cannot write {}: {e}", self.template.memory.display()))),
            }
            match self.template.launch(generation, start, local) {
                Ok(launch) => launches.push(launch),
                Err(why) => failure = Some((local, why.to_string())),
            }
        }
        self.final_save.begin(&crew);
        self.crew = Some(crew);
        if let Some((local_rank, message)) = failure {
            return Some(Event::Crew(generation, CrewEvent::SpawnFailed { local_rank, message }));
        }
        self.own_variables = self.template.own_variables(&launches);
        for launch in launches {
            let local_rank = launch.worker.local_rank;
            if let Err(why) = self.ask_guard(&GuardRequest::Launch(Box::new(launch))) {
                let message = format!("cannot be started: {why}");
                return Some(Event::Crew(generation, CrewEvent::SpawnFailed { local_rank, message }));
            }
        }
        let held = self.replicas.begin(generation, start.place.slot.workers);
        Some(Event::Crew(generation, CrewEvent::Holds(Holdings { held, parity: self.replicas.holder.parity_held() })))
    }

    async fn worker_event(&mut self, worker: LocalWorker, what: WorkerEvent) {
        let LocalWorker { generation, local_rank } = worker;
        match what {
            WorkerEvent::Launched { pid } => {
                let crew = self.crew.as_mut().filter(|c| c.generation == generation);
                if let Some(worker) = crew.and_then(|c| c.workers.get_mut(&local_rank)) {
                    worker.pid = pid;
                }
            }
            WorkerEvent::NotLaunched { why } => {
                self.crew_event(generation, CrewEvent::SpawnFailed { local_rank, message: why }).await;
            }
            WorkerEvent::Exited(exit) => self.worker_exited(worker, exit).await,
        }
    }

    /// Reports how far all workers are, before the end of one of them: together, their last steps
    /// show whether the job had made good an earlier incident. Also notices which of them have
    /// ended.
    async fn report_last_steps(&mut self) {
        self.look().await;
        self.ping(false);
    }

    async fn worker_exited(&mut self, worker: LocalWorker, exit: ProcessExit) {
        let LocalWorker { generation, local_rank } = worker;
        let ProcessExit { pid, outcome, asked, last_lines } = exit;
        self.report_last_steps().await;
        let crew = self.crew.as_mut().filter(|c| c.generation == generation);
        let worker = crew.and_then(|c| c.workers.get_mut(&local_rank).map(|w| (w, c.restarts)));
        let words = match worker {
            Some((worker, restarts)) if outcome != Outcome::Code(0) => {
                worker.pid = 0;
                let file = self.template.streams.error_file(restarts, local_rank);
                worker_words::of(&file, &last_lines, worker.error.as_deref(), outcome)
            }
            Some((worker, _)) => {
                worker.pid = 0;
                Words::default()
            }
            None => Words::default(),
        };
        let exit = WorkerExit { local_rank, pid, outcome, asked, words };
        self.crew_event(generation, CrewEvent::WorkerExited(exit)).await;
    }

    pub(super) async fn guard_says(&mut self, event: Option<GuardEvent>) {
        match event {
            Some(GuardEvent::Worker { worker, what }) => self.worker_event(worker, what).await,
            Some(GuardEvent::Warmed { why_not: None }) => self.warm = true,
            Some(GuardEvent::Warmed { why_not: Some(why) }) => {
                self.warm = false;
                crate::say_warning!("restarts will be slower, because each worker imports torch again: {why}");
            }
            Some(GuardEvent::Gone { generation }) => {
                self.checkpointed |= self.crew.take().is_some_and(|crew| crew.has_manager());
                self.persist_queue.clear();
                self.restores.clear();
                if let Err(e) = self.store.renew().await {
                    return self.renew_later(generation, &e);
                }
                self.store.short = false;
                let store_port = self.store.port();
                self.crew_event(generation, CrewEvent::WorkersGone { store_port }).await;
            }
            None => {
                // Without its guard, this agent cannot keep its promises. End, so that the next one
                // begins clean.
                let why = "the guard process of this node was killed; start this node again".to_owned();
                self.end = Some(End { code: ExitCode::Requeue.number(), why, first_error: None, hurried: false });
            }
        }
    }

    /// Looks at all workers.
    pub(super) async fn look(&mut self) {
        self.watch_memory();
        let locals: Vec<u32> = self.crew.iter().flat_map(|c| c.workers.keys().copied()).collect();
        for local in locals {
            self.look_at(local).await;
        }
    }

    async fn look_at(&mut self, local_rank: u32) {
        let Some(crew) = &self.crew else { return };
        let Some(worker) = crew.workers.get(&local_rank).filter(|w| w.pid != 0) else { return };
        let seen = worker_sample::observe(worker.pid, &worker.board);
        let (generation, pid) = (crew.generation, worker.pid);
        let rank = crew.slot.first_rank.0 + local_rank;
        self.progress.insert(local_rank, worker_sample::progress(rank, pid, &worker.board, &seen));
        if let Some(to) = worker.destination.clone() {
            self.persist_pinned(generation, local_rank, &to);
        }
        self.crew_event(generation, CrewEvent::Sample { local_rank, pid, seen }).await;
    }

    pub(super) fn runs(&self, generation: Generation) -> bool {
        self.crew.as_ref().is_some_and(|c| c.generation == generation)
    }

    pub(super) fn not_durable(&mut self, local_rank: Option<u32>, step: Step, why: &str) {
        self.persist_queue.fail(local_rank, step, why);
        if let Some(crew) = &self.crew {
            crew.not_durable(local_rank, step, why);
        }
    }

    pub(super) fn publish(&mut self, generation: Generation, publish: Publish) {
        let Publish { step, captured, directory, shards } = publish;
        let Some(crew) = &self.crew else { return };
        let to = match captured == generation {
            true => crew.workers.values().find_map(|w| w.destination.as_ref()),
            // This node writes a shard of it. The workers may save elsewhere by now.
            false => self.persist_queue.destination_of_left(captured, step),
        };
        let Some(to) = to else { return };
        let mark = to.mark(captured, crew.restarts);
        let (target, keep) = (to.target, to.keep);
        let written = WrittenStep { generation, captured, step, mark, directory, shards, target, keep };
        self.persist_queue.publish(written, &self.inbox);
    }

    /// Queues a request to the guard, sent with the next flush.
    pub(super) fn ask_guard(&mut self, request: &GuardRequest) -> Result<(), Unaskable> {
        let bytes = everstep_wire::frame::encode_within(request, everstep_wire::limits::LAUNCH_FRAME_BYTES_MAX);
        self.guard_outbox.extend(bytes?);
        Ok(())
    }

    /// Tries again later: the next world needs a port, and a shortage of descriptors or memory
    /// passes.
    fn renew_later(&mut self, generation: Generation, why: &std::io::Error) {
        if !std::mem::replace(&mut self.store.short, true) {
            crate::say_warning!("no port for the process-group store: {why}; retrying until one is available");
        }
        let inbox = self.inbox.clone();
        tokio::spawn(async move {
            tokio::time::sleep(RENEW).await;
            let _ = inbox.send(super::Input::Guard(Some(GuardEvent::Gone { generation })));
        });
    }

    /// Returns why to refuse the requests of whoever is not a worker of this node.
    fn stranger(&self, from: WorkerId) -> Option<String> {
        let WorkerId { generation, rank, local_rank } = from;
        let Some(crew) = self.crew.as_ref().filter(|c| c.generation == generation) else {
            return Some(format!("generation {generation} is over"));
        };
        let slot = &crew.slot;
        let ranks = slot.first_rank.0..slot.first_rank.0.saturating_add(slot.workers);
        if !ranks.contains(&rank.0) {
            Some(format!("rank {rank} does not run on this node"))
        } else if local_rank >= slot.workers {
            Some(format!("local rank {local_rank} does not run on this node"))
        } else {
            None
        }
    }

    pub(super) async fn worker_asks(&mut self, request: Request, answer: oneshot::Sender<Reply>) {
        if let Some(why) = self.stranger(request.from) {
            let _ = answer.send(Reply::Refused { why });
            return;
        }
        let Request { from, ask } = request;
        let WorkerId { generation, rank, local_rank } = from;
        match ask {
            Ask::Reserve { slot_bytes, slots } => {
                let memory = self.template.memory.clone();
                let spill = crate::paths::node_spill(&self.template.job, &self.template.node);
                let over = self.crew.as_ref().map(|c| c.over.clone());
                tokio::task::spawn_blocking(move || {
                    let reply = slot_files::reserve(&memory, &spill, local_rank, slot_bytes, slots);
                    let on_disk = matches!(reply, Reply::Slots { warning: Some(_), .. });
                    let _ = answer.send(reply);
                    if let Some(over) = over.filter(|_| on_disk) {
                        slot_files::release_memory_when_sealed(&memory, &spill, local_rank, &over);
                    }
                });
            }
            Ask::Restore(offers) => {
                // All ranks resume from one step, chosen once. A second answer would be the same
                // step.
                if !self.crew.as_mut().is_some_and(|c| c.asked.insert(rank)) {
                    let _ = answer.send(Reply::Refused { why: RESTORED_TWICE.into() });
                    return;
                }
                self.restores.insert(rank, answer);
                self.crew_event(generation, CrewEvent::Offers(RankOffers { rank, offers })).await;
            }
            Ask::Heal { path, chunks } => self.heal(rank, path, chunks, answer),
            Ask::RestoreFailed(unreadable) => {
                let _ = answer.send(Reply::Done);
                self.crew_event(generation, CrewEvent::RestoreFailed(rank, unreadable)).await;
            }
            Ask::Replicas { run, wish } => {
                self.replicate_for(generation, local_rank, &run, wish).await;
                let filling = self.replicas.filling(local_rank);
                tokio::task::spawn_blocking(move || {
                    // The worker asks this before it uses its slots. What was fetched for its
                    // predecessor may still be arriving in one of them.
                    drop(filling.lock());
                    let _ = answer.send(Reply::Done);
                });
            }
            Ask::AwaitDurable(step) => {
                let known =
                    self.crew.iter().flat_map(|c| c.workers.values()).any(|w| w.board.get(Word::Durable) > step.0);
                let pinned = self.pinned_steps();
                self.persist_queue.await_durable(step, known, &pinned, answer);
            }
            Ask::Persist(persist) => self.persist_to(from, persist, answer),
            Ask::PersistDue => {
                let _ = answer.send(Reply::Done);
                self.crew_event(generation, CrewEvent::PersistDue).await;
            }
            Ask::SnapshotEvery(every) => {
                let _ = answer.send(Reply::Done);
                self.crew_event(generation, CrewEvent::SnapshotEvery(every)).await;
            }
            Ask::Error { message, uncaught } => {
                let _ = answer.send(Reply::Done);
                self.script_failed(generation, local_rank, message, uncaught).await;
            }
        }
    }

    /// Watches what a worker seals, to replicate it, and says what this node holds of its run.
    async fn replicate_for(&mut self, generation: Generation, local_rank: u32, run: &str, wish: Redundancy) {
        if let Some(held) = self.replicas.belongs_to(run) {
            let parity = self.replicas.holder.parity_held();
            self.crew_event(generation, CrewEvent::Holds(Holdings { held, parity })).await;
        }
        let over = self.crew.as_ref().map(|c| c.over.clone());
        let board = Board::open(&board_path(&self.template.memory, local_rank));
        let first = self.crew.as_mut().is_some_and(|c| c.watched.insert(local_rank));
        if let (Some(over), Ok(board), true) = (over, board, first) {
            watch(board, wish, generation, local_rank, over, self.inbox.clone());
        }
    }

    /// Records a worker's error; `uncaught`: the exception that ends its script.
    async fn script_failed(
        &mut self,
        generation: Generation,
        local_rank: u32,
        message: String,
        uncaught: Option<String>,
    ) {
        let Some(worker) = self.crew.as_mut().and_then(|c| c.workers.get_mut(&local_rank)) else { return };
        worker.error = Some(message.clone());
        if let Some(text) = uncaught {
            let pid = worker.pid;
            self.report_last_steps().await;
            let words = Words { message, text };
            self.crew_event(generation, CrewEvent::WorkerRaised { local_rank, pid, words }).await;
        }
    }
}
