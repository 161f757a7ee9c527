//! The driver's part in replication: streams to and from other agents, slots pinned and released,
//! shards fetched.

use super::Driver;
use super::crew::Worker;
use super::input::Input;
use super::launch::{board_path, profile_path};
use super::own_slots::Own;
use super::pace::{Paced, STREAMS, Speed};
use super::parity;
use super::remote_shard::WaitingSlots;
use crate::listening::Place;
use everstep_checkpoint::arena::{Pin, Slot, job_hash, run_label};
use everstep_checkpoint::erasure::streams::Streams;
use everstep_checkpoint::persist::Target;
use everstep_checkpoint::replicate::protocol::Peer;
use everstep_checkpoint::replicate::push::Link;
use everstep_checkpoint::replicate::replica_holder::{Held, ReplicaHolder, forget_readers};
use everstep_checkpoint::step_board::Board;
use everstep_core::agent::event::CrewEvent;
use everstep_core::id::{Generation, Rank, Step};
use everstep_core::message::{Holding, Redundancy, Replication, Source, Tier, Unreadable};
use everstep_wire::raw::{from_text, to_text};
use everstep_wire::token::Token;
use everstep_wire::worker::Reply;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// How long a watcher waits before it looks whether it is still needed.
const WATCH: Duration = Duration::from_millis(100);
/// Until a replica that failed is tried again; one that was refused waits longer.
const RETRY: Duration = Duration::from_millis(200);
const RETRY_REFUSED: Duration = Duration::from_secs(5);
/// Slots of a worker: see `agent_tier.py`.
pub const SLOTS: u32 = 3;

/// Replica streams of one node.
pub struct Replicas {
    pub holder: Arc<ReplicaHolder>,
    pub port: u16,
    token: Option<Token>,
    job: u64,
    own: Own,
    links: Arc<Mutex<BTreeMap<String, Link>>>,
    /// Streams that bring others' parts and take parity.
    streams: Arc<Streams>,
    speed: Arc<Speed>,
    /// Whether the user has been shown how often copies are sent.
    estimate_shown: Arc<AtomicBool>,
    /// Where each rank of this node restores from, and what can heal it.
    sources: BTreeMap<Rank, Source>,
    /// Held by whoever fills a slot of a worker, by local rank.
    filling: BTreeMap<u32, Arc<Mutex<()>>>,
    /// The latest trouble, so that it is said once.
    said: Arc<Mutex<String>>,
}

/// What a node keeps for others of the step that all hold.
#[derive(Clone, Copy, Debug)]
pub struct Keeps<'a> {
    /// Copies of these ranks' shards.
    pub shards: &'a [Rank],
    /// Parity of these stripes.
    pub parity: &'a [u32],
}

/// What a worker waits to restore.
#[derive(Clone, Copy, Debug)]
struct Restore {
    generation: Generation,
    rank: Rank,
    /// The worker's local rank.
    local: u32,
    step: Step,
    /// How to pin the slot if the step goes to durable storage.
    persist: Option<Pin>,
}

impl Replicas {
    /// Listens for other agents.
    ///
    /// # Safety
    /// The caller has the node lock: the previous agent has ended, and so have its workers. The
    /// lock outlives the value.
    ///
    /// # Errors
    /// When there is no port.
    pub unsafe fn start(place: &Place, job: &str, directories: Vec<PathBuf>) -> std::io::Result<Self> {
        let listener = place.bind_blocking(0)?;
        let port = listener.local_addr()?.port();
        // SAFETY: whoever has the node's lock is the node's only agent. It has not begun to read.
        let holder = Arc::new(unsafe {
            forget_readers(&directories);
            ReplicaHolder::new(directories.clone(), job_hash(job))
        });
        let memory = directories.first().cloned().unwrap_or_default();
        holder.set_boards(move || (0..).map_while(|local| Board::open(&board_path(&memory, local)).ok()).collect());
        let serving = Arc::clone(&holder);
        std::thread::Builder::new()
            .name("everstep-replicas".into())
            .spawn(move || serving.serve(&listener, |line| crate::say!("{line}")))?;
        Ok(Replicas {
            holder,
            port,
            token: None,
            job: job_hash(job),
            own: Own::of(directories),
            links: Arc::default(),
            streams: Arc::default(),
            speed: Arc::default(),
            estimate_shown: Arc::default(),
            sources: BTreeMap::new(),
            filling: BTreeMap::new(),
            said: Arc::default(),
        })
    }

