//! The protocol of two agents on a replica stream: frames of JSON for requests and answers, raw
//! bytes for data.
//!
//! Data to a holder arrives as extents: offset (u64), length (u32), both little endian, then the
//! bytes; each is answered by its offset (u64), with [`DAMAGED`] set when it completed a chunk
//! whose checksum differs. Length 0 ends the data. With [`WHEN_IDLE`] in its length, an extent is
//! answered when the holder's own collectives are over. Parity, whose checksums are known only when
//! it is computed, arrives as whole positions, each with its checksum (u64) after the length.

use crate::arena::Label;
use crate::copy_crc::Running;
use everstep_wire::frame;
use everstep_wire::limits::{CONNECT_TIMEOUT, INDEX_BYTES_MAX};
use serde::{Deserialize, Serialize};
use std::io::{self, Read};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Version of the protocol in this file.
pub const VERSION: u32 = 2;
/// In an answer to an extent: the checksum of its chunk differs from that in the index, and the
/// chunk must be sent again.
pub const DAMAGED: u64 = 1 << 63;
/// Time after which a silent peer is given up.
pub const SILENCE: Duration = Duration::from_secs(10);
/// How often a reader that waits for bytes checks whether they are still wanted.
const LOOK: Duration = Duration::from_millis(100);
/// In an answer to an extent: the holder's collectives are not over yet.
pub const BUSY: u64 = 1 << 62;

/// In the length of an extent: answer when the network is idle at that end, too.
pub const WHEN_IDLE: u32 = 1 << 31;

/// Bytes of the header of an extent.
pub const EXTENT_HEADER: usize = 12;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Introduces the sender; first on every stream.
    Hello {
        /// [`VERSION`] of the sender
        version: u32,
        /// the job's secret
        token: String,
        /// [`crate::arena::job_hash`] of the job's name
        job: u64,
    },
    /// Announces a slot to be stored; the bytes of its index follow at once. Answer:
    /// [`Answer::Missing`], or [`Answer::Done`] when it is here already.
    Begin {
        /// rank and step of the shard
        label: Label,
        /// length of the region in bytes
        region: u64,
        /// length of the index (JSON) in bytes
        index: u64,
        /// [`description_crc`] of label and index
        crc: u64,
        /// the step that every node would go back to now, which is not overwritten
        base: Option<u64>,
    },
    /// Adds this stream to those that deliver a slot that another stream began. Answer:
    /// [`Answer::Done`].
    Join {
        /// rank and step of the shard
        label: Label,
    },
    /// Extents follow, up to one of length 0. Answer after the last: [`Answer::Done`].
    Data,
    /// Seals the slot of this stream. Answer: [`Answer::Done`], or [`Answer::Missing`] when it is
    /// not complete.
    Seal,
    /// Looks for a shard. Answer: [`Answer::Found`], then the index, or [`Answer::NotHere`].
    Find(Want),
    /// Lists the slots in this node's memory. Answer: [`Answer::Slots`].
    List,
    /// Like [`Ask::Find`], but only for shards that this node has taken for this round of
    /// replication and will not overwrite before that is over. Waits until it has.
    Taken {
        /// the shard
        want: Want,
        /// number of the round
        round: u64,
    },
    /// Like [`Ask::Find`], for a parity shard, whose description follows.
    FindParity(ParityWant),
    /// Reads chunks of the slot that was found last on this stream. The bytes follow without an
    /// answer.
    Read {
        /// number of the first chunk
        first: u64,
        /// number of chunks
        count: u64,
    },
    /// Reads a part of the region that was found last on this stream, at most a chunk. Its bytes
    /// follow without an answer.
    ReadBytes {
        /// offset of the first byte in the region
        at: u64,
        /// number of bytes
        bytes: u64,
    },
    /// Announces a parity shard to be stored, or another stream that delivers a part of it. Answer:
    /// [`Answer::Done`], or an empty [`Answer::Missing`] when it is here already.
    Parity {
        /// the shard
        of: ParityWant,
        /// round of replication; a new round begins anew
        round: u64,
        /// length of the region in bytes
        region: u64,
        /// maximum length of its description in bytes
        description: u64,
        /// the step that every node would go back to now, which is not overwritten
        base: Option<u64>,
    },
    /// Seals a parity shard that has arrived; its description follows. Answer: [`Answer::Done`].
    SealParity {
        /// length of the description in bytes
        bytes: u64,
        /// checksum of the description
        crc: u64,
    },
}

