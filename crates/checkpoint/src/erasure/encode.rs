//! One node's part in protecting a step: fetch the members' parts of a stripe, compute its parity,
//! keep one shard of it, and deliver the others to their nodes. At any time, a few extents per
//! member are in flight, whatever the size of the shards.

use super::layout::Layout;
use super::parity_shard::{Described, Description, HEADER, Lengths};
use super::reed_solomon::{Encoder, GRAIN, PIECE_BYTES};
use super::streams::Streams;
use crate::arena::{Slot, Writing};
use crate::copy_crc::Running;
use crate::format::digest::{CHUNK_BYTES, crc};
use crate::replicate::protocol::{Answer, Ask, DAMAGED, ParityWant, Peer, Stream, Want, unexpected};
use crate::replicate::pull::{Found, find_on};
use crate::replicate::push::{Gate, Pass, Window};
use crate::replicate::replica_holder::ReplicaHolder;
use everstep_wire::frame;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of times that a position is fetched if its bytes arrive damaged.
const ATTEMPTS: u32 = 3;
/// Threads per stripe; each has a stream to every member and to every keeper of parity.
const THREADS: usize = 2;

/// A stripe to compute.
#[derive(Clone, Debug)]
pub struct Task {
    /// The stripe and its step; the first of its parity shards stays on this node.
    pub of: ParityWant,
    /// [`crate::arena::run_label`] of the run that the stripe protects.
    pub run: u64,
    /// The members, and the shard of each; `None` for zeros.
    pub members: Vec<Option<(Peer, Want)>>,
    /// Nodes that keep the other parity shards, in order.
    pub keepers: Vec<Peer>,
    /// Round of replication.
    pub round: u64,
    /// The step that every node would go back to now; its slots are not overwritten.
    pub base: Option<u64>,
}

/// A parity shard that is computed, and its destination.
struct Output {
    /// Checksums of the positions.
    crcs: Vec<AtomicU64>,
    to: To,
}

enum To {
    /// The shard stays on this node.
    Slot(Writing),
    /// Another node keeps the shard.
    Keeper(Peer),
    /// The shard has been delivered already, but it still takes part in the computation.
    Nowhere,
}

struct Work<'a> {
    task: &'a Task,
    streams: &'a Streams,
    layout: Layout,
    /// Checksums of the members' chunks.
    crcs: Vec<Vec<u64>>,
    outputs: Vec<Output>,
    gate: &'a dyn Gate,
    window: Window,
    /// Lengths of each parity shard.
    lengths: Lengths,
}

/// Computes the parity of a stripe and delivers it to its destinations. Shards that have been
/// delivered already are not sent again.
///
/// # Safety
/// Meanwhile no other thread computes this stripe on this node, and no other node delivers the
/// parity shard that stays here.
///
/// # Errors
/// `NotFound` when a member has taken another step; those of the network; `PermissionDenied` with a
/// keeper's reason; `InvalidData` when a chunk is damaged at its source; `Interrupted` when the
/// gate gave up.
pub unsafe fn encode(
    task: &Task,
    holder: &ReplicaHolder,
    streams: &Streams,
    gate: &dyn Gate,
    window: Window,
) -> io::Result<()> {
    // SAFETY: the caller guarantees that this parity shard is neither computed nor delivered by
    // others.
    let done = unsafe { attempt(task, holder, streams, gate, window) };
    if done.is_err() {
        // Their state is unknown after a failure.
        streams.clear();
    }
    done
}