    /// The job's secret is known now.
    pub fn set_token(&mut self, token: Token) {
        self.holder.set_token(token.clone());
        self.token.get_or_insert(token);
    }

    /// Newest generation that memory holds anything of.
    pub fn newest_generation(&self) -> Generation {
        Generation(self.holder.held_of_any_run().iter().map(|h| h.label.generation).max().unwrap_or(0))
    }

    pub(super) fn peer(&self, address: &str) -> Peer {
        let token = self.token.as_ref().map(|t| t.reveal().to_owned()).unwrap_or_default();
        Peer { address: address.to_owned(), token, job: self.job }
    }

    /// Access to the slots of this node's workers.
    pub fn own(&self) -> &Own {
        &self.own
    }

    /// What is held by whoever fills a slot of this worker.
    pub fn filling(&mut self, local: u32) -> Arc<Mutex<()>> {
        Arc::clone(self.filling.entry(local).or_default())
    }

    /// A generation begins: what memory holds, and nothing older may come in any more.
    pub fn begin(&mut self, generation: Generation, workers: u32) -> Vec<Holding> {
        self.holder.raise_floor(generation.0);
        self.sources.clear();
        self.streams.clear();
        if let Ok(mut links) = self.links.lock() {
            links.clear();
        }
        for local in 0..workers {
            self.own.slots(local).iter().for_each(|s| s.release(Pin::Replicate));
        }
        self.holder.held().iter().filter(|h| !h.parity).filter_map(holding).collect()
    }

    /// A worker has said which run its checkpoints are of: what memory holds of it, if that is
    /// news.
    pub fn belongs_to(&self, run: &str) -> Option<Vec<Holding>> {
        let held = || self.holder.held().iter().filter(|h| !h.parity).filter_map(holding).collect();
        self.holder.set_run(run_label(run)).then(held)
    }

    /// A step is on durable storage, too.
    pub fn durable(&self, step: Step, workers: u32) {
        for slot in (0..workers).flat_map(|local| self.own.slots(local)) {
            if slot.label().is_some_and(|l| l.step == step.0) {
                slot.note_durable();
            }
        }
    }

    /// A step is held by all: only it is pinned from now on.
    pub fn committed(&self, generation: Generation, step: Step, keeps: Keeps<'_>, workers: u32, world_size: u32) {
        for local in 0..workers {
            for slot in self.own.slots(local).iter().filter(|s| s.pinned_for(Pin::Replicate)) {
                let older = slot.label().is_none_or(|l| (l.generation, l.step) < (generation.0, step.0));
                if older {
                    slot.release(Pin::Replicate);
                }
            }
        }
        let shards: Vec<(u64, u64)> = keeps.shards.iter().map(|r| (u64::from(r.0), u64::from(world_size))).collect();
        let parity: Vec<(u64, u64)> = keeps.parity.iter().map(|n| (u64::from(*n), u64::from(world_size))).collect();
        self.holder.keep_only(&shards, &parity);
    }
}

fn holding(held: &Held) -> Option<Holding> {
    let l = held.label;
    Some(Holding {
        step: Step(l.step),
        generation: Generation(l.generation),
        rank: Rank(u32::try_from(l.rank).ok()?),
        world_size: u32::try_from(l.world_size).ok()?,
        shared: l.shared,
    })
}

