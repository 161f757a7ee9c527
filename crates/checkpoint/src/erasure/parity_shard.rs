//! Parity shards: how they describe themselves, and how they arrive from the node that has computed
//! them.

use super::layout::Layout;
use crate::arena::{Label, Slot, SlotError, State};
use crate::copy_crc::Running;
use crate::format::digest::{CHUNK_BYTES, crc};
use crate::format::index::Index;
use crate::replicate::protocol::{DAMAGED, ParityWant};
use crate::replicate::refusal::Refusal;
use crate::replicate::suppliers::Suppliers;
use everstep_core::id::{Generation, Rank, Step};
use everstep_core::message::{Parity, Purpose};
use everstep_wire::limits::INDEX_BYTES_MAX;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, OnceLock};

/// Bytes before each position of a parity shard on a stream: offset (u64), length (u32), checksum
/// (u64), little endian.
pub const HEADER: usize = 20;
/// Number of bytes that are received and summed at a time, while they are in the cache.
const PIECE_BYTES: usize = 256 << 10;

/// A member's shard, as its slot describes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Described {
    /// The rank and the step.
    pub label: Label,
    /// Length of its region in bytes.
    pub region: u64,
    /// Its index, byte for byte.
    pub index: Box<RawValue>,
}

/// What a parity shard was computed from, and its own checksums. Enough to compute any of its
/// members' shards again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Description {
    /// Which of the stripe's parity shards this is.
    pub number: u32,
    /// Number of parity shards of the stripe.
    pub of: u32,
    /// Members in order; `None` for zeros.
    pub members: Vec<Option<Described>>,
    /// CRC-64/NVME of each position.
    pub crcs: Vec<u64>,
}

impl Description {
    /// Reads the JSON that [`Description::to_bytes`] wrote.
    ///
    /// # Errors
    /// `InvalidData` for anything else, and for numbers that contradict each other.
    pub fn from_bytes(bytes: &[u8]) -> io::Result<Self> {
        let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, format!("parity shard: {what}"));
        let found: Description = serde_json::from_slice(bytes).map_err(|e| wrong(e.to_string()))?;
        let fits =
            found.crcs.len() == found.layout().positions() && found.number < found.of && !found.members.is_empty();
        let regions = found.members.iter().flatten().all(|m| m.index().is_some_and(|i| i.bytes() == m.region));
        if fits && regions { Ok(found) } else { Err(wrong("its description contradicts itself".into())) }
    }

    /// Returns the description as JSON.
    ///
    /// # Errors
    /// Fails when it is longer than any index may be.
    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let bytes = serde_json::to_vec(self).map_err(io::Error::other)?;
        if bytes.len() as u64 > INDEX_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the shards of a stripe have too many tensors"));
        }
        Ok(bytes)
    }

    /// Returns how the members' chunks lie beside each other.
    #[must_use]
    pub fn layout(&self) -> Layout {
        Layout::new(self.members.iter().map(|m| m.as_ref().map_or(0, |m| m.region)).collect())
    }
}

impl Described {
    /// Parses the index; `None` if it is not valid.
    #[must_use]
    pub fn index(&self) -> Option<Index> {
        serde_json::from_str(self.index.get()).ok()
    }
}

impl ParityWant {
    /// Returns the label of the shard's slot.
    #[must_use]
    pub fn label(&self, run: u64) -> Label {
        let ParityWant { stripe, world_size, generation, step, .. } = *self;
        Label { run, rank: u64::from(stripe), world_size, generation, step, purpose: Purpose::Recovery, shared: false }
    }

    /// Returns the name of the shard's slots.
    #[must_use]
    pub fn name(&self) -> String {
        format!("parity-{}-{}-of-{}", self.stripe, self.number, self.world_size)
    }
}

/// Describes a parity slot for a restore; `None` if it is not a sealed parity shard.
#[must_use]
pub fn holding(slot: &Slot) -> Option<Parity> {
    let label = slot.label()?;
    let (_, json) = slot.described().ok()?;
    let found = Description::from_bytes(&json).ok()?;
    let rank = |m: &Option<Described>| m.as_ref().and_then(|m| u32::try_from(m.label.rank).ok()).map(Rank);
    Some(Parity {
        step: Step(label.step),
        generation: Generation(label.generation),
        world_size: u32::try_from(label.world_size).ok()?,
        stripe: u32::try_from(label.rank).ok()?,
        of: found.of,
        number: found.number,
        members: found.members.iter().map(rank).collect(),
    })
}