/// Does the work of [`encode`], and leaves the streams in any state after an error.
///
/// # Safety
/// The same as for [`encode`].
unsafe fn attempt(
    task: &Task,
    holder: &ReplicaHolder,
    streams: &Streams,
    gate: &dyn Gate,
    window: Window,
) -> io::Result<()> {
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let found = lanes(task, streams)?;
    let (last, of) = (count(task.keepers.len())?, count(task.keepers.len() + 1)?);
    let mut description = Description { number: last, of, members: Vec::new(), crcs: vec![] };
    let mut crcs = Vec::new();
    for lane in &found {
        crcs.push(lane.as_ref().map_or_else(Vec::new, |f| f.index.crcs().to_vec()));
        let described = lane.as_ref().map(|f| {
            let index = String::from_utf8(f.json.clone()).map_err(|e| invalid(e.to_string()))?;
            let index = serde_json::value::RawValue::from_string(index).map_err(|e| invalid(e.to_string()))?;
            Ok::<_, io::Error>(Described { label: f.label, region: f.region, index })
        });
        description.members.push(described.transpose()?);
    }
    let layout = description.layout();
    let positions = layout.positions();
    description.crcs = vec![u64::MAX; positions];
    let lengths = Lengths { region: layout.parity_bytes(), description: description.to_bytes()?.len() as u64 };
    let empty = || (0..positions).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
    let refused = |why| io::Error::new(io::ErrorKind::PermissionDenied, why);
    let own = holder.parity_slot(&task.of, lengths, task.base).map_err(refused)?;
    // SAFETY: only this agent writes slots of parity (`ReplicaHolder::new`), and the caller
    // guarantees that nothing else in it writes this one.
    let begin_own = |slot: Arc<Slot>| unsafe { slot.begin() }.ok_or(io::ErrorKind::ResourceBusy);
    let own = own.map(begin_own).transpose()?;
    let mut outputs = vec![Output { crcs: empty(), to: own.map_or(To::Nowhere, To::Slot) }];
    for (number, peer) in (1..).zip(&task.keepers) {
        let mut stream = streams.take(peer)?;
        let wanted = begin(&mut stream, task, number, lengths)?;
        let to = if wanted { To::Keeper(peer.clone()) } else { To::Nowhere };
        if wanted {
            end(&mut stream)?;
        }
        streams.give(peer, stream);
        outputs.push(Output { crcs: empty(), to });
    }
    if outputs.iter().all(|o| matches!(o.to, To::Nowhere)) {
        give_back(task, streams, found);
        return Ok(());
    }
    let work = Work { task, streams, layout, crcs, outputs, gate, window, lengths };
    let half = positions.div_ceil(THREADS);
    std::thread::scope(|scope| {
        let work = &work;
        let others: Vec<_> = (1..THREADS)
            .map(|i| positions.min(i * half)..positions.min((i + 1) * half))
            .filter(|range| !range.is_empty())
            .map(|range| {
                let part = range.clone();
                let run = move || work.run(lanes(task, streams)?, range);
                std::thread::Builder::new().spawn_scoped(scope, run).map_err(|_| part)
            })
            .collect();
        let mut done = work.run(found, 0..positions.min(half));
        for other in others {
            // If a thread cannot be created, this one does the work.
            done = done.and(match other {
                Ok(thread) => thread.join().unwrap_or_else(|_| Err(io::Error::other("an encoder panicked"))),
                Err(part) => lanes(task, streams).and_then(|lanes| work.run(lanes, part)),
            });
        }
        done
    })?;
    work.seal(description)
}

fn count(n: usize) -> io::Result<u32> {
    u32::try_from(n).map_err(io::Error::other)
}

/// Returns a stream to each member, on which its shard was found.
fn lanes(task: &Task, streams: &Streams) -> io::Result<Vec<Option<Found>>> {
    let lane = |(peer, want): &(Peer, Want)| {
        let ask = Ask::Taken { want: *want, round: task.round };
        find_on(streams.take(peer)?, &ask, *want)
    };
    task.members.iter().map(|m| m.as_ref().map(lane).transpose()).collect()
}

fn give_back(task: &Task, streams: &Streams, found: Vec<Option<Found>>) {
    for (member, lane) in task.members.iter().zip(found) {
        if let (Some((peer, _)), Some(found)) = (member, lane) {
            streams.give(peer, found.stream);
        }
    }
}

