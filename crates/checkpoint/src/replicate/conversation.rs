//! The conversation on one stream from another agent: its upload and its found slot, and the
//! answers to its requests.

use super::budget::Portion;
use super::entrance::Until;
use super::protocol::{Answer, Ask, BUSY, DAMAGED, EXTENT_HEADER, SILENCE, WHEN_IDLE, description_crc};
use super::replica_holder::ReplicaHolder;
use super::upload::Upload;
use crate::arena::{Label, Slot};
use crate::erasure::parity_shard::{Incoming, Lengths, ParityRound};
use crate::format::digest::{CHUNK_BYTES, crc};
use everstep_wire::frame;
use everstep_wire::limits::INDEX_BYTES_MAX;
use rustix::net::sockopt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// After this much silence, TCP checks whether the machine at the other end still exists.
const KEEPALIVE: Duration = Duration::from_mins(1);
/// An index or a description arrives at least this fast, in bytes per second, after [`SILENCE`]: a
/// peer may not keep the memory for it by sending a byte now and then.
const SLOWEST: u64 = 4 << 20;
/// Bytes copied out of a slot at a time: few enough to be still in the cache when they are sent.
const PIECE_BYTES: usize = 256 << 10;

/// The holder's side of one stream.
pub struct Conversation<'a> {
    holder: &'a ReplicaHolder,
    tcp: Arc<TcpStream>,
    /// The shard that the stream delivers.
    upload: Option<Arc<Upload>>,
    /// The parity shard that the stream delivers.
    incoming: Option<Arc<Incoming>>,
    /// The slot that the other agent reads.
    found: Option<Arc<Slot>>,
    /// Buffer for a piece of that slot that is sent to the other agent.
    piece: Vec<u8>,
}

/// What to do after a request.
enum Next {
    /// Send this answer.
    Answer(Answer),
    /// Send nothing: the request has been answered, or needs no answer.
    Done,
    /// Close the stream: the request makes no sense.
    Close,
}

fn refused(why: impl Into<String>) -> Next {
    Next::Answer(Answer::Refused { why: why.into() })
}

impl<'a> Conversation<'a> {
    /// Creates the conversation on a stream whose other end has proved that it belongs to the job.
    pub fn new(holder: &'a ReplicaHolder, tcp: TcpStream) -> Self {
        Conversation { holder, tcp: Arc::new(tcp), upload: None, incoming: None, found: None, piece: Vec::new() }
    }

    /// Answers requests until the other side closes the stream.
    ///
    /// # Errors
    /// Those of the stream; `InvalidData` for anything that is not a request.
    pub fn run(mut self) -> io::Result<()> {
        self.tcp.set_read_timeout(Some(SILENCE))?;
        frame::write(&mut &*self.tcp, &Answer::Done)?;
        // Between steps a stream may be silent for long; it ends when the other side closes it, or
        // when its machine is lost.
        self.tcp.set_read_timeout(None)?;
        sockopt::set_socket_keepalive(&self.tcp, true)?;
        sockopt::set_tcp_keepidle(&self.tcp, KEEPALIVE)?;
        sockopt::set_tcp_keepintvl(&self.tcp, SILENCE)?;
        loop {
            // The peer may be silent before a request, but not within one.
            while let Err(e) = self.tcp.peek(&mut [0]) {
                if e.kind() != io::ErrorKind::Interrupted {
                    return Err(e);
                }
            }
            let ask = frame::read::<Ask>(&mut Until::new(&self.tcp, SILENCE))?;
            self.tcp.set_read_timeout(None)?;
            match self.answer(&ask)? {
                Next::Answer(answer) => frame::write(&mut &*self.tcp, &answer)?,
                Next::Done => {}
                Next::Close => return Ok(()),
            }
        }
    }

    fn answer(&mut self, ask: &Ask) -> io::Result<Next> {
        match *ask {
            Ask::Hello { .. } => Ok(Next::Answer(Answer::Done)),
            Ask::List => Ok(Next::Answer(Answer::Slots(self.holder.rows()))),
            Ask::Begin { .. } => self.begin(ask),
            Ask::Join { label } => Ok(self.join(label)),
            Ask::Data => {
                let Some(upload) = self.upload.clone() else { return Ok(Next::Close) };
                // A sender that uses idle spans only may be silent for long; when its generation is
                // over, the stream is closed.
                self.extents(&upload)?;
                Ok(Next::Answer(Answer::Done))
            }
            Ask::Seal => Ok(self.seal()),
            Ask::Find(_) | Ask::Taken { .. } | Ask::FindParity(_) => self.find(ask),
            Ask::Read { .. } | Ask::ReadBytes { .. } => {
                let Some(slot) = self.found.clone() else { return Ok(Next::Close) };
                let Some(range) = asked(&slot, ask) else { return Ok(Next::Close) };
                self.send(&slot, range)?;
                Ok(Next::Done)
            }
            Ask::Parity { .. } => self.parity(ask),
            Ask::SealParity { bytes, crc } => self.seal_parity(bytes, crc),
        }
    }

    fn begin(&mut self, ask: &Ask) -> io::Result<Next> {
        let Ask::Begin { label, region, index, crc, base } = *ask else { return Ok(Next::Close) };
        let (json, _portion) = self.received(index)?;
        if description_crc(&label, &json) != crc {
            return Ok(refused("label or index arrived damaged"));
        }
        // If that was the same shard, its streams are closed now, and this one continues.
        self.set_upload(None);
        Ok(match self.holder.begin(label, region, &json, base) {
            Ok(None) => Next::Answer(Answer::Done),
            Ok(Some(begun)) => {
                let missing = begun.missing();
                self.set_upload(Some(begun));
                Next::Answer(Answer::Missing(missing))
            }
            Err(why) => refused(why.to_string()),
        })
    }

