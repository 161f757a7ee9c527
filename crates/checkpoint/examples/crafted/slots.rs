//! The same in memory: slots whose superblock, index and parity description somebody has written.

use crate::files::{MODEL_BYTES_MAX, Outcome, filled};
use crate::mutate::{OF_LINES, text};
use crate::random::Random;
use crate::shard::{Checkpoint, Line};
use everstep_checkpoint::arena::{Label, Slot, slot_bytes};
use everstep_checkpoint::erasure::layout::Layout;
use everstep_checkpoint::erasure::parity_shard::{self, Description};
use everstep_checkpoint::format::digest::crc;
use everstep_checkpoint::memory::Memory as _;
use everstep_checkpoint::restore::Shard;
use everstep_core::message::Purpose;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Words of a superblock: those that its own checksum covers, and that checksum.
const SUMMED: std::ops::Range<usize> = 3..14;
const SUM: usize = 14;

/// Bytes of the slot that all inputs are written to.
const ROOM: u64 = 4 << 20;

/// One slot, written again and again.
pub struct Memory {
    slot: Arc<Slot>,
}

fn label(step: u64) -> Label {
    Label { run: 1, rank: 0, world_size: 2, generation: 1, step, purpose: Purpose::Recovery, shared: false }
}

impl Memory {
    pub fn new(directory: &Path) -> Self {
        let slot = Slot::reserve(&directory.join("slot"), slot_bytes(ROOM, 64 << 10));
        Memory { slot: Arc::new(slot.unwrap_or_else(|e| panic!("cannot reserve a slot: {e}"))) }
    }

    fn write(&self, random: &mut Random, region: &[u8], json: &[u8], words: bool) {
        // SAFETY: nobody else uses the slot.
        let memory = unsafe { self.slot.memory() };
        memory.word(0).store(0, Ordering::Release);
        // SAFETY: as above.
        let slot = unsafe { self.slot.begin() }.unwrap_or_else(|| panic!("the slot is in use"));
        let done = slot.store(0, region).and_then(|()| slot.describe(label(7), json, region.len() as u64));
        done.unwrap_or_else(|e| panic!("cannot fill a slot: {e}"));
        slot.seal(None);
        for _ in 0..if words { 1 + random.below(2) } else { 0 } {
            let word = memory.word((SUMMED.start + random.below(SUMMED.len())) * 8);
            word.store(random.instead_of(word.load(Ordering::Acquire)), Ordering::Release);
            let sum = crc(&memory.load(SUMMED.start * 8, SUMMED.len() * 8).unwrap_or_default());
            memory.word(SUM * 8).store(sum, Ordering::Release);
        }
    }

    /// The first shard of an input as a slot. `what`: 0 only its lines are changed, 1 the
    /// superblock too, 2 the index's text too.
    pub fn through(&self, random: &mut Random, what: usize, crafted: &Checkpoint) -> Outcome {
        let shard = &crafted.shards[0];
        let mut json = index(&shard.lines, &shard.crcs());
        if what == 2 {
            text(random, &mut json);
        }
        if shard.region.len() as u64 > ROOM || json.len() > 60 << 10 {
            return Outcome::Refused("room");
        }
        self.write(random, &shard.region, &json, what == 1);
        let Ok(slot) = Slot::open(self.slot.path()) else { return Outcome::Refused("slot") };
        let Ok((found, label)) = Shard::from_slot(Arc::new(slot)) else { return Outcome::Refused("index") };
        if what != 1 && label != self::label(7) {
            return Outcome::Wrong("the label".into());
        }
        let (mut wanted, mut expected, mut at) = (Vec::new(), Vec::new(), 0usize);
        let tensors = found.index().tensors().clone();
        for t in tensors.iter() {
            let line =
                Line { name: t.name.clone(), dtype: t.dtype.clone(), shape: t.shape.clone(), from: 0, to: t.bytes };
            let Some(room) = line.room().filter(|n| *n <= MODEL_BYTES_MAX) else { return Outcome::Refused("memory") };
            wanted.push((t.name.clone(), vec![0xa5; room].into_boxed_slice()));
            let end = at.saturating_add(usize::try_from(t.bytes).unwrap_or(usize::MAX));
            expected.push(shard.region.get(at..end).unwrap_or_default());
            at = end;
        }
        if at != shard.region.len() && filled(&found, Vec::new(), &[]) == Outcome::Accepted && what != 1 {
            return Outcome::Wrong(format!("tensors end at {at}, the region at {}", shard.region.len()));
        }
        filled(&found, wanted, &expected)
    }

    /// A parity slot of two members, one of which has the crafted index.
    pub fn parity(&self, random: &mut Random, crafted: &Checkpoint) -> Outcome {
        let member = |n: usize, crafted: &Checkpoint| {
            let s = &crafted.shards[n];
            let index: Value = serde_json::from_slice(&index(&s.lines, &s.crcs())).unwrap_or_default();
            json!({"label": label(7), "region": s.region.len(), "index": index})
        };
        let layout = Layout::new(crafted.shards.iter().map(|s| s.region.len() as u64).collect());
        let parity = vec![7u8; usize::try_from(layout.parity_bytes()).unwrap_or(0).min(ROOM as usize)];
        let sums = (0..layout.positions()).map(|p| crc(parity.get(layout.parity(p)).unwrap_or_default()));
        let mut found = json!({"number": 0, "of": 2, "members": [member(0, crafted), member(1, crafted)],
            "crcs": sums.collect::<Vec<_>>()});
        match random.below(8) {
            0 => found["number"] = json!(random.instead_of(1)),
            1 => found["of"] = json!(random.instead_of(1)),
            2 => found["members"][0]["region"] = json!(random.instead_of(4096)),
            3 => found["members"][1] = Value::Null,
            4 => found["members"] = json!([]),
            5 => found["crcs"] = json!(vec![random.next(); random.below(4)]),
            6 => {
                found["members"].as_array_mut().into_iter().for_each(|m| m.extend(vec![Value::Null; random.below(70)]));
            }
            _ => {}
        }
        let json = serde_json::to_vec(&found).unwrap_or_default();
        let words = random.one_in(4);
        if let Ok(found) = Description::from_bytes(&json) {
            // Its layout is what a rebuild writes by.
            let layout = found.layout();
            for position in 0..layout.positions() {
                let of = |m: usize| layout.bytes(m, position).is_none_or(|b| b.len() <= layout.length(position));
                if !(0..found.members.len()).all(of) {
                    return Outcome::Wrong(format!("position {position} is shorter than a member's"));
                }
            }
        }
        if json.len() > 60 << 10 {
            return Outcome::Refused("room");
        }
        self.write(random, &parity, &json, words);
        let Ok(slot) = Slot::open(self.slot.path()) else { return Outcome::Refused("slot") };
        let _ = parity_shard::holding(&slot);
        if parity_shard::verify(&slot).is_ok() { Outcome::Accepted } else { Outcome::Refused("parity") }
    }
}

/// The index of a slot.
fn index(lines: &[Line], crcs: &[u64]) -> Vec<u8> {
    let tensor =
        |l: &Line| json!({"name": l.name, "dtype": l.dtype, "shape": l.shape, "bytes": l.to.wrapping_sub(l.from)});
    serde_json::to_vec(&json!({"tensors": lines.iter().map(tensor).collect::<Vec<_>>(), "crcs": crcs}))
        .unwrap_or_default()
}

/// A kind that changes the lines or bytes of a shard.
pub fn of_lines(random: &mut Random) -> usize {
    OF_LINES.start + random.below(OF_LINES.len())
}