/// Announces a parity shard. Returns false if it has been delivered already; otherwise positions
/// may follow, up to [`end`].
fn begin(stream: &mut Stream, task: &Task, number: u32, lengths: Lengths) -> io::Result<bool> {
    let of = ParityWant { number, ..task.of };
    let Lengths { region, description } = lengths;
    match stream.ask(&Ask::Parity { of, round: task.round, region, description, base: task.base })? {
        Answer::Done => Ok(true),
        Answer::Missing(_) => Ok(false),
        other => Err(unexpected(&other)),
    }
}

fn end(stream: &mut Stream) -> io::Result<()> {
    stream.tcp.write_all(&[0; HEADER])
}

/// A position, and how many times it has arrived damaged.
#[derive(Clone, Copy)]
struct Attempt {
    position: usize,
    failed: u32,
}

impl Attempt {
    /// Returns the next attempt, or `None` after the last.
    fn again(self) -> Option<Self> {
        (self.failed + 1 < ATTEMPTS).then_some(Attempt { failed: self.failed + 1, ..self })
    }
}

/// Bytes of each member that were asked for.
#[derive(Clone, Copy)]
struct Extent {
    of: Attempt,
    from: usize,
    bytes: usize,
    /// Whether nothing more may be requested before these bytes have arrived.
    alone: bool,
}

/// The streams and buffers of one thread.
struct EncoderThread {
    lanes: Vec<Option<Found>>,
    keepers: Vec<Option<Stream>>,
    encoder: Encoder,
    /// A piece of each member's chunk.
    pieces: Vec<Vec<u8>>,
    /// A position of each parity shard for another node.
    held: Vec<Vec<u8>>,
    /// Checksums of the current position, members first, then parity.
    sums: Vec<Running>,
    /// Positions sent to each keeper and not yet answered.
    sent: Vec<VecDeque<Attempt>>,
}

