//! The sending side: a pinned slot to one peer, over a few streams, with a fixed limit on the bytes
//! in flight.

use super::protocol::{
    Answer, Ask, BUSY, DAMAGED, EXTENT_HEADER, Peer, Stream, WHEN_IDLE, description_crc, unexpected,
};
use crate::arena::{Label, Reader, Slot};
use crate::format::digest::CHUNK_BYTES;
use everstep_wire::frame;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Number of times that a chunk is sent if it arrives damaged.
const ATTEMPTS: u32 = 3;

/// Permission to send a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Number of bytes that may be sent; 0 to give up.
    pub bytes: usize,
    /// Whether nothing more may be sent until they have arrived.
    pub alone: bool,
}

/// Decides when bytes may be sent. Called by several threads, before each extent, when it can be
/// sent at once.
pub trait Gate: Sync {
    /// Waits until some of `bytes` may be sent.
    fn pass(&self, bytes: usize) -> Pass;
    /// Reports that bytes sent alone have arrived, and whether the network is idle at the other
    /// end.
    fn arrived(&self, _idle: bool) {}
}

/// Permits sending as fast as the network allows.
#[derive(Debug)]
pub struct Open;

impl Gate for Open {
    fn pass(&self, bytes: usize) -> Pass {
        Pass { bytes, alone: false }
    }
}

/// Limit on the bytes in flight: `buffers` extents of at most `extent` bytes per stream, not
/// answered yet (Gemini §5.2: a budget S in b sub-buffers).
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Length of an extent in bytes, at most that of a chunk.
    pub extent: usize,
    /// Number of extents in flight per stream.
    pub buffers: usize,
    /// Number of streams, at most that of the link.
    pub streams: usize,
}

impl Default for Window {
    fn default() -> Self {
        Window { extent: CHUNK_BYTES, buffers: 4, streams: usize::MAX }
    }
}

/// Streams to one peer, kept from step to step.
#[derive(Debug)]
pub struct Link {
    peer: Peer,
    streams: Vec<Stream>,
    wanted: usize,
    /// The step that every node would go back to now: holders keep it.
    pub base: Option<u64>,
    /// Bytes sent so far.
    pub sent: AtomicU64,
}

struct Job<'a> {
    slot: &'a Reader,
    region: usize,
    window: Window,
    gate: &'a dyn Gate,
    /// Chunks still to be sent, with the number of attempts so far.
    left: Mutex<VecDeque<(u64, u32)>>,
    sent: &'a AtomicU64,
}

impl Link {
    /// Creates a link with `streams` streams, which are opened when they are needed.
    #[must_use]
    pub fn new(peer: Peer, streams: usize) -> Self {
        Link { peer, streams: Vec::new(), wanted: streams.max(1), base: None, sent: AtomicU64::new(0) }
    }

    /// Returns the peer.
    #[must_use]
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Delivers a sealed copy of a slot to the peer. Chunks that the peer has already are not sent.
    /// The slot must be pinned.
    ///
    /// # Errors
    /// Those of the network; `PermissionDenied` with the peer's reason; `Interrupted` when the gate
    /// gave up; `InvalidData` when the slot is not sealed or is damaged.
    pub fn push(&mut self, slot: &Arc<Slot>, window: Window, gate: &dyn Gate) -> io::Result<()> {
        let done = self.attempt(slot, window, gate);
        if done.is_err() {
            // Their state is unknown: the next attempt begins with new ones.
            self.streams.clear();
        }
        done
    }

    fn attempt(&mut self, slot: &Arc<Slot>, window: Window, gate: &dyn Gate) -> io::Result<()> {
        let damaged = |e: crate::arena::SlotError| io::Error::new(io::ErrorKind::InvalidData, e.to_string());
        let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        // Counted, so that the slot is not written until the push is over. The pin may be moved
        // before that.
        let slot = &slot.read().ok_or_else(|| invalid("the slot is not sealed, or is being repaired"))?;
        if !slot.pinned() {
            return Err(invalid("the slot is not pinned: its step is not wanted any more"));
        }
        let (label, index) = slot.described().map_err(damaged)?;
        let region = slot.region_bytes();
        if self.streams.is_empty() {
            self.streams.push(Stream::open(&self.peer)?);
        }
        let Some(first) = self.streams.first_mut() else { return Ok(()) };
        let crc = description_crc(&label, &index);
        frame::write(&mut first.tcp, &Ask::Begin { label, region, index: index.len() as u64, crc, base: self.base })?;
        first.tcp.write_all(&index)?;
        let missing = match first.answer()? {
            Answer::Missing(runs) => runs,
            Answer::Done => return Ok(()),
            other => return Err(unexpected(&other)),
        };
        let chunks = wanted(&missing, region.div_ceil(CHUNK_BYTES as u64))
            .ok_or_else(|| invalid("the peer asks for chunks that this shard does not have, or for some twice"))?;
        let streams = self.wanted.min(window.streams).min(chunks.len().div_ceil(2)).max(1);
        while self.streams.len() < streams {
            self.streams.push(Stream::open(&self.peer)?);
        }
        let job = Job {
            slot,
            region: usize::try_from(region).map_err(io::Error::other)?,
            window: Window { extent: window.extent.clamp(4096, CHUNK_BYTES), buffers: window.buffers.max(1), ..window },
            gate,
            left: Mutex::new(chunks),
            sent: &self.sent,
        };
        std::thread::scope(|scope| {
            let job = &job;
            let mut used = self.streams.iter_mut().take(streams);
            let own = used.next();
            // Chunks of helpers that cannot be started are sent by this thread.
            let helper = |stream| std::thread::Builder::new().spawn_scoped(scope, move || job.help(stream, label)).ok();
            let helpers: Vec<_> = used.map_while(helper).collect();
            let mut done = own.map_or(Ok(()), |stream| job.send(stream));
            for helper in helpers {
                done = done.and(helper.join().unwrap_or_else(|_| Err(io::Error::other("a sender panicked"))));
            }
            done
        })?;
        match self.streams.first_mut().map(|s| s.ask(&Ask::Seal)) {
            Some(Ok(Answer::Done)) | None => Ok(()),
            Some(Ok(other)) => Err(unexpected(&other)),
            Some(Err(e)) => Err(e),
        }
    }
}

