//! The side that keeps replicas: answers other agents' streams, one thread each.

use super::protocol::{
    Answer, Ask, BUSY, DAMAGED, EXTENT_HEADER, SILENCE, SlotRow, VERSION, WHEN_IDLE, Want, description_crc,
};
use super::upload::Upload;
use crate::arena::{Label, Notes, REGION_AT, Slot, slot_bytes};
use crate::board::{Board, Word};
use crate::format::digest::CHUNK_BYTES;
use crate::format::shard::Index;
use crate::mapped::Mapped;
use everstep_wire::frame;
use everstep_wire::limits::{INDEX_BYTES_MAX, REGION_BYTES_MAX};
use everstep_wire::token::Token;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Other programs keep at least this much memory.
const HEADROOM_BYTES: u64 = 64 << 20;
/// Slots per shard that is kept for another node: one complete, one on its way.
const SLOTS: usize = 2;

/// How long an answer that was asked for when the network is idle waits for that.
const PATIENCE: Duration = Duration::from_millis(50);

/// Opens the step boards of this node's workers.
struct Boards(Box<dyn Fn() -> Vec<Board> + Send + Sync>);

impl std::fmt::Debug for Boards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Boards")
    }
}

/// One node's replicas, in the same directories as its own slots.
#[derive(Debug)]
pub struct Holder {
    directories: Vec<PathBuf>,
    token: OnceLock<Token>,
    job: u64,
    /// Uploads of older generations are refused.
    floor: AtomicU64,
    uploads: Mutex<BTreeMap<(u64, u64), Arc<Upload>>>,
    mapped: Mapped,
    boards: OnceLock<Boards>,
}

/// A sealed slot of this node.
#[derive(Clone, Debug)]
pub struct Held {
    /// Whose, and which step.
    pub label: Label,
    /// Where.
    pub path: PathBuf,
    /// It is another node's.
    pub replica: bool,
}

/// All sealed slots in `directories` that belong to `job`, labels verified.
#[must_use]
pub fn held(directories: &[PathBuf], job: u64) -> Vec<Held> {
    let entries = directories.iter().filter_map(|d| std::fs::read_dir(d).ok()).flatten().flatten();
    let mut found: Vec<Held> = entries
        .filter_map(|entry| {
            let name = entry.file_name().to_str()?.to_owned();
            let label = Slot::open(&entry.path()).ok().filter(|_| name.contains("-slot-"))?.label()?;
            let replica = name.starts_with("peer-");
            (label.job == job).then(|| Held { label, path: entry.path(), replica })
        })
        .collect();
    found.sort_by_key(|h| (h.label.rank, h.label.generation, h.label.step));
    found
}

/// The same, for people.
#[must_use]
pub fn rows(directories: &[PathBuf], job: u64) -> Vec<SlotRow> {
    let row = |h: Held| {
        let slot = Slot::open(&h.path).ok()?;
        let Notes { sealed_at, replicas, durable } = slot.notes();
        let (bytes, path) = (slot.region_bytes(), h.path.display().to_string());
        Some(SlotRow { label: h.label, replica: h.replica, bytes, sealed_at, replicas, durable, path })
    };
    held(directories, job).into_iter().filter_map(row).collect()
}

impl Holder {
    /// A holder whose new slots go into the first of `directories`.
    #[must_use]
    pub fn new(directories: Vec<PathBuf>, job: u64) -> Self {
        Holder {
            directories,
            token: OnceLock::new(),
            job,
            floor: AtomicU64::new(0),
            uploads: Mutex::default(),
            mapped: Mapped::default(),
            boards: OnceLock::new(),
        }
    }

    /// How to open the step boards of this node's workers, which say whether one is in a collective.
    pub fn set_boards(&self, open: impl Fn() -> Vec<Board> + Send + Sync + 'static) {
        let _ = self.boards.set(Boards(Box::new(open)));
    }

    /// The job's secret; before it is known, every stream is refused.
    pub fn set_token(&self, token: Token) {
        let _ = self.token.set(token);
    }

    /// All sealed slots of this node.
    #[must_use]
    pub fn held(&self) -> Vec<Held> {
        held(&self.directories, self.job)
    }

    /// From now on only `generation` and later ones may store anything; what is on its way from older ones ends.
    pub fn raise_floor(&self, generation: u64) {
        self.floor.fetch_max(generation, Ordering::AcqRel);
        if let Ok(mut uploads) = self.uploads.lock() {
            uploads.retain(|_, u| {
                let stays = u.label.generation >= generation;
                if !stays {
                    u.cancel();
                }
                stays
            });
        }
    }

