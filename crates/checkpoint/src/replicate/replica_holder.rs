//! The side that keeps replicas: its slots, and the shards that are arriving in them on streams
//! ([`super::conversation`]).

use super::budget::Budget;
use super::protocol::{Ask, ParityWant, SlotRow};
use super::receive_slots::{NamedSlots, ReceiveSlot};
use super::refusal::Refusal;
use super::round_slots::RoundSlots;
use super::suppliers::Suppliers;
use super::upload::Upload;
use crate::arena::{Label, Notes, Pin, Slot, State, slot_bytes};
use crate::erasure::parity_shard::{self, Incoming, Lengths, ParityRound};
use crate::format::index::Index;
use crate::mapped::Mapped;
use crate::step_board::{Board, Word};
use everstep_wire::limits::{INDEX_BYTES_MAX, REGION_BYTES_MAX};
use everstep_wire::private::{self, Directory, Root};
use everstep_wire::token::Token;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Maximum time for which an answer waits for an idle network.
const PATIENCE: Duration = Duration::from_millis(50);

/// Limit on the bytes of indexes and descriptions that all streams together receive at the same
/// time: room for the largest one, and for many of the usual size beside it.
const RECEIVED_BYTES_MAX: u64 = 2 * INDEX_BYTES_MAX;

/// Opens the step boards of this node's workers.
struct Boards(Box<dyn Fn() -> Vec<Board> + Send + Sync>);

impl std::fmt::Debug for Boards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Boards")
    }
}

/// One node's replicas, in the same directories as its own slots.
#[derive(Debug)]
pub struct ReplicaHolder {
    directories: Vec<PathBuf>,
    pub(super) token: OnceLock<Token>,
    pub(super) job: u64,
    /// [`crate::arena::run_label`] of the directory that the workers' checkpoints belong to. Before
    /// a worker has reported it, a value that no slot has: the job's name.
    run: AtomicU64,
    /// Uploads of older generations are refused.
    floor: AtomicU64,
    uploads: Mutex<BTreeMap<(u64, u64), Arc<Upload>>>,
    /// Parity shards that are arriving, by the names of their slots.
    parities: Mutex<BTreeMap<String, Arc<Incoming>>>,
    /// This node's own shards of the step that is being replicated.
    pub round_slots: RoundSlots,
    mapped: Mapped,
    boards: OnceLock<Boards>,
    /// Limits what streams may take into memory before it has been checked.
    pub(super) budget: Budget,
    /// Number of streams that are being served.
    pub(super) streams: AtomicUsize,
}

/// A sealed slot of this node.
#[derive(Clone, Debug)]
pub struct Held {
    /// The rank and the step.
    pub label: Label,
    /// Path of the slot.
    pub path: PathBuf,
    /// Whether it is another node's.
    pub replica: bool,
    /// Whether it is parity instead of a rank's shard. The label's rank is then the stripe's
    /// number.
    pub parity: bool,
}

/// Returns all sealed slots in `directories` that belong to `run`, or to any run, with verified
/// labels.
#[must_use]
pub fn held(directories: &[PathBuf], run: Option<u64>) -> Vec<Held> {
    let mut found: Vec<Held> = slot_files(directories)
        .filter_map(|(path, name)| {
            let label = Slot::open(&path).ok()?.label()?;
            let parity = name.starts_with("parity-");
            let replica = parity || name.starts_with("peer-");
            run.is_none_or(|run| label.run == run).then_some(Held { label, path, replica, parity })
        })
        .collect();
    found.sort_by_key(|h| (h.label.rank, h.label.generation, h.label.step));
    found
}

/// Returns the paths and names of all slots in `directories`.
fn slot_files(directories: &[PathBuf]) -> impl Iterator<Item = (PathBuf, String)> {
    let opened = directories.iter().filter_map(|d| Directory::existing(d, Root::Named).ok());
    let names =
        opened.flat_map(|d| d.names().unwrap_or_default().into_iter().map(move |(n, _)| (d.path().join(&n), n)));
    names.filter_map(|(path, name)| Some((path, name.into_string().ok().filter(|n| n.contains("-slot-"))?)))
}

/// Clears the reader counts that an agent left behind when it died while it read or repaired slots.
///
/// # Safety
/// The caller is this node's only agent, and has not begun to read.
pub unsafe fn forget_readers(directories: &[PathBuf]) {
    for (path, _) in slot_files(directories) {
        if let Ok(slot) = Slot::open(&path) {
            // SAFETY: the caller is the node's only agent and has not begun to read, so that the
            // processes that have read or repaired the slot have ended.
            unsafe { slot.forget_readers() };
        }
    }
}

/// Returns the sealed slots of [`held`] as rows for `everstep ckpt`.
#[must_use]
pub fn rows(directories: &[PathBuf], run: Option<u64>) -> Vec<SlotRow> {
    let row = |h: Held| {
        let slot = Slot::open(&h.path).ok()?;
        let Notes { sealed_at, replicas, durable } = slot.notes();
        let (bytes, path) = (slot.region_bytes(), h.path.display().to_string());
        Some(SlotRow {
            label: h.label,
            replica: h.replica,
            parity: h.parity,
            bytes,
            sealed_at,
            replicas,
            durable,
            path,
        })
    };
    held(directories, run).into_iter().filter_map(row).collect()
}

