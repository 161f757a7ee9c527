//! A lost shard, computed from the remains of its stripes: from any k of each, and from the next
//! one if a source is lost or damaged. Every source is verified before it is used, and every
//! computed chunk against the checksum of its capture.

use super::layout::{Layout, place};
use super::parity_shard::{Described, Description};
use super::reed_solomon::{Decoder, GRAIN};
use crate::arena::{Label, Repair, Slot};
use crate::copy_crc::Running;
use crate::format::digest::CHUNK_BYTES;
use crate::format::index::Index;
use crate::replicate::protocol::{Ask, ParityWant, Peer, Stream, Want};
use crate::replicate::pull::{Found, find};
use everstep_core::id::Rank;
use everstep_wire::frame;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Threads per part; each has a stream to every source.
const THREADS: usize = 2;
/// Bytes of each shard that are decoded at a time. To prepare a decoding costs as much as to decode
/// some hundred kilobytes.
const PIECE_BYTES: usize = CHUNK_BYTES;

/// The remaining sources of the stripe of one part.
#[derive(Clone, Debug)]
pub struct Sources {
    /// Number of the stripe.
    pub stripe: u32,
    /// Ranks that the stripe protects, in order; `None` for zeros.
    pub members: Vec<Option<Rank>>,
    /// Nodes that hold the members' shards, in the same order.
    pub data: Vec<Option<Peer>>,
    /// Nodes that hold its parity shards, by their numbers.
    pub parity: Vec<Option<Peer>>,
}

/// Where computed bytes go: into a slot that is being written, or is under repair.
type Store<'a> = &'a (dyn Fn(usize, &[u8]) -> io::Result<()> + Sync);

/// A shard to compute from its stripes.
#[derive(Clone, Debug)]
pub struct Task {
    /// The lost shard.
    pub want: Want,
    /// The sources of each of its parts, in order.
    pub stripes: Vec<Sources>,
}