/// Verifies all positions of a parity slot against their checksums.
///
/// # Errors
/// [`SlotError`], for example when a position is damaged.
pub fn verify(slot: &Slot) -> Result<(), SlotError> {
    let damaged = |what: String| SlotError::Damaged(what);
    if slot.state() != State::Sealed {
        return Err(SlotError::NotSealed);
    }
    let (_, json) = slot.described()?;
    let found = Description::from_bytes(&json).map_err(|e| damaged(e.to_string()))?;
    let layout = found.layout();
    if layout.parity_bytes() != slot.region_bytes() {
        return Err(damaged("region length".into()));
    }
    let mut room = vec![0; CHUNK_BYTES];
    for (position, expected) in found.crcs.iter().enumerate() {
        let range = layout.parity(position);
        let bytes = room.get_mut(..range.len()).unwrap_or_default();
        if !slot.load(range.start, bytes) || crc(bytes) != *expected {
            return Err(damaged(format!("position {position} of the parity")));
        }
    }
    Ok(())
}

/// A parity shard, and the round of replication in which it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParityRound {
    /// Which parity shard.
    pub want: ParityWant,
    /// Number of the round of replication.
    pub round: u64,
}

/// Lengths of a parity shard, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    /// Length of its region.
    pub region: u64,
    /// Maximum length of its description.
    pub description: u64,
}

/// A parity shard that this node is receiving.
#[derive(Debug)]
pub struct Incoming {
    /// The shard, and the round in which it is computed.
    pub of: ParityRound,
    region: u64,
    /// Checksum of each position that has arrived.
    crcs: Vec<OnceLock<u64>>,
    /// The connections that deliver it.
    pub suppliers: Suppliers,
}

impl Incoming {
    /// Begins to write `slot`.
    ///
    /// # Safety
    /// The same as for [`Slot::begin`].
    ///
    /// # Errors
    /// [`Refusal`]: the slot is in use, or too small.
    pub unsafe fn begin(
        slot: Arc<Slot>,
        of: ParityRound,
        Lengths { region, description }: Lengths,
    ) -> Result<Self, Refusal> {
        if !slot.fits(region, description) {
            return Err(Refusal::ParityLongerThanSlot);
        }
        // SAFETY: the caller guarantees that no other thread writes the slot while `writing` lives.
        let writing = unsafe { slot.begin() }.ok_or(Refusal::SlotNeeded)?;
        let positions = usize::try_from(region.div_ceil(CHUNK_BYTES as u64))?;
        Ok(Incoming {
            of,
            region,
            crcs: (0..positions).map(|_| OnceLock::new()).collect(),
            suppliers: Suppliers::of(writing),
        })
    }

    /// Reads positions from the stream, up to one of length 0, and answers each.
    ///
    /// # Errors
    /// Those of the stream; `InvalidData` for positions outside the shard.
    pub fn receive(&self, mut tcp: &TcpStream) -> io::Result<()> {
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        loop {
            let mut header = [0; HEADER];
            tcp.read_exact(&mut header)?;
            let word = |at: usize, n: usize| {
                header.iter().skip(at).take(n).rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte))
            };
            let (at, bytes, crc) = (word(0, 8), word(8, 4), word(12, 8));
            if bytes == 0 {
                return Ok(());
            }
            let position = usize::try_from(at).map_err(io::Error::other)? / CHUNK_BYTES;
            let expected = (CHUNK_BYTES as u64).min(self.region.saturating_sub(at));
            if at % CHUNK_BYTES as u64 != 0 || bytes != expected {
                return Err(wrong("not a position of this parity shard"));
            }
            let writing = self.suppliers.write()?;
            let done = self.crcs.get(position).ok_or_else(|| wrong("not a position of this parity shard"))?;
            let (from, bytes) = (position * CHUNK_BYTES, usize::try_from(bytes).map_err(io::Error::other)?);
            let (mut sum, mut got) = (Running::default(), 0);
            while got < bytes {
                let n = PIECE_BYTES.min(bytes - got);
                // SAFETY: `writing` is the only writer of the slot, and a position arrives once:
                // again only after it arrived damaged, from the same sender.
                let piece = unsafe { writing.slot()?.region_mut(from + got, n)? };
                tcp.read_exact(piece)?;
                sum.read(piece);
                got += n;
            }
            let good = sum.value() == crc && *done.get_or_init(|| crc) == crc;
            tcp.write_all(&(at | if good { 0 } else { DAMAGED }).to_le_bytes())?;
        }
    }

    /// Seals the slot if every position of the description has arrived.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn seal(&self, json: &[u8]) -> Result<(), Refusal> {
        let found = Description::from_bytes(json)?;
        let came: Vec<Option<u64>> = self.crcs.iter().map(|c| c.get().copied()).collect();
        let all = found.crcs.iter().map(|c| Some(*c)).eq(came) && found.layout().parity_bytes() == self.region;
        if !all || found.number != self.of.want.number || self.suppliers.is_over() {
            return Err(Refusal::Incomplete);
        }
        let run = found.members.iter().flatten().map(|m| m.label.run).next().unwrap_or_default();
        let slot = self.suppliers.take().ok_or(Refusal::Incomplete)?;
        slot.describe(self.of.want.label(run), json, self.region)?;
        slot.seal(None);
        Ok(())
    }
}