impl ReplicaHolder {
    /// Creates a holder whose new slots go into the first of `directories`.
    ///
    /// # Safety
    /// While it lives, no other process writes slots with copies and parity in `directories`: the
    /// caller is this node's only agent.
    #[must_use]
    pub unsafe fn new(directories: Vec<PathBuf>, job: u64) -> Self {
        ReplicaHolder {
            directories,
            token: OnceLock::new(),
            job,
            run: AtomicU64::new(job),
            floor: AtomicU64::new(0),
            uploads: Mutex::default(),
            parities: Mutex::default(),
            round_slots: RoundSlots::default(),
            mapped: Mapped::default(),
            boards: OnceLock::new(),
            budget: Budget::of(RECEIVED_BYTES_MAX),
            streams: AtomicUsize::new(0),
        }
    }

    /// Sets how to open the step boards of this node's workers, which show whether a worker is in a
    /// collective.
    pub fn set_boards(&self, open: impl Fn() -> Vec<Board> + Send + Sync + 'static) {
        let _ = self.boards.set(Boards(Box::new(open)));
    }

    /// Sets the job's secret. Before that, every stream is refused.
    pub fn set_token(&self, token: Token) {
        let _ = self.token.set(token);
    }

    /// Sets the run that the workers' checkpoints belong to. From then on, nothing of another run
    /// is offered, accepted or used. Returns whether the run has changed.
    pub fn set_run(&self, run: u64) -> bool {
        self.run.swap(run, Ordering::AcqRel) != run
    }

    /// Returns the run that was set last (see [`ReplicaHolder::set_run`]).
    #[must_use]
    pub fn run(&self) -> u64 {
        self.run.load(Ordering::Acquire)
    }

    /// Returns the sealed slots of this node, of any run.
    #[must_use]
    pub fn held_of_any_run(&self) -> Vec<Held> {
        held(&self.directories, None)
    }

    /// Returns the sealed slots of this node that belong to the run.
    #[must_use]
    pub fn held(&self) -> Vec<Held> {
        held(&self.directories, Some(self.run()))
    }

    /// Refuses shards of generations before `generation` from now on, and cancels those that are
    /// arriving.
    pub fn raise_floor(&self, generation: u64) {
        self.floor.fetch_max(generation, Ordering::AcqRel);
        let ends = |begun: u64, suppliers: &Suppliers| {
            let over = begun < generation;
            if over {
                suppliers.cancel();
            }
            over
        };
        if let Ok(mut uploads) = self.uploads.lock() {
            uploads.retain(|_, u| !ends(u.label.generation, &u.suppliers));
        }
        if let Ok(mut parities) = self.parities.lock() {
            parities.retain(|_, p| !ends(p.of.want.generation, &p.suppliers));
        }
    }

    /// Removes replicas of ranks that are not in `keep` (rank and world size), and parity of
    /// stripes that are not in `parity`.
    pub fn keep_only(&self, keep: &[(u64, u64)], parity: &[(u64, u64)]) {
        for held in self.held().into_iter().filter(|h| h.replica) {
            let kept = if held.parity { parity } else { keep };
            if !kept.contains(&(held.label.rank, held.label.world_size)) {
                let _ = private::remove(&held.path);
                self.mapped.forget(&held.path);
            }
        }
    }

    /// Returns the sealed slots of this node, in the form that other nodes request.
    pub(super) fn rows(&self) -> Vec<SlotRow> {
        rows(&self.directories, Some(self.run()))
    }

    /// Returns the upload of this shard that another stream has begun, if any.
    pub(super) fn begun(&self, label: Label) -> Option<Arc<Upload>> {
        let uploads = self.uploads.lock().ok()?;
        uploads.get(&(label.rank, label.world_size)).filter(|u| u.label == label).cloned()
    }

    /// Records that an upload is complete.
    pub(super) fn uploaded(&self, upload: &Upload) {
        if let Ok(mut uploads) = self.uploads.lock() {
            uploads.remove(&(upload.label.rank, upload.label.world_size));
        }
    }

    /// Records that a parity shard is complete.
    pub(super) fn arrived(&self, of: &ParityWant) {
        if let Ok(mut parities) = self.parities.lock() {
            parities.remove(&of.name());
        }
    }

    /// Returns the slot that a request asks for.
    pub(super) fn find(&self, ask: &Ask) -> Option<Arc<Slot>> {
        match ask {
            Ask::Find(want) => {
                let held = self.held().into_iter().find(|h| !h.parity && want.is(&h.label))?;
                self.mapped.open(&held.path).ok()
            }
            Ask::Taken { want, round } => {
                self.round_slots.await_slot(*want, *round).filter(|s| s.pinned_for(Pin::Replicate))
            }
            Ask::FindParity(of) => {
                let name = of.name();
                let is = |h: &Held| h.parity && h.label == of.label(self.run()) && named(h, &name);
                let held = self.held().into_iter().find(is)?;
                self.mapped.open(&held.path).ok()
            }
            _ => None,
        }
    }