/// Identifies a parity shard that is looked for or delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ParityWant {
    /// Number of its stripe.
    pub stripe: u32,
    /// Number of the parity shard in the stripe.
    pub number: u32,
    /// Number of ranks.
    pub world_size: u64,
    /// Generation that captured the members' shards.
    pub generation: u64,
    /// Step of the members' shards.
    pub step: u64,
}

/// Identifies a shard that is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// Rank that captured it.
    pub rank: u64,
    /// Number of ranks when it was captured.
    pub world_size: u64,
    /// Generation that captured it.
    pub generation: u64,
    /// Step of the shard.
    pub step: u64,
}

impl Want {
    /// Returns whether a slot with this label is the shard that is looked for.
    #[must_use]
    pub fn is(&self, label: &Label) -> bool {
        (label.rank, label.world_size, label.generation, label.step)
            == (self.rank, self.world_size, self.generation, self.step)
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The request was carried out.
    Done,
    /// Runs of chunks that are not here yet: (first, count).
    Missing(Vec<(u64, u64)>),
    /// The shard is here; the bytes of its index follow at once.
    Found {
        /// label of the slot
        label: Label,
        /// length of the region in bytes
        region: u64,
        /// length of the index (JSON) in bytes
        index: u64,
        /// [`description_crc`] of label and index
        crc: u64,
    },
    /// All slots that are not empty.
    Slots(Vec<SlotRow>),
    /// The shard is not here.
    NotHere,
    /// The request was refused.
    Refused {
        /// reason, as a sentence
        why: String,
    },
}

/// Returns the checksum of label and index; the region itself has its chunks' checksums.
#[must_use]
pub fn description_crc(label: &Label, index: &[u8]) -> u64 {
    let mut sum = Running::default();
    sum.read(&serde_json::to_vec(label).unwrap_or_default());
    sum.read(index);
    sum.value()
}

/// Describes a slot for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotRow {
    /// Rank and step of the slot.
    pub label: Label,
    /// Whether it is kept for another node.
    pub replica: bool,
    /// Whether it is parity of several nodes' shards: the label's rank is then its stripe's number.
    pub parity: bool,
    /// Length of the region in bytes.
    pub bytes: u64,
    /// When it was sealed, in seconds since 1970.
    pub sealed_at: u64,
    /// Number of copies on other nodes.
    pub replicas: u64,
    /// Whether the step is on durable storage, too.
    pub durable: bool,
    /// Path of the slot's file on that node.
    pub path: String,
}

/// Another agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// `HOST:PORT` of its replica streams.
    pub address: String,
    /// The job's secret.
    pub token: String,
    /// [`crate::arena::job_hash`] of the job's name.
    pub job: u64,
}

/// A stream to another agent that has accepted the greeting.
#[derive(Debug)]
pub struct Stream {
    /// TCP connection to the agent.
    pub tcp: TcpStream,
}