    /// Removes replicas of ranks that are not in `keep` (rank and world size).
    pub fn keep_only(&self, keep: &[(u64, u64)]) {
        for held in self.held().into_iter().filter(|h| h.replica) {
            if !keep.contains(&(held.label.rank, held.label.world_size)) {
                let _ = std::fs::remove_file(&held.path);
                self.mapped.forget(&held.path);
            }
        }
    }

    /// Accepts streams until the listener fails.
    pub fn serve(self: &Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming().flatten() {
            let holder = Arc::clone(self);
            let named = std::thread::Builder::new().name("everstep-holder".into());
            // Without a thread the stream is closed, and the other side tries again later.
            let _ = named.spawn(move || drop(holder.talk(stream)));
        }
    }

    fn talk(&self, mut tcp: TcpStream) -> io::Result<()> {
        tcp.set_nodelay(true)?;
        tcp.set_read_timeout(Some(SILENCE))?;
        tcp.set_write_timeout(Some(SILENCE))?;
        let Ask::Hello { version, token, job } = frame::read(&mut tcp)? else { return Ok(()) };
        if version != VERSION || job != self.job || !self.token.get().is_some_and(|t| t.matches(&token)) {
            let why = "another job, another secret or another version".to_owned();
            return frame::write(&mut tcp, &Answer::Refused { why });
        }
        frame::write(&mut tcp, &Answer::Done)?;
        // Between steps a stream may be silent for long; it ends when the other side goes.
        tcp.set_read_timeout(None)?;
        let (mut upload, mut found): (Option<Arc<Upload>>, Option<Arc<Slot>>) = (None, None);
        loop {
            let answer = match frame::read::<Ask>(&mut tcp)? {
                Ask::Hello { .. } => Answer::Done,
                Ask::Begin { label, region, index, crc } => match self.begin(label, (region, index, crc), &mut tcp)? {
                    Ok(None) => Answer::Done,
                    Ok(Some(begun)) => {
                        begun.attach(&tcp);
                        Answer::Missing(upload.insert(begun).missing())
                    }
                    Err(why) => Answer::Refused { why },
                },
                Ask::Join { label } => {
                    upload =
                        self.uploads.lock().ok().and_then(|all| {
                            all.get(&(label.rank, label.world_size)).filter(|u| u.label == label).cloned()
                        });
                    match &upload {
                        Some(upload) => {
                            upload.attach(&tcp);
                            Answer::Done
                        }
                        None => Answer::Refused { why: "nobody has begun this".into() },
                    }
                }
                Ask::List => Answer::Slots(rows(&self.directories, self.job)),
                Ask::Data => {
                    let Some(upload) = &upload else { return Ok(()) };
                    // Whoever keeps to idle spans may be silent for long; when its generation is over, the stream is closed.
                    self.extents(upload, &mut tcp)?;
                    Answer::Done
                }
                Ask::Seal => match &upload {
                    Some(upload) if upload.seal() => {
                        let key = (upload.label.rank, upload.label.world_size);
                        if let Ok(mut all) = self.uploads.lock() {
                            all.remove(&key);
                        }
                        Answer::Done
                    }
                    Some(upload) => Answer::Missing(upload.missing()),
                    None => Answer::Refused { why: "nobody has begun this".into() },
                },
                Ask::Find(want) => {
                    found = self.find(want);
                    let described = found.as_ref().and_then(|s| s.described().ok());
                    match described {
                        Some((label, index)) => {
                            let region = found.as_ref().map_or(0, |s| s.region_bytes());
                            let crc = description_crc(&label, index);
                            let answer = Answer::Found { label, region, index: index.len() as u64, crc };
                            frame::write(&mut tcp, &answer)?;
                            tcp.write_all(index)?;
                            continue;
                        }
                        None => Answer::NotHere,
                    }
                }
                Ask::Read { first, count } => {
                    let Some(slot) = &found else { return Ok(()) };
                    let Some(bytes) = chunks(slot, first, count) else { return Ok(()) };
                    tcp.write_all(bytes)?;
                    continue;
                }
            };
            frame::write(&mut tcp, &answer)?;
        }
    }

    fn find(&self, want: Want) -> Option<Arc<Slot>> {
        let held = self.held().into_iter().find(|h| want.is(&h.label))?;
        self.mapped.open(&held.path).ok()
    }