    /// Finds or makes the slot for a parity shard; `None` if the shard is here already.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn parity_slot(
        &self,
        of: &ParityWant,
        Lengths { region, description }: Lengths,
        base: Option<u64>,
    ) -> Result<Option<Arc<Slot>>, Refusal> {
        if region > REGION_BYTES_MAX || description > INDEX_BYTES_MAX {
            return Err(Refusal::ParityTooLong);
        }
        if of.generation < self.floor.load(Ordering::Acquire) {
            return Err(Refusal::Over(of.generation));
        }
        let directory = self.directories.first().ok_or(Refusal::NoMemory)?;
        let need = slot_bytes(region, description);
        let named = NamedSlots { directory, name: &of.name(), mapped: &self.mapped };
        match named.choose(of.label(self.run()), need, base, |_| false)? {
            ReceiveSlot::Held => Ok(None),
            ReceiveSlot::Slot(slot) => Ok(Some(slot)),
        }
    }

    /// Begins to receive a parity shard; `None` if it is here already.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn parity(
        &self,
        of: ParityRound,
        lengths: Lengths,
        base: Option<u64>,
    ) -> Result<Option<Arc<Incoming>>, Refusal> {
        let mut parities = self.parities.lock()?;
        let name = of.want.name();
        if let Some(begun) = parities.get(&name) {
            if begun.of == of {
                return Ok(Some(Arc::clone(begun)));
            }
            // A new attempt takes over from one whose stream has ended.
            begun.suppliers.cancel();
            parities.remove(&name);
        }
        let Some(slot) = self.parity_slot(&of.want, lengths, base)? else { return Ok(None) };
        // SAFETY: only this holder writes the slot (`ReplicaHolder::new`), and an earlier attempt
        // at it was cancelled.
        let incoming = Arc::new(unsafe { Incoming::begin(slot, of, lengths)? });
        parities.insert(name, Arc::clone(&incoming));
        Ok(Some(incoming))
    }

    /// Returns the parity shards of this node, as a restore counts them.
    #[must_use]
    pub fn parity_held(&self) -> Vec<everstep_core::message::Parity> {
        let slots = self.held().into_iter().filter(|h| h.parity).filter_map(|h| self.mapped.open(&h.path).ok());
        slots.filter_map(|slot| parity_shard::holding(&slot)).collect()
    }

    /// Finds or makes the slot for an upload with this index; `None` if the shard is here already.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn begin(
        &self,
        label: Label,
        region: u64,
        json: &[u8],
        base: Option<u64>,
    ) -> Result<Option<Arc<Upload>>, Refusal> {
        if label.run != self.run() {
            return Err(Refusal::OtherRun);
        }
        if label.generation < self.floor.load(Ordering::Acquire) {
            return Err(Refusal::Over(label.generation));
        }
        // The index is checked before any memory is reserved for the shard.
        let index: Option<Index> = serde_json::from_slice(json).ok();
        if region > REGION_BYTES_MAX || index.map(|i| i.bytes()) != Some(region) {
            return Err(Refusal::Region);
        }
        self.open(label, region, json, base)
    }

    fn open(&self, label: Label, region: u64, json: &[u8], base: Option<u64>) -> Result<Option<Arc<Upload>>, Refusal> {
        let mut uploads = self.uploads.lock()?;
        let key = (label.rank, label.world_size);
        // A new attempt takes over from one whose stream has ended.
        if let Some(old) = uploads.remove(&key) {
            old.suppliers.cancel();
        }
        let directory = self.directories.first().ok_or(Refusal::NoMemory)?;
        let name = format!("peer-{}-of-{}", label.rank, label.world_size);
        let resumes = |s: &Slot| s.state() == State::Writing && s.described().is_ok_and(|(l, _)| l == label);
        let need = slot_bytes(region, json.len() as u64 + 4096);
        let named = NamedSlots { directory, name: &name, mapped: &self.mapped };
        let slot = match named.choose(label, need, base, resumes)? {
            ReceiveSlot::Held => return Ok(None),
            ReceiveSlot::Slot(slot) => slot,
        };
        // SAFETY: only this holder writes the slot (`ReplicaHolder::new`), and an earlier attempt
        // at it was cancelled.
        let upload = Arc::new(unsafe { Upload::begin(slot, label, json)? });
        uploads.insert(key, Arc::clone(&upload));
        Ok(Some(upload))
    }

    /// Waits a short time for this node's collectives to be over. Returns whether they are.
    pub(super) fn await_idle(&self) -> bool {
        let Some(Boards(open)) = self.boards.get() else { return true };
        let (boards, until) = (open(), Instant::now() + PATIENCE);
        while boards.iter().any(|b| b.get(Word::CommBusy) != 0) {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(PATIENCE / 250);
        }
        true
    }
}

fn named(held: &Held, name: &str) -> bool {
    let file = held.path.file_name().and_then(|f| f.to_str());
    file.and_then(|f| f.strip_prefix(name)).is_some_and(|rest| rest.starts_with("-slot-"))
}