impl Stream {
    /// Connects and sends the greeting.
    ///
    /// # Errors
    /// Those of the network; `PermissionDenied` when the other side refuses.
    pub fn open(peer: &Peer) -> io::Result<Self> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{} has no address", peer.address));
        for address in peer.address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
                Ok(tcp) => {
                    everstep_wire::admission::check_peer(tcp.local_addr()?, tcp.peer_addr()?)?;
                    tcp.set_nodelay(true)?;
                    tcp.set_read_timeout(Some(SILENCE))?;
                    tcp.set_write_timeout(Some(SILENCE))?;
                    let mut stream = Stream { tcp };
                    let hello = Ask::Hello { version: VERSION, token: peer.token.clone(), job: peer.job };
                    stream.expect_done(&hello)?;
                    return Ok(stream);
                }
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// Sends a request, and waits for the answer.
    ///
    /// # Errors
    /// Those of the network; `PermissionDenied` for [`Answer::Refused`].
    pub fn ask(&mut self, ask: &Ask) -> io::Result<Answer> {
        frame::write(&mut self.tcp, ask)?;
        self.answer()
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// The same as for [`Stream::ask`].
    pub fn answer(&mut self) -> io::Result<Answer> {
        match frame::read(&mut self.tcp)? {
            Answer::Refused { why } => Err(io::Error::new(io::ErrorKind::PermissionDenied, why)),
            answer => Ok(answer),
        }
    }

    /// Fills `bytes`, unless `over` is set before the last of them has arrived.
    ///
    /// # Errors
    /// Those of the network; `Interrupted` when `over` is set.
    pub fn read_while(&mut self, bytes: &mut [u8], over: &AtomicBool) -> io::Result<()> {
        self.tcp.set_read_timeout(Some(LOOK))?;
        let (mut filled, mut heard) = (0, Instant::now());
        while filled < bytes.len() {
            match self.tcp.read(&mut bytes[filled..]) {
                _ if over.load(Ordering::Acquire) => return Err(io::ErrorKind::Interrupted.into()),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => (filled, heard) = (filled + n, Instant::now()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && heard.elapsed() < SILENCE => {}
                Err(e) => return Err(e),
            }
        }
        self.tcp.set_read_timeout(Some(SILENCE))
    }

    /// Looks for a slot that is described by JSON. Returns its label, the length of its region in
    /// bytes, and the verified JSON.
    ///
    /// # Errors
    /// The same as for [`Stream::ask`]; `NotFound` when it is not there; `InvalidData` when label
    /// or JSON are damaged or over the limit.
    pub fn find(&mut self, ask: &Ask) -> io::Result<(Label, u64, Vec<u8>)> {
        let (label, region, length, crc) = match self.ask(ask)? {
            Answer::Found { label, region, index, crc } => (label, region, index, crc),
            Answer::NotHere => return Err(io::ErrorKind::NotFound.into()),
            other => return Err(unexpected(&other)),
        };
        if length > INDEX_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "an index over the limit"));
        }
        let mut json = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        self.tcp.read_exact(&mut json)?;
        if description_crc(&label, &json) != crc {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "label or index arrived damaged"));
        }
        Ok((label, region, json))
    }

    /// Sends a request that can only be answered by [`Answer::Done`] or refused.
    ///
    /// # Errors
    /// The same as for [`Stream::ask`]; also fails for any other answer.
    pub fn expect_done(&mut self, ask: &Ask) -> io::Result<()> {
        match self.ask(ask)? {
            Answer::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }
}

/// Returns the error for an answer that does not belong to the request.
#[must_use]
pub fn unexpected(answer: &Answer) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("unexpected answer {answer:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::TcpListener;

    #[test]
    fn a_reader_whose_peer_is_silent_stops_when_it_is_over() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = Stream { tcp: TcpStream::connect(listener.local_addr().unwrap()).unwrap() };
        let (mut peer, _) = listener.accept().unwrap();
        peer.write_all(b"some").unwrap();
        let (over, mut bytes) = (AtomicBool::new(false), [0; 8]);
        stream.read_while(&mut bytes[..4], &over).unwrap();
        assert_eq!(&bytes[..4], b"some");
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| stream.read_while(&mut bytes, &over));
            over.store(true, Ordering::Release);
            assert_eq!(reader.join().unwrap().unwrap_err().kind(), io::ErrorKind::Interrupted);
        });
    }
}