    fn join(&mut self, label: Label) -> Next {
        self.set_upload(self.holder.begun(label));
        match &self.upload {
            Some(_) => Next::Answer(Answer::Done),
            None => refused("nobody has begun this"),
        }
    }

    /// Makes the stream deliver this shard, and no other, from now on.
    fn set_upload(&mut self, upload: Option<Arc<Upload>>) {
        if let Some(before) = &self.upload {
            before.suppliers.detach(&self.tcp);
        }
        if let Some(upload) = &upload {
            upload.suppliers.attach(&self.tcp);
        }
        self.upload = upload;
    }

    fn seal(&mut self) -> Next {
        match &self.upload {
            Some(upload) if upload.seal() => {
                self.holder.uploaded(upload);
                Next::Answer(Answer::Done)
            }
            Some(upload) => Next::Answer(Answer::Missing(upload.missing())),
            None => refused("nobody has begun this"),
        }
    }

    fn find(&mut self, ask: &Ask) -> io::Result<Next> {
        self.found = self.holder.find(ask);
        let described = self.found.as_ref().and_then(|slot| Some((slot.described().ok()?, slot.region_bytes())));
        let Some(((label, index), region)) = described else { return Ok(Next::Answer(Answer::NotHere)) };
        let crc = description_crc(&label, &index);
        frame::write(&mut &*self.tcp, &Answer::Found { label, region, index: index.len() as u64, crc })?;
        (&*self.tcp).write_all(&index)?;
        Ok(Next::Done)
    }

    fn parity(&mut self, ask: &Ask) -> io::Result<Next> {
        let Ask::Parity { of, round, region, description, base } = *ask else { return Ok(Next::Close) };
        if let Some(before) = self.incoming.take() {
            before.suppliers.detach(&self.tcp);
        }
        match self.holder.parity(ParityRound { want: of, round }, Lengths { region, description }, base) {
            Ok(None) => Ok(Next::Answer(Answer::Missing(Vec::new()))),
            Ok(Some(begun)) => {
                begun.suppliers.attach(&self.tcp);
                frame::write(&mut &*self.tcp, &Answer::Done)?;
                self.incoming.insert(begun).receive(&self.tcp)?;
                Ok(Next::Done)
            }
            Err(why) => Ok(refused(why.to_string())),
        }
    }

    fn seal_parity(&mut self, bytes: u64, sum: u64) -> io::Result<Next> {
        let Some(incoming) = self.incoming.clone() else { return Ok(Next::Close) };
        let (json, _portion) = self.received(bytes)?;
        if crc(&json) != sum {
            return Ok(refused("the description arrived damaged"));
        }
        Ok(match incoming.seal(&json) {
            Ok(()) => {
                self.holder.arrived(&incoming.of.want);
                Next::Answer(Answer::Done)
            }
            Err(why) => refused(why.to_string()),
        })
    }

    /// Sends a part of the region. The slot need not be pinned: a step that has arrived here may be
    /// replaced by a later one meanwhile, and the other agent detects that by the checksums.
    fn send(&mut self, slot: &Slot, range: Range<usize>) -> io::Result<()> {
        self.piece.resize(PIECE_BYTES, 0);
        for at in range.clone().step_by(PIECE_BYTES) {
            let piece = self.piece.get_mut(..PIECE_BYTES.min(range.end - at)).unwrap_or_default();
            if !slot.load(at, piece) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            (&*self.tcp).write_all(piece)?;
        }
        Ok(())
    }

    /// Receives an index or a description of `bytes` bytes. Returns it with its portion of the
    /// memory budget.
    fn received(&self, bytes: u64) -> io::Result<(Vec<u8>, Portion<'a>)> {
        if bytes > INDEX_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "index over the limit"));
        }
        // The other side waits for `SILENCE`.
        let portion = self.holder.budget.take(bytes, SILENCE / 2)?;
        let within = SILENCE + Duration::from_secs(bytes / SLOWEST);
        let json = frame::read_bytes(&mut Until::new(&self.tcp, within), bytes)?;
        self.tcp.set_read_timeout(None)?;
        Ok((json, portion))
    }

    /// Reads extents from the stream until an empty one arrives, and answers each.
    fn extents(&self, upload: &Upload) -> io::Result<()> {
        let mut tcp = &*self.tcp;
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
            let damaged = upload.receive(offset, len, &mut tcp)?;
            let busy = when_idle && !self.holder.await_idle();
            let answer = offset | if damaged { DAMAGED } else { 0 } | if busy { BUSY } else { 0 };
            tcp.write_all(&answer.to_le_bytes())?;
        }
    }
}

/// Returns the requested range of the region; `None` if it lies outside, if it is too long for the
/// request, or if the request is not for a part of the region.
fn asked(slot: &Slot, ask: &Ask) -> Option<Range<usize>> {
    let (chunk, region) = (CHUNK_BYTES as u64, slot.region_bytes());
    let (from, to) = match *ask {
        Ask::Read { first, count } => {
            (first.checked_mul(chunk)?, first.checked_add(count)?.checked_mul(chunk)?.min(region))
        }
        Ask::ReadBytes { at, bytes } if bytes <= chunk => (at, at.checked_add(bytes).filter(|end| *end <= region)?),
        _ => return None,
    };
    (from <= to).then_some(usize::try_from(from).ok()?..usize::try_from(to).ok()?)
}