impl Work<'_> {
    fn run(&self, lanes: Vec<Option<Found>>, range: std::ops::Range<usize>) -> io::Result<()> {
        let (data, parity) = (self.task.members.len(), self.outputs.len());
        let mut keepers = vec![None];
        for (number, (output, peer)) in (1..).zip(self.outputs.iter().skip(1).zip(&self.task.keepers)) {
            let stream = matches!(output.to, To::Keeper(_)).then(|| {
                let mut stream = self.streams.take(peer)?;
                match begin(&mut stream, self.task, number, self.lengths)? {
                    true => Ok(stream),
                    false => Err(io::Error::other("another attempt has taken over")),
                }
            });
            keepers.push(stream.transpose()?);
        }
        let mut thread = EncoderThread {
            lanes,
            keepers,
            encoder: Encoder::new(data, parity)?,
            pieces: vec![Vec::with_capacity(PIECE_BYTES); data],
            held: vec![Vec::with_capacity(CHUNK_BYTES); parity],
            sums: vec![Running::default(); data + parity],
            sent: vec![VecDeque::new(); parity],
        };
        self.positions(&mut thread, range)?;
        for (peer, stream) in self.task.keepers.iter().zip(thread.keepers.into_iter().skip(1)) {
            if let Some(mut stream) = stream {
                end(&mut stream)?;
                self.streams.give(peer, stream);
            }
        }
        give_back(self.task, self.streams, thread.lanes);
        Ok(())
    }

    fn positions(&self, thread: &mut EncoderThread, range: std::ops::Range<usize>) -> io::Result<()> {
        let mut left: VecDeque<Attempt> = range.map(|position| Attempt { position, failed: 0 }).collect();
        let (mut asked, mut at): (VecDeque<Extent>, usize) = (VecDeque::new(), 0);
        loop {
            while let Some(of) = left.front().copied() {
                if asked.len() >= self.window.buffers.max(1) || asked.back().is_some_and(|e| e.alone) {
                    break;
                }
                let extent = self.ask(thread, of, at)?;
                at += extent.bytes;
                asked.push_back(extent);
                if at >= self.layout.length(of.position) {
                    left.pop_front();
                    at = 0;
                }
            }
            let Some(extent) = asked.pop_front() else {
                // Positions that arrived damaged at a keeper are computed again.
                (0..thread.sent.len()).try_for_each(|n| self.answers(thread, n, 0, &mut left))?;
                if left.is_empty() {
                    return Ok(());
                }
                continue;
            };
            self.take(thread, extent)?;
            if extent.alone {
                self.gate.arrived(true);
            }
            if extent.from + extent.bytes < self.layout.length(extent.of.position) {
                continue;
            }
            let Some(member) = self.arrived_whole(thread, extent.of.position) else {
                self.deliver(thread, extent.of, &mut left)?;
                continue;
            };
            let damaged = || {
                let why = format!("a chunk of member {member} repeatedly arrives damaged, or is damaged there");
                io::Error::new(io::ErrorKind::InvalidData, why)
            };
            left.push_back(extent.of.again().ok_or_else(damaged)?);
        }
    }

    /// Asks every member for its bytes of an extent from `from` on.
    fn ask(&self, thread: &mut EncoderThread, of: Attempt, from: usize) -> io::Result<Extent> {
        let position = of.position;
        let length = self.layout.length(position);
        let members = thread.lanes.iter().flatten().count().max(1);
        let most = self.window.extent.next_multiple_of(GRAIN).min(length - from);
        let Pass { bytes, alone } = self.gate.pass(most * members);
        if bytes == 0 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let bytes = (bytes / members).next_multiple_of(GRAIN).clamp(GRAIN, most);
        for (member, lane) in thread.lanes.iter_mut().enumerate() {
            let there = self.there(member, position, from, bytes);
            if let (Some(lane), false) = (lane, there.is_empty()) {
                let ask = Ask::ReadBytes { at: there.start as u64, bytes: there.len() as u64 };
                frame::write(&mut lane.stream.tcp, &ask)?;
            }
        }
        Ok(Extent { of, from, bytes, alone })
    }

    /// Returns where in a member's region its bytes of an extent are. Missing bytes at the end are
    /// zeros.
    fn there(&self, member: usize, position: usize, from: usize, bytes: usize) -> std::ops::Range<usize> {
        let chunk = self.layout.bytes(member, position).unwrap_or(0..0);
        chunk.end.min(chunk.start + from)..chunk.end.min(chunk.start + from + bytes)
    }

    /// Reads an extent from the streams, piece by piece, and computes its parity while it is in the
    /// cache.
    fn take(&self, thread: &mut EncoderThread, extent: Extent) -> io::Result<()> {
        let EncoderThread { lanes, encoder, pieces, held, sums, .. } = thread;
        if extent.from == 0 {
            sums.fill(Running::default());
            held.iter_mut().for_each(Vec::clear);
        }
        let mut done = 0;
        while done < extent.bytes {
            let n = PIECE_BYTES.min(extent.bytes - done);
            let from = extent.from + done;
            for (member, (lane, piece)) in lanes.iter_mut().zip(pieces.iter_mut()).enumerate() {
                let there = self.there(member, extent.of.position, from, n).len();
                piece.resize(n, 0);
                let (bytes, zeros) = piece.split_at_mut(there);
                zeros.fill(0);
                if let Some(lane) = lane {
                    lane.stream.tcp.read_exact(bytes)?;
                }
                sums.get_mut(member).into_iter().for_each(|s| s.read(bytes));
            }
            let (data, at) = (pieces.len(), self.layout.parity(extent.of.position).start + from);
            encoder.encode(pieces, |number, piece| {
                sums.get_mut(data + number).into_iter().for_each(|s| s.read(piece));
                match (self.outputs.get(number).map(|o| &o.to), held.get_mut(number)) {
                    (Some(To::Slot(slot)), _) => slot.store(at, piece),
                    (Some(To::Keeper(_)), Some(held)) => {
                        held.extend_from_slice(piece);
                        Ok(())
                    }
                    _ => Ok(()),
                }
            })?;
            done += n;
        }
        Ok(())
    }

    /// Returns the first member whose chunk differs from what was captured, or `None` if all are
    /// whole.
    fn arrived_whole(&self, thread: &EncoderThread, position: usize) -> Option<usize> {
        self.crcs.iter().enumerate().find_map(|(member, crcs)| {
            let chunk = self.layout.chunk(member, position)?;
            (crcs.get(chunk) != thread.sums.get(member).map(|s| s.value()).as_ref()).then_some(member)
        })
    }

    /// Records the checksums of a position, and sends it to its keepers.
    fn deliver(&self, thread: &mut EncoderThread, of: Attempt, left: &mut VecDeque<Attempt>) -> io::Result<()> {
        let data = self.task.members.len();
        for (number, output) in self.outputs.iter().enumerate() {
            let sum = thread.sums.get(data + number).map_or(0, |s| s.value());
            output.crcs.get(of.position).into_iter().for_each(|c| c.store(sum, Ordering::Release));
            let To::Keeper(_) = output.to else { continue };
            self.answers(thread, number, self.window.buffers.max(1), left)?;
            let (Some(Some(stream)), Some(bytes)) = (thread.keepers.get_mut(number), thread.held.get(number)) else {
                continue;
            };
            let mut passed = 0;
            while passed < bytes.len() {
                let Pass { bytes: n, alone } = self.gate.pass(bytes.len() - passed);
                if n == 0 {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                let n = n.min(bytes.len() - passed);
                if passed == 0 {
                    let length = count(bytes.len())?;
                    let mut header = (self.layout.parity(of.position).start as u64).to_le_bytes().to_vec();
                    header.extend(length.to_le_bytes());
                    header.extend(sum.to_le_bytes());
                    stream.tcp.write_all(&header)?;
                }
                stream.tcp.write_all(bytes.get(passed..passed + n).unwrap_or_default())?;
                passed += n;
                if alone {
                    self.gate.arrived(true);
                }
            }
            thread.sent.get_mut(number).into_iter().for_each(|s| s.push_back(of));
        }
        Ok(())
    }

    /// Reads answers of a keeper until at most `most` positions are in flight to it.
    fn answers(
        &self,
        thread: &mut EncoderThread,
        number: usize,
        most: usize,
        left: &mut VecDeque<Attempt>,
    ) -> io::Result<()> {
        let (Some(Some(stream)), Some(sent)) = (thread.keepers.get_mut(number), thread.sent.get_mut(number)) else {
            return Ok(());
        };
        while sent.len() > most {
            let mut answer = [0; 8];
            stream.tcp.read_exact(&mut answer)?;
            let answer = u64::from_le_bytes(answer);
            let Some(of) = sent.pop_front() else { break };
            if answer & !DAMAGED != self.layout.parity(of.position).start as u64 {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "answer to a position that was not sent"));
            }
            if answer & DAMAGED != 0 {
                let damaged = || io::Error::new(io::ErrorKind::InvalidData, "parity repeatedly arrives damaged");
                left.push_back(of.again().ok_or_else(damaged)?);
            }
        }
        Ok(())
    }

    /// Seals the parity shards, when all positions have arrived.
    fn seal(self, mut description: Description) -> io::Result<()> {
        for (number, output) in (0..).zip(self.outputs) {
            description.number = number;
            description.crcs = output.crcs.iter().map(|c| c.load(Ordering::Acquire)).collect();
            let json = description.to_bytes()?;
            match output.to {
                To::Slot(slot) => {
                    slot.describe(self.task.of.label(self.task.run), &json, self.lengths.region)?;
                    slot.seal(None);
                }
                To::Keeper(peer) => {
                    let mut stream = self.streams.take(&peer)?;
                    if begin(&mut stream, self.task, number, self.lengths)? {
                        end(&mut stream)?;
                        frame::write(&mut stream.tcp, &Ask::SealParity { bytes: json.len() as u64, crc: crc(&json) })?;
                        stream.tcp.write_all(&json)?;
                        match stream.answer()? {
                            Answer::Done => {}
                            other => return Err(unexpected(&other)),
                        }
                    }
                    self.streams.give(&peer, stream);
                }
                To::Nowhere => {}
            }
        }
        Ok(())
    }
}