/// Watches a worker's board for sealed steps until `over`.
pub fn watch(
    board: Board,
    wish: Redundancy,
    generation: Generation,
    local_rank: u32,
    over: Arc<AtomicBool>,
    inbox: mpsc::UnboundedSender<Input>,
) {
    let look = move || {
        let mut seen = 0;
        while !over.load(Ordering::Acquire) {
            let now = board.await_sealed(seen, WATCH);
            if now != seen && now > 0 {
                let step = Step(now - 1);
                let _ = inbox.send(Input::crew(generation, CrewEvent::Sealed { local_rank, step, wish }));
            }
            seen = now;
        }
    };
    // Without a thread there are no replicas, which status shows; training goes on.
    let _ = std::thread::Builder::new().name("everstep-sealed".into()).spawn(look);
}

impl Driver {
    /// Brings the keepers a step, or computes parity of others' shards.
    pub(super) fn replicate(
        &self,
        generation: Generation,
        from: Step,
        plan: Replication,
        base: Option<Step>,
        round: u64,
    ) {
        let Some(crew) = &self.crew else { return };
        let (workers, replicas) = (crew.slot.workers, &self.replicas);
        let boards = (0..workers).filter_map(|local| Board::open(&board_path(&self.template.memory, local)).ok());
        let mut gate = Paced::new(boards.collect(), crew.over.clone(), replicas.speed.clone());
        let peers: Vec<Peer> = plan.keepers.iter().map(|k| replicas.peer(&k.address)).collect();
        let (links, own, said) = (replicas.links.clone(), replicas.own.clone(), replicas.said.clone());
        let (inbox, shown) = (self.inbox.clone(), replicas.estimate_shown.clone());
        let (holder, streams) = (replicas.holder.clone(), replicas.streams.clone());
        let peer = replicas.peer("");
        let size = crew.world_size;
        let profile = profile_path(&self.template.memory, 0);
        let over = crew.over.clone();
        tokio::task::spawn_blocking(move || {
            // The next generation may have pinned the step that it goes back to.
            if over.load(Ordering::Acquire) {
                return;
            }
            let mut digests: Vec<(u32, u64)> = Vec::new();
            let pinned = own.pin_all(workers, generation, from, base);
            // Others compute parity of what is pinned now; or hear that there is nothing.
            holder.round_slots.set(generation.0, round, pinned.iter().flat_map(|(_, slots)| slots.clone()).collect());
            let step = pinned.and_then(|(step, slots)| {
                digests = (0..).zip(&slots).filter_map(|(local, slot)| Some((local, slot.digest()?))).collect();
                let sent = if plan.stripes.is_empty() {
                    send(&slots, &peers, base, &links, &mut gate)
                } else {
                    let at = parity::Moment { generation, step, world_size: size, round, base };
                    let node = parity::Node { holder: &holder, streams: &streams, slots: &slots };
                    parity::compute(&plan.stripes, &at, &peer, node, &mut gate)
                };
                match sent {
                    Ok(()) => {
                        let lost = plan.stripes.first().map_or(peers.len(), |s| s.keepers.len() + 1);
                        slots.iter().for_each(|s| s.note_replicas(lost as u64));
                        if let Some(text) = gate.estimate(&profile).filter(|_| !shown.swap(true, Ordering::AcqRel)) {
                            crate::say!("{text}");
                        }
                        Some(step)
                    }
                    // The generation is over.
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => None,
                    // Another node has taken another step: another round comes.
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
                    Err(e) => {
                        let refused = e.kind() == std::io::ErrorKind::PermissionDenied;
                        say_once(&said, &format!("step {step} could not be replicated: {e}; training continues"));
                        std::thread::sleep(if refused { RETRY_REFUSED } else { RETRY });
                        None
                    }
                }
            });
            if step.is_none() && !over.load(Ordering::Acquire) {
                // Another step will be named, for which there must be a slot.
                own.release(workers, generation, |s| Some(s) != base);
            }
            let digests = step.map_or_else(Vec::new, |_| std::mem::take(&mut digests));
            let _ = inbox.send(Input::crew(generation, CrewEvent::Replicated { step, digests, round }));
        });
    }

