//! The receiving side: a shard is fetched from several holders at once, and every chunk is
//! verified. A chunk that one holder has damaged is fetched from the next.

use super::protocol::{Ask, Peer, Stream, Want};
use crate::arena::{Label, Repair, Slot, Writing};
use crate::copy_crc::Running;
use crate::format::digest::CHUNK_BYTES;
use crate::format::index::Index;
use everstep_wire::limits::REGION_BYTES_MAX;
use std::collections::{BTreeSet, VecDeque};
use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Number of chunks per request.
const RUN: u64 = 8;
/// Number of bytes that are received and summed at a time, while they are in the cache.
const PIECE_BYTES: usize = 256 << 10;
/// Pause before checking again whether a run that another thread fetches has been returned.
const PAUSE: Duration = Duration::from_millis(1);

/// A shard that was found on a holder, and a stream to it.
#[derive(Debug)]
pub struct Found {
    /// Stream to the holder.
    pub stream: Stream,
    /// Label of the slot.
    pub label: Label,
    /// Length of its region in bytes.
    pub region: u64,
    /// Its index as it arrived (JSON).
    pub json: Vec<u8>,
    /// The parsed index.
    pub index: Index,
}

/// Asks one holder for a shard.
///
/// # Errors
/// Those of the network; `NotFound` when it has no such shard; `InvalidData` when its index is not
/// valid.
pub fn find(peer: &Peer, want: Want) -> io::Result<Found> {
    find_on(Stream::open(peer)?, &Ask::Find(want), want)
}

/// Does what [`find`] does, on an open stream and with another request of that kind.
///
/// # Errors
/// The same as for [`find`].
pub fn find_on(mut stream: Stream, ask: &Ask, want: Want) -> io::Result<Found> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let (label, region, json) = stream.find(ask)?;
    if !want.is(&label) {
        return Err(invalid("another shard than asked for".into()));
    }
    let index: Index = serde_json::from_slice(&json).map_err(|e| invalid(e.to_string()))?;
    if region > REGION_BYTES_MAX || index.bytes() != region {
        return Err(invalid("the index does not fit its region".into()));
    }
    Ok(Found { stream, label, region, json, index })
}

struct Work<'a> {
    slot: &'a Writing,
    index: &'a Index,
    region: u64,
    queue: Mutex<Queue>,
    over: &'a AtomicBool,
}

#[derive(Default)]
struct Queue {
    /// Runs of chunks, with the sources that have already failed to deliver them.
    left: VecDeque<(u64, u64, BTreeSet<usize>)>,
    /// Number of runs that are being fetched: they may come back.
    taken: usize,
}

enum Next {
    Run(u64, u64, BTreeSet<usize>),
    Wait,
    Nothing,
}

/// Fills `slot` from all of `sources`, which must have found the same shard, and seals it.
/// `streams` per source. Stops soon when `over` is set.
///
/// # Safety
/// The same as for [`Slot::begin`], until this returns.
///
/// # Errors
/// `InvalidData` when no source has a good copy of some chunk, `Interrupted` when it was stopped;
/// the slot is then not sealed. Those of the network when no source answers any more.
pub unsafe fn fill(
    slot: &Arc<Slot>,
    sources: Vec<(&Peer, Found)>,
    want: Want,
    streams: usize,
    over: &AtomicBool,
) -> io::Result<()> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let (_, first) = sources.first().ok_or(io::ErrorKind::NotFound)?;
    let (label, region, json, index) = (first.label, first.region, first.json.clone(), first.index.clone());
    if !slot.fits(region, json.len() as u64) {
        return Err(io::ErrorKind::StorageFull.into());
    }
    // SAFETY: the caller guarantees that no other thread writes the slot until this returns.
    let slot = unsafe { slot.begin() }.ok_or(io::ErrorKind::ResourceBusy)?;
    slot.describe(label, &json, region)?;
    let all = 0..index.chunks() as u64;
    let runs = all.clone().step_by(RUN as usize).map(|a| (a, RUN.min(all.end - a), BTreeSet::new())).collect();
    let work = Work { slot: &slot, index: &index, region, queue: Mutex::new(Queue { left: runs, taken: 0 }), over };
    // Holders of other bytes (a rank's own random state, say) cannot be used beside the first.
    let mut lines: Vec<(usize, Stream)> = Vec::new();
    for (i, (peer, source)) in sources.into_iter().enumerate() {
        if source.index == index {
            let streams = if over.load(Ordering::Acquire) { 1 } else { streams };
            for _ in 1..streams {
                lines.extend(find(peer, want).ok().map(|f| (i, f.stream)));
            }
            lines.push((i, source.stream));
        }
    }
    let count = lines.iter().map(|(i, _)| *i).collect::<BTreeSet<_>>().len();
    let trouble = std::thread::scope(|scope| {
        let work = &work;
        let mut lines = lines.into_iter();
        // This thread is one of the readers: if no more threads can be created, it is the only one.
        let own = lines.next();
        let named = || std::thread::Builder::new().name("everstep-pull".into());
        let threads: Vec<_> = lines
            .map_while(|(i, stream)| named().spawn_scoped(scope, move || work.fetch(i, stream, count)).ok())
            .collect();
        let own = own.and_then(|(i, stream)| work.fetch(i, stream, count).err());
        threads.into_iter().filter_map(|t| t.join().ok().and_then(Result::err)).last().or(own)
    });
    let queue = work.queue.lock().map_err(|_| invalid("a reader panicked"))?;
    let complete = queue.left.is_empty() && queue.taken == 0;
    drop(queue);
    if complete {
        slot.seal(None);
        return Ok(());
    }
    Err(trouble.unwrap_or_else(|| invalid("a chunk is damaged wherever it is held")))
}