/// Returns the chunks in these runs, with no attempts so far. Returns `None` unless they are among
/// the shard's `chunks`, each once and in order: the peer must not decide how much memory that
/// takes.
fn wanted(runs: &[(u64, u64)], chunks: u64) -> Option<VecDeque<(u64, u32)>> {
    let mut end = 0;
    for (first, count) in runs {
        let begins_after = *first >= end;
        end = first.checked_add(*count).filter(|end| begins_after && *end <= chunks)?;
    }
    Some(runs.iter().flat_map(|(first, count)| *first..first + count).map(|chunk| (chunk, 0)).collect())
}

impl Job<'_> {
    fn help(&self, stream: &mut Stream, label: Label) -> io::Result<()> {
        stream.expect_done(&Ask::Join { label })?;
        self.send(stream)
    }

    fn next(&self) -> Option<(u64, u32)> {
        self.left.lock().ok()?.pop_front()
    }

    fn send(&self, stream: &mut Stream) -> io::Result<()> {
        frame::write(&mut stream.tcp, &Ask::Data)?;
        let mut open: VecDeque<(u64, u32)> = VecDeque::new();
        loop {
            while let Some((chunk, attempts)) = self.next() {
                let (from, to) = (chunk as usize * CHUNK_BYTES, self.region.min((chunk as usize + 1) * CHUNK_BYTES));
                let mut at = from;
                while at < to {
                    // Make room first: bytes that have passed the gate are sent at once.
                    while open.len() >= self.window.buffers {
                        self.take_answer(stream, &mut open)?;
                    }
                    let Pass { bytes: n, alone } = self.gate.pass(self.window.extent.min(to - at));
                    if n == 0 {
                        return Err(io::ErrorKind::Interrupted.into());
                    }
                    let bytes = self.slot.region(at, n).ok_or(io::ErrorKind::InvalidData)?;
                    let mut header = [0; EXTENT_HEADER];
                    header[..8].copy_from_slice(&(at as u64).to_le_bytes());
                    let length = u32::try_from(n).map_err(io::Error::other)? | if alone { WHEN_IDLE } else { 0 };
                    header[8..].copy_from_slice(&length.to_le_bytes());
                    stream.tcp.write_all(&header)?;
                    stream.tcp.write_all(bytes)?;
                    self.sent.fetch_add(n as u64, Ordering::Relaxed);
                    open.push_back((at as u64, attempts));
                    at += n;
                    if alone {
                        let mut idle = true;
                        while !open.is_empty() {
                            idle = self.take_answer(stream, &mut open)?;
                        }
                        self.gate.arrived(idle);
                    }
                }
            }
            // Chunks that arrived damaged are sent again, by this stream or another one.
            while !open.is_empty() {
                self.take_answer(stream, &mut open)?;
            }
            if self.left.lock().map_err(|e| io::Error::other(e.to_string()))?.is_empty() {
                break;
            }
        }
        stream.tcp.write_all(&[0; EXTENT_HEADER])?;
        match stream.answer()? {
            Answer::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Reads one answer. Returns whether the network is idle at the other end, if that was asked.
    fn take_answer(&self, stream: &mut Stream, open: &mut VecDeque<(u64, u32)>) -> io::Result<bool> {
        let mut answer = [0; 8];
        stream.tcp.read_exact(&mut answer)?;
        let answer = u64::from_le_bytes(answer);
        let idle = answer & BUSY == 0;
        let Some((offset, attempts)) = open.pop_front() else { return Ok(idle) };
        if answer & !(DAMAGED | BUSY) != offset {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "answer to an extent that was not sent"));
        }
        if answer & DAMAGED != 0 {
            if attempts + 1 >= ATTEMPTS {
                let why = format!("the chunk at {offset} repeatedly arrives damaged, or is damaged here");
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            let chunk = offset / CHUNK_BYTES as u64;
            self.left.lock().map_err(|e| io::Error::other(e.to_string()))?.push_back((chunk, attempts + 1));
        }
        Ok(idle)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_chunks_that_there_are_can_be_asked_for() {
        let chunks = |runs: &[(u64, u64)]| wanted(runs, 10).map(|all| all.iter().map(|(c, _)| *c).collect::<Vec<_>>());
        assert_eq!(chunks(&[]), Some(vec![]));
        assert_eq!(chunks(&[(0, 2), (2, 1), (9, 1)]), Some(vec![0, 1, 2, 9]));
        for runs in
            [[(0, 1 << 40), (0, 0)], [(0, 1), (9, 2)], [(1, u64::MAX), (1, 1)], [(0, 2), (1, 1)], [(5, 1), (0, 1)]]
        {
            assert_eq!(chunks(&runs), None, "{runs:?}");
        }
    }
}