    /// Answers workers that wait to restore; what lies on other nodes is fetched first.
    pub(super) fn answer_restores(
        &mut self,
        generation: Generation,
        step: Option<Step>,
        persist: bool,
        sources: &[Source],
        found: bool,
    ) {
        let Some(crew) = self.crew.as_mut().filter(|c| c.generation == generation) else { return };
        crew.restored = step;
        self.final_save.goes_on_from(generation, step, persist, crew.world_size);
        self.release_what_did_not_happen();
        let Some(crew) = &self.crew else { return };
        let (first, run) = (crew.slot.first_rank.0, self.replicas.holder.run());
        let with_destination = |(local, w): (&u32, &Worker)| w.destination.as_ref().map(|_| *local);
        let durable: BTreeSet<u32> = crew.workers.iter().filter_map(with_destination).collect();
        for (rank, answer) in std::mem::take(&mut self.restores) {
            let local = rank.0.saturating_sub(first);
            let persist = (persist && durable.contains(&local)).then_some(Pin::Persist);
            let source = sources.get(local as usize).cloned();
            if let Some(source) = &source {
                self.replicas.sources.insert(rank, source.clone());
            }
            match (step, source) {
                (Some(step), Some(source)) if matches!(source.tier, Tier::Peer | Tier::Parity) => {
                    self.fetch(Restore { generation, rank, local, step, persist }, &source, answer);
                }
                (step, source) => {
                    let tier = source.map(|s| s.tier);
                    if let (Some(step), Some(Tier::Memory)) = (step, tier) {
                        // It stays until what comes after it is held by all. Of two with this
                        // number an earlier generation's is of a past that did not happen.
                        let slots = self.replicas.own.slots(local);
                        let of_step = |s: &&Arc<Slot>| {
                            s.label().filter(|l| l.step == step.0 && l.run == run).map(|l| l.generation)
                        };
                        if let Some(slot) = slots.iter().max_by_key(of_step).filter(|s| of_step(s).is_some()) {
                            let _ = slot.pin(Pin::Replicate);
                            let _ = persist.is_some_and(|p| slot.pin(p));
                        }
                    }
                    let _ = answer.send(Reply::Restore { step, tier, path: None, found });
                }
            }
        }
    }

    /// Slots that an earlier generation captured for durable storage after the step that all go on
    /// from.
    fn release_what_did_not_happen(&self) {
        let Some(crew) = &self.crew else { return };
        for (local, worker) in &crew.workers {
            if worker.destination.as_ref().is_some_and(|d| d.target == Target::Exactly) {
                continue;
            }
            for slot in self.replicas.own.slots(*local).iter().filter(|s| s.pinned_for(Pin::Persist)) {
                if !slot.label().is_some_and(|l| self.is_to_be_written(&l, Target::Branch)) {
                    slot.release(Pin::Persist);
                }
            }
        }
    }

    fn fetch(&mut self, restore: Restore, source: &Source, answer: oneshot::Sender<Reply>) {
        let Restore { generation, rank, local, step, persist } = restore;
        let Some(over) = self.crew.as_ref().map(|c| c.over.clone()) else { return };
        let (directories, filling) = (self.replicas.own.directories().to_vec(), self.replicas.filling(local));
        let into = WaitingSlots { directories, local, filling, over };
        let (tier, from, inbox) = (source.tier, self.replicas.remote_shard(source), self.inbox.clone());
        tokio::task::spawn_blocking(move || match from.fetch(&into, persist) {
            Ok(path) => {
                let path = Some(to_text(&path));
                let _ = answer.send(Reply::Restore { step: Some(step), tier: Some(tier), path, found: false });
            }
            Err(e) => {
                if !into.over.load(Ordering::Acquire) {
                    crate::say!("cannot fetch step {step} of rank {rank} from other nodes: {e}");
                    // Anything but damage may pass: a holder that restarts, a lack of room.
                    let failed = match e.kind() {
                        std::io::ErrorKind::InvalidData => CrewEvent::RestoreFailed,
                        _ => CrewEvent::FetchFailed,
                    };
                    let failed = failed(rank, Unreadable { step, tier });
                    let _ = inbox.send(Input::crew(generation, failed));
                }
                // The worker waits: its generation is over.
                let why = "the world is being re-formed; this process will be restarted".into();
                let _ = answer.send(Reply::Refused { why });
            }
        });
    }