impl Work<'_> {
    fn next(&self, source: usize) -> io::Result<Next> {
        let mut queue = self.queue.lock().map_err(|_| io::ErrorKind::Other)?;
        let mine = queue.left.iter().position(|(_, _, failed)| !failed.contains(&source));
        if let Some((first, count, failed)) = mine.and_then(|i| queue.left.remove(i)) {
            queue.taken += 1;
            return Ok(Next::Run(first, count, failed));
        }
        Ok(if queue.taken > 0 { Next::Wait } else { Next::Nothing })
    }

    /// Records that a run was fetched, except for these parts of it.
    fn done(&self, source: usize, mut failed: BTreeSet<usize>, back: Vec<(u64, u64)>) {
        let Ok(mut queue) = self.queue.lock() else { return };
        failed.insert(source);
        queue.taken -= 1;
        queue.left.extend(back.into_iter().map(|(a, n)| (a, n, failed.clone())));
    }

    fn fetch(&self, source: usize, mut stream: Stream, sources: usize) -> io::Result<()> {
        loop {
            let (first, count, failed) = match self.next(source)? {
                Next::Run(first, count, failed) => (first, count, failed),
                Next::Wait => {
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Next::Nothing => return Ok(()),
            };
            match self.read(&mut stream, first, count) {
                Ok(bad) => self.done(source, failed, bad.into_iter().map(|c| (c, 1)).collect()),
                Err(e) => {
                    self.done(source, failed, vec![(first, count)]);
                    let ends = sources == 1 || e.kind() == io::ErrorKind::Interrupted;
                    return if ends { Err(e) } else { Ok(()) };
                }
            }
        }
    }

    /// Reads a run into the slot; returns the chunks that are damaged.
    fn read(&self, stream: &mut Stream, first: u64, count: u64) -> io::Result<Vec<u64>> {
        everstep_wire::frame::write(&mut stream.tcp, &Ask::Read { first, count })?;
        let mut bad = Vec::new();
        for chunk in first..first + count {
            let from = chunk as usize * CHUNK_BYTES;
            let to = (from + CHUNK_BYTES).min(usize::try_from(self.region).map_err(io::Error::other)?);
            let mut sum = Running::default();
            let mut at = from;
            while at < to {
                let n = PIECE_BYTES.min(to - at);
                // SAFETY: the slot is written by this `Writing` only, and the queue has given this
                // run to this thread only.
                let piece = unsafe { self.slot.region_mut(at, n)? };
                stream.read_while(piece, self.over)?;
                sum.read(piece);
                at += n;
            }
            if self.index.crcs().get(chunk as usize) != Some(&sum.value()) {
                bad.push(chunk);
            }
        }
        Ok(bad)
    }
}

/// Restores single chunks of a slot under repair from a holder. Returns the chunks that were
/// healed.
///
/// # Errors
/// Those of the network; `NotFound` when the holder has no such shard or other bytes.
pub fn heal(slot: &Repair<'_>, peer: &Peer, want: Want, chunks: &[usize]) -> io::Result<Vec<usize>> {
    let mut found = find(peer, want)?;
    let (_, own) = slot.described().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))?;
    if own != found.json {
        return Err(io::ErrorKind::NotFound.into());
    }
    let mut healed = Vec::new();
    for chunk in chunks.iter().filter(|c| **c < found.index.chunks()) {
        everstep_wire::frame::write(&mut found.stream.tcp, &Ask::Read { first: *chunk as u64, count: 1 })?;
        let from = chunk * CHUNK_BYTES;
        let mut bytes = vec![0; CHUNK_BYTES.min(usize::try_from(found.region).map_err(io::Error::other)? - from)];
        found.stream.tcp.read_exact(&mut bytes)?;
        let mut sum = Running::default();
        sum.read(&bytes);
        if found.index.crcs().get(*chunk) == Some(&sum.value()) {
            slot.store(from, &bytes)?;
            healed.push(*chunk);
        }
    }
    Ok(healed)
}