/// The description of a lost shard, from a parity shard.
#[derive(Clone, Debug)]
pub struct Outline {
    /// Label of the lost shard.
    pub label: Label,
    /// Length of its region in bytes.
    pub region: u64,
    /// Its index byte for byte (JSON).
    pub json: Vec<u8>,
    index: Index,
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Fails with `Interrupted` when the rebuild is stopped, so that it does not wait for another
/// silent peer.
fn stop_if(over: &AtomicBool) -> io::Result<()> {
    if over.load(Ordering::Acquire) { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
}

/// Asks the keepers of parity for the description of the shard.
///
/// # Errors
/// `NotFound` when no parity of it is left; those of the network.
pub fn outline(task: &Task) -> io::Result<Outline> {
    let mut trouble = io::Error::from(io::ErrorKind::NotFound);
    for (part, stripe) in task.stripes.iter().enumerate() {
        for (number, peer) in stripe.parity.iter().enumerate() {
            let Some(peer) = peer else { continue };
            match described(peer, &task.parity(stripe, number)) {
                Ok((_, description)) => return task.outline_in(&description, part),
                Err(e) => trouble = e,
            }
        }
    }
    Err(trouble)
}

/// Finds a parity shard on a peer. Returns the stream, and the description of the shard.
fn described(peer: &Peer, of: &ParityWant) -> io::Result<(Stream, Description)> {
    let mut stream = Stream::open(peer)?;
    let (_, region, json) = stream.find(&Ask::FindParity(*of))?;
    let found = Description::from_bytes(&json)?;
    if found.layout().parity_bytes() == region && found.number == of.number {
        Ok((stream, found))
    } else {
        Err(invalid("another parity shard than asked for"))
    }
}

impl Task {
    fn parity(&self, stripe: &Sources, number: usize) -> ParityWant {
        let Want { world_size, generation, step, .. } = self.want;
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        ParityWant { stripe: stripe.stripe, number, world_size, generation, step }
    }

    fn outline_in(&self, description: &Description, part: usize) -> io::Result<Outline> {
        let member = description.members.get(part).and_then(Option::as_ref).filter(|m| self.want.is(&m.label));
        let member = member.ok_or_else(|| invalid("this parity shard does not protect the shard that is needed"))?;
        let index = member.index().ok_or_else(|| invalid("an index that does not fit its region"))?;
        let json = member.index.get().as_bytes().to_vec();
        Ok(Outline { label: member.label, region: member.region, json, index })
    }

    /// Computes the whole shard into `slot`, and seals it. Stops soon when `over` is set.
    ///
    /// # Safety
    /// The same as for [`Slot::begin`], until this returns.
    ///
    /// # Errors
    /// `InvalidData` when too few good sources of a stripe are left; `StorageFull` and
    /// `ResourceBusy` for a slot that is too small or in use; `Interrupted` when it was stopped.
    /// The slot is then not sealed.
    pub unsafe fn fill(&self, slot: &Arc<Slot>, outline: &Outline, over: &AtomicBool) -> io::Result<()> {
        if !slot.fits(outline.region, outline.json.len() as u64) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        // SAFETY: the caller guarantees that no other thread writes the slot until this returns.
        let slot = unsafe { slot.begin() }.ok_or(io::ErrorKind::ResourceBusy)?;
        slot.describe(outline.label, &outline.json, outline.region)?;
        let chunks: Vec<usize> = (0..outline.index.chunks()).collect();
        let done = self.compute(&|from, bytes| slot.store(from, bytes), outline, &chunks, over)?;
        if done.len() < chunks.len() {
            return Err(invalid("too little is left of a stripe"));
        }
        slot.seal(None);
        Ok(())
    }

    /// Computes single chunks of a slot under repair again. Returns the chunks that are good now.
    ///
    /// # Errors
    /// Those of the network; `NotFound` when the parity is of other bytes.
    pub fn heal(&self, slot: &Repair<'_>, chunks: &[usize], over: &AtomicBool) -> io::Result<Vec<usize>> {
        let outline = outline(self)?;
        let (_, own) = slot.described().map_err(|e| invalid(&e.to_string()))?;
        if own != outline.json {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.compute(&|from, bytes| slot.store(from, bytes), &outline, chunks, over)
    }

    /// Returns the layout and checksums of the stripe of a part, from the first parity shard of it
    /// that answers and describes the same shard as `outline`. With another length, every chunk
    /// would be at another place.
    fn known(&self, stripe: &Sources, part: usize, outline: &Outline, over: &AtomicBool) -> io::Result<Known> {
        let mut trouble = io::Error::from(io::ErrorKind::NotFound);
        for (number, peer) in stripe.parity.iter().enumerate() {
            stop_if(over)?;
            let Some(peer) = peer else { continue };
            match described(peer, &self.parity(stripe, number)) {
                Ok((_, found)) => {
                    let own = self.outline_in(&found, part);
                    if !own.is_ok_and(|own| own.region == outline.region && own.json == outline.json) {
                        trouble = invalid("two parity shards speak of different shards");
                        continue;
                    }
                    let crcs = |m: &Option<Described>| m.as_ref().and_then(Described::index).map(|i| i.crcs().to_vec());
                    let crcs = found.members.iter().map(|m| crcs(m).unwrap_or_default()).collect();
                    return Ok(Known { layout: found.layout(), crcs });
                }
                Err(e) => trouble = e,
            }
        }
        Err(trouble)
    }

    /// Computes chunks and passes them to `store`; returns those that are good.
    fn compute(
        &self,
        store: Store<'_>,
        outline: &Outline,
        chunks: &[usize],
        over: &AtomicBool,
    ) -> io::Result<Vec<usize>> {
        let done = Mutex::new(Vec::new());
        for (part, stripe) in self.stripes.iter().enumerate() {
            let here = |chunk: &usize| place(outline.region, self.stripes.len(), *chunk).0 == part;
            let wanted: Vec<usize> = chunks.iter().copied().filter(here).collect();
            if wanted.is_empty() {
                continue;
            }
            let known = self.known(stripe, part, outline, over)?;
            let run = |chunks: &[usize]| {
                let (lanes, bad) = (BTreeMap::new(), BTreeSet::new());
                let mut rebuild = PartRebuild { task: self, stripe, part, outline, known: &known, lanes, bad, over };
                let mut decoder = Decoder::new(stripe.members.len(), stripe.parity.len())?;
                chunks.iter().try_for_each(|chunk| {
                    rebuild.chunk(store, &mut decoder, *chunk)?;
                    done.lock().map_err(|_| invalid("a reader panicked"))?.push(*chunk);
                    Ok(())
                })
            };
            let each = wanted.len().div_ceil(THREADS);
            let results: Vec<io::Result<()>> = std::thread::scope(|scope| {
                let run = &run;
                let start =
                    |chunks| std::thread::Builder::new().spawn_scoped(scope, move || run(chunks)).map_err(|_| chunks);
                let threads: Vec<_> = wanted.chunks(each).map(start).collect();
                // If a thread cannot be created, this one does the work.
                let panicked = |_| Err(invalid("a reader panicked"));
                threads.into_iter().map(|t| t.map_or_else(&run, |t| t.join().unwrap_or_else(panicked))).collect()
            });
            results.into_iter().collect::<io::Result<()>>()?;
        }
        done.into_inner().map_err(|_| invalid("a reader panicked"))
    }
}

/// The layout and checksums that a stripe was computed from.
struct Known {
    layout: Layout,
    /// Checksums of the members' chunks.
    crcs: Vec<Vec<u64>>,
}

/// A source of a stripe.
struct Lane {
    stream: Stream,
    /// Checksums of a member's chunks, or of a parity shard's positions.
    crcs: Vec<u64>,
}

/// One thread's work on one part.
struct PartRebuild<'a> {
    task: &'a Task,
    stripe: &'a Sources,
    part: usize,
    outline: &'a Outline,
    known: &'a Known,
    lanes: BTreeMap<usize, Lane>,
    /// Sources that have failed.
    bad: BTreeSet<usize>,
    over: &'a AtomicBool,
}

impl PartRebuild<'_> {
    /// Computes one chunk. Tries other sources while enough of them are left.
    fn chunk(&mut self, store: Store<'_>, decoder: &mut Decoder, chunk: usize) -> io::Result<()> {
        let data = self.stripe.members.len();
        let (_, position) = place(self.outline.region, data, chunk);
        loop {
            stop_if(self.over)?;
            let usable = |source: &usize| *source != self.part && !self.bad.contains(source);
            let chosen: Vec<usize> = (0..data + self.stripe.parity.len()).filter(usable).take(data).collect();
            if chosen.len() < data {
                return Err(invalid("too little is left of a stripe"));
            }
            match self.attempt(store, decoder, chunk, position, &chosen) {
                Ok(()) => return Ok(()),
                Err(Trouble::Source(source)) => self.bad.insert(source),
                Err(Trouble::Here(e)) => return Err(e),
            };
            // Bytes in flight on the other streams belong to the attempt that has failed.
            self.lanes.clear();
        }
    }

    fn attempt(
        &mut self,
        store: Store<'_>,
        decoder: &mut Decoder,
        chunk: usize,
        position: usize,
        chosen: &[usize],
    ) -> Result<(), Trouble> {
        let layout = &self.known.layout;
        let (data, length) = (self.stripe.members.len(), layout.length(position));
        let target = layout.bytes(self.part, position).unwrap_or(0..0);
        // A member whose part is shorter has zeros here.
        let there = |source: usize| match source.checked_sub(data) {
            None => layout.bytes(source, position).unwrap_or(0..0),
            Some(_) => layout.parity(position),
        };
        for source in chosen.iter().filter(|s| !there(**s).is_empty()) {
            let at = there(*source);
            let ask = Ask::ReadBytes { at: at.start as u64, bytes: at.len() as u64 };
            let lane = self.lane(*source).map_err(|_| Trouble::Source(*source))?;
            frame::write(&mut lane.stream.tcp, &ask).map_err(|_| Trouble::Source(*source))?;
        }
        let mut sums = vec![Running::default(); chosen.len()];
        let (mut sum, mut done) = (Running::default(), 0);
        let mut pieces: Vec<(usize, Vec<u8>)> = chosen.iter().map(|s| (*s, Vec::with_capacity(PIECE_BYTES))).collect();
        while done < length {
            let n = PIECE_BYTES.min(length - done).next_multiple_of(GRAIN);
            for ((source, piece), sum) in pieces.iter_mut().zip(&mut sums) {
                piece.resize(n, 0);
                let (bytes, zeros) = piece.split_at_mut(n.min(there(*source).len().saturating_sub(done)));
                zeros.fill(0);
                if let Some(lane) = self.lanes.get_mut(source).filter(|_| !bytes.is_empty()) {
                    lane.stream.read_while(bytes, self.over).map_err(|e| match e.kind() {
                        io::ErrorKind::Interrupted => Trouble::Here(e),
                        _ => Trouble::Source(*source),
                    })?;
                }
                sum.read(bytes);
            }
            let own = n.min(target.len().saturating_sub(done));
            decoder
                .decode(&pieces, self.part, |piece| {
                    let piece = piece.get(..own).unwrap_or_default();
                    sum.read(piece);
                    if piece.is_empty() { Ok(()) } else { store(target.start + done, piece) }
                })
                .map_err(Trouble::Here)?;
            done += n;
        }
        for (source, sum) in chosen.iter().zip(&sums).filter(|(s, _)| !there(**s).is_empty()) {
            let place = if *source < data { layout.chunk(*source, position) } else { Some(position) };
            let expected = self.lanes.get(source).zip(place).and_then(|(lane, place)| lane.crcs.get(place));
            if expected != Some(&sum.value()) {
                return Err(Trouble::Source(*source));
            }
        }
        if self.outline.index.crcs().get(chunk) != Some(&sum.value()) {
            return Err(Trouble::Here(invalid("the rebuilt shard does not match its checksums")));
        }
        Ok(())
    }

    fn lane(&mut self, source: usize) -> io::Result<&mut Lane> {
        if !self.lanes.contains_key(&source) {
            stop_if(self.over)?;
            let lane = self.open(source)?;
            self.lanes.insert(source, lane);
        }
        self.lanes.get_mut(&source).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn open(&self, source: usize) -> io::Result<Lane> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let data = self.stripe.members.len();
        if let Some(number) = source.checked_sub(data) {
            let peer = self.stripe.parity.get(number).and_then(Option::as_ref).ok_or_else(gone)?;
            let (stream, found) = described(peer, &self.task.parity(self.stripe, number))?;
            return Ok(Lane { stream, crcs: found.crcs });
        }
        let peer = self.stripe.data.get(source).and_then(Option::as_ref).ok_or_else(gone)?;
        let rank = self.stripe.members.get(source).copied().flatten().ok_or_else(gone)?;
        let Found { stream, .. } = find(peer, Want { rank: u64::from(rank.0), ..self.task.want })?;
        Ok(Lane { stream, crcs: self.known.crcs.get(source).cloned().unwrap_or_default() })
    }
}

/// Why a chunk could not be computed.
enum Trouble {
    /// This source cannot be used.
    Source(usize),
    /// Another source would not help.
    Here(io::Error),
}