    /// Brings damaged chunks of a slot back from wherever they are good.
    pub(super) fn heal(&self, rank: Rank, path: String, chunks: Vec<usize>, answer: oneshot::Sender<Reply>) {
        let path = from_text(&path);
        let from = self.replicas.sources.get(&rank).map(|s| self.replicas.remote_shard(s)).unwrap_or_default();
        let durable = self
            .crew
            .iter()
            .flat_map(|c| c.workers.values())
            .find_map(|w| w.destination.clone().filter(|d| d.rank == rank).map(|d| d.directory));
        let inside = is_slot_of(self.replicas.own.directories(), &path);
        let over = self.crew.as_ref().map(|c| c.over.clone()).unwrap_or_default();
        tokio::task::spawn_blocking(move || {
            let healed = inside && from.heal(path.as_path(), durable.as_deref(), chunks.clone(), &over);
            let reply = if healed {
                crate::say!("{}: {} damaged chunks of 1 MiB were repaired from a copy", path.display(), chunks.len());
                Reply::Done
            } else {
                Reply::Refused { why: format!("{} is damaged, and there is no good copy of it", path.display()) }
            };
            let _ = answer.send(reply);
        });
    }
}

/// The path is that of a slot, directly in one of the directories.
fn is_slot_of(directories: &[PathBuf], path: &Path) -> bool {
    let named = path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.contains("-slot-"));
    // Whole: `parent` alone would forgive `slot/.` at the end.
    named && directories.iter().any(|d| path.file_name().is_some_and(|n| d.join(n).as_os_str() == path.as_os_str()))
}

fn say_once(said: &Mutex<String>, what: &str) {
    let Ok(mut last) = said.lock() else { return };
    let kind = what.split(": ").skip(1).collect::<String>();
    if *last != kind {
        crate::say!("{what}");
        *last = kind;
    }
}

/// All slots to all peers, one thread per peer.
fn send(
    slots: &[Arc<Slot>],
    peers: &[Peer],
    base: Option<Step>,
    links: &Mutex<BTreeMap<String, Link>>,
    gate: &mut Paced,
) -> std::io::Result<()> {
    let window = gate.window(STREAMS);
    let under_way = window.extent * window.buffers * window.streams * peers.len();
    let bytes: u64 = slots.iter().map(|s| s.region_bytes()).sum();
    gate.expect(bytes * peers.len() as u64, under_way as u64);
    let gate = &*gate;
    let mut taken: Vec<Link> = {
        let mut links = links.lock().map_err(|e| std::io::Error::other(e.to_string()))?;
        peers.iter().map(|p| links.remove(&p.address).unwrap_or_else(|| Link::new(p.clone(), STREAMS))).collect()
    };
    taken.iter_mut().for_each(|link| link.base = base.map(|step| step.0));
    let results: Vec<std::io::Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = taken
            .iter_mut()
            .map(|link| {
                let push = || slots.iter().try_for_each(|s| link.push(s, window, gate));
                std::thread::Builder::new().name("everstep-push".into()).spawn_scoped(scope, push)
            })
            .collect();
        let panicked = |_| Err(std::io::Error::other("a sender panicked"));
        threads.into_iter().map(|t| t.and_then(|t| t.join().unwrap_or_else(panicked))).collect()
    });
    if let Ok(mut links) = links.lock() {
        links.extend(taken.into_iter().map(|l| (l.peer().address.clone(), l)));
    }
    results.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_slots_of_this_node_are_healed() {
        let of = [PathBuf::from("/shm/job/0")];
        let is = |path: &str| is_slot_of(&of, Path::new(path));
        assert!(is("/shm/job/0/local-0-slot-1"));
        for path in [
            "/shm/job/0/../1/local-0-slot-1",
            "/shm/job/0/a/local-0-slot-1",
            "/shm/job/0/board",
            "/shm/job/0/local-0-slot-1/..",
            "local-0-slot-1",
        ] {
            assert!(!is(path), "{path}");
        }
    }
}