    /// Finds or makes the slot for an upload; `None` when it is here already. The outer result is the stream's, the inner one the answer.
    fn begin(
        &self,
        label: Label,
        (region, index, crc): (u64, u64, u64),
        tcp: &mut TcpStream,
    ) -> io::Result<Result<Option<Arc<Upload>>, String>> {
        if index > INDEX_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "index over the limit"));
        }
        let mut json = vec![0; usize::try_from(index).map_err(io::Error::other)?];
        tcp.read_exact(&mut json)?;
        if label.job != self.job || label.generation < self.floor.load(Ordering::Acquire) {
            return Ok(Err(format!("generation {} is over", label.generation)));
        }
        if description_crc(&label, &json) != crc {
            return Ok(Err("label or index arrived damaged".into()));
        }
        // What the index says counts; checked before any room is made for it.
        let index: Option<Index> = serde_json::from_slice(&json).ok();
        if region > REGION_BYTES_MAX || index.and_then(|i| i.checked_bytes()) != Some(region) {
            return Ok(Err("the index does not fit its region".into()));
        }
        Ok(self.open(label, region, &json))
    }

    fn open(&self, label: Label, region: u64, json: &[u8]) -> Result<Option<Arc<Upload>>, String> {
        let mut uploads = self.uploads.lock().map_err(|e| e.to_string())?;
        let key = (label.rank, label.world_size);
        // A new attempt takes over from one whose stream is gone.
        if let Some(old) = uploads.remove(&key) {
            old.cancel();
        }
        let directory = self.directories.first().ok_or("no memory on this node")?;
        let path = |i| directory.join(format!("peer-{}-of-{}-slot-{i}", label.rank, label.world_size));
        let slots: Vec<(PathBuf, Option<Arc<Slot>>)> =
            (0..SLOTS).map(path).map(|p| (p.clone(), self.mapped.open(&p).ok())).collect();
        let labelled = |s: &Option<Arc<Slot>>| s.as_ref().and_then(|s| s.label());
        if slots.iter().any(|(_, s)| labelled(s) == Some(label)) {
            return Ok(None);
        }
        let resumable = |s: &Option<Arc<Slot>>| {
            let described =
                s.as_ref().filter(|s| s.state() == crate::arena::State::Writing).and_then(|s| s.described().ok());
            described.is_some_and(|(l, _)| l == label)
        };
        let age = |l: Label| (l.generation, l.step);
        let chosen = slots.iter().find(|(_, s)| resumable(s)).or_else(|| {
            // Empty before old before new: the newest complete version stays.
            slots.iter().min_by_key(|(_, s)| labelled(s).map(age))
        });
        let (path, _) = chosen.ok_or("no slot")?;
        let need = slot_bytes(region, json.len() as u64 + 4096);
        let more = need.saturating_sub(std::fs::metadata(path).map_or(0, |m| m.len()));
        let free = rustix::fs::statvfs(directory).map_or(0, |s| s.f_bavail * s.f_frsize);
        if more > 0 && more.saturating_add(HEADROOM_BYTES) > free {
            let (need, free) = (need >> 20, free >> 20);
            return Err(format!(
                "a replica of {need} MiB does not fit into this node's shared memory ({free} MiB free)"
            ));
        }
        if more > 0 {
            Slot::reserve(path, need).and_then(|s| s.map().populate()).map_err(|e| e.to_string())?;
        }
        let slot = self.mapped.open(path).map_err(|e| e.to_string())?;
        let upload = Arc::new(Upload::begin(slot, label, json)?);
        uploads.insert(key, Arc::clone(&upload));
        Ok(Some(upload))
    }

    fn extents(&self, upload: &Upload, tcp: &mut TcpStream) -> io::Result<()> {
        loop {
            let mut header = [0; EXTENT_HEADER];
            tcp.read_exact(&mut header)?;
            let (offset, len) = header.split_at(8);
            let offset = u64::from_le_bytes(offset.try_into().map_err(io::Error::other)?);
            let len = u32::from_le_bytes(len.try_into().map_err(io::Error::other)?);
            let (len, when_idle) = ((len & !WHEN_IDLE) as usize, len & WHEN_IDLE != 0);
            if len == 0 {
                return Ok(());
            }
            if len > CHUNK_BYTES {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "extent too long"));
            }
            let damaged = upload.receive(offset, len, tcp)?;
            let busy = when_idle && !self.await_idle();
            let answer = offset | if damaged { DAMAGED } else { 0 } | if busy { BUSY } else { 0 };
            tcp.write_all(&answer.to_le_bytes())?;
        }
    }

    /// Waits until this node's collectives are over, not for long.
    fn await_idle(&self) -> bool {
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

fn chunks(slot: &Slot, first: u64, count: u64) -> Option<&[u8]> {
    let chunk = CHUNK_BYTES as u64;
    let from = first.checked_mul(chunk)?;
    let to = first.checked_add(count)?.checked_mul(chunk)?.min(slot.region_bytes());
    let (from, to) = (usize::try_from(from).ok()?, usize::try_from(to).ok()?);
    slot.map().bytes(REGION_AT + from, to.checked_sub(from)?)
}
