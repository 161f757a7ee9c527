//! Damages a small checkpoint in every way there is and reads it back; prints what came of it as
//! JSON lines. `corruption DIR EDITS`. What is returned must be what was written, or an error.

#![allow(clippy::unwrap_used, reason = "a measurement may end where it stands")]

use everstep_checkpoint::arena::{Label, Pin, REGION_AT, Slot, State, job_hash, slot_bytes};
use everstep_checkpoint::capture::{Described, Plan, Source, start};
use everstep_checkpoint::direct_io::Throttle;
use everstep_checkpoint::format::index::Tensor;
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::persist::{self, Target};
use everstep_checkpoint::replicate::protocol::{Ask, Peer, VERSION, Want, description_crc};
use everstep_checkpoint::replicate::pull::{fill, find, heal};
use everstep_checkpoint::replicate::push::{Link, Open, Window};
use everstep_checkpoint::replicate::replica_holder::ReplicaHolder;
use everstep_checkpoint::restore::{RestoreError, Shard};
use everstep_core::id::{Rank, RunId};
use everstep_core::message::Purpose;
use everstep_wire::frame;
use everstep_wire::limits::INDEX_BYTES_MAX;
use everstep_wire::token::Token;
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// The largest single allocation so far.
struct Largest;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Largest {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Largest = Largest;

const MARK: Mark = Mark { run: RunId(1), epoch: 1, generation: 1, attempt: 0 };

const TENSORS: [(&str, usize); 4] = [("a", 30_000), ("b", 4), ("c", 20_480), ("d", 11_000)];

fn content(name: &str) -> Vec<u8> {
    let n = TENSORS.iter().find(|(t, _)| *t == name).unwrap().1;
    (0..n).map(|i| (i * 131 % 253) as u8 ^ name.as_bytes()[0]).collect()
}

fn captured(path: &Path) -> Arc<Slot> {
    let data: Vec<Vec<u8>> = TENSORS.iter().map(|(n, _)| content(n)).collect();
    let slot = Arc::new(Slot::reserve(path, slot_bytes(64 << 10, 4096)).unwrap());
    slot.release(Pin::Replicate);
    slot.release(Pin::Persist);
    let tensor = |(n, b): &(&str, usize)| Tensor {
        name: (*n).into(),
        dtype: "U8".into(),
        shape: vec![*b as u64],
        bytes: *b as u64,
    };
    let source = |d: &Vec<u8>| Source { address: d.as_ptr() as usize, bytes: d.len(), eager: false };
    let (purpose, shared) = (Purpose::Recovery, false);
    let label = Label { run: job_hash("j"), rank: 0, world_size: 1, generation: 1, step: 1, purpose, shared };
    let tensors: Vec<_> = TENSORS.iter().map(tensor).collect();
    let sources = data.iter().map(source).collect();
    let plan = Plan {
        tensors: Described::of(&tensors).unwrap(),
        sources,
        label,
        persist: true,
        threads: 1,
        background: false,
        compare: true,
    };
    // SAFETY: `data` lives and stays unchanged until `wait` has returned.
    unsafe { start(slot.clone(), plan, None) }.unwrap().wait().unwrap();
    slot
}

/// 0: refused, 1: what was written, 2: something else.
fn read(shard: Result<Shard, String>) -> usize {
    let Ok(shard) = shard else { return 0 };
    let mut offset = 0;
    for t in shard.index().tensors().iter() {
        match shard.fetch(offset, t.bytes) {
            Err(_) => return 0,
            Ok(bytes) if TENSORS.iter().any(|(n, _)| *n == t.name) && bytes == content(&t.name) => {}
            Ok(_) => return 2,
        }
        offset += t.bytes;
    }
    if shard.index().tensors().len() == TENSORS.len() { 1 } else { 2 }
}

fn open_slot(path: &Path) -> Result<Shard, String> {
    let slot = Slot::open(path).map_err(|e| e.to_string())?;
    Shard::from_slot(Arc::new(slot)).map(|(s, _)| s).map_err(|e| e.to_string())
}

fn open_file(out: &Path) -> Result<Shard, String> {
    let manifest = persist::read_manifest(&out.join("step-1")).map_err(|e| e.to_string())?;
    if manifest.step != 1 || manifest.world_size != 1 {
        return Err("another checkpoint".into());
    }
    Shard::from_file(&out.join("step-1"), &manifest.shards[0]).map_err(|e| e.to_string())
}

fn say(what: &str, tried: usize, counts: [usize; 3], healed: usize) {
    let [refused, same, wrong] = counts;
    println!(
        "{{\"what\": \"{what}\", \"tried\": {tried}, \"refused\": {refused}, \"same\": {same}, \"wrong\": {wrong}, \"healed\": {healed}}}"
    );
}

/// Every bit of a file, one after the other; damaged chunks of a slot are healed from `peer`.
fn bits(what: &str, path: &Path, open: &dyn Fn() -> Result<Shard, String>, peer: Option<&Peer>) {
    use std::os::unix::fs::FileExt;
    let good = fs::read(path).unwrap();
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    let (mut counts, mut healed, mut tried) = ([0; 3], 0, 0);
    for (at, byte) in good.iter().enumerate() {
        for bit in 0..8 {
            file.write_all_at(&[byte ^ (1 << bit)], at as u64).unwrap();
            let shard = open();
            let damage = shard.as_ref().ok().and_then(|s| s.verify(1).err());
            counts[read(shard)] += 1;
            tried += 1;
            if let (Some(peer), Some(RestoreError::Chunks { chunks, .. })) = (peer, damage) {
                let slot = Slot::open(path).unwrap();
                let want = Want { rank: 0, world_size: 1, generation: 1, step: 1 };
                // Now and then over the network; it is the same for every bit of a chunk.
                if at % 61 == 0 && bit == at % 8 {
                    let repair = slot.repair().unwrap();
                    healed += usize::from(heal(&repair, peer, want, &chunks).is_ok_and(|h| h == chunks));
                    assert_eq!(fs::read(path).unwrap()[REGION_AT..], good[REGION_AT..], "healed to what it was");
                }
            }
            file.write_all_at(&[*byte], at as u64).unwrap();
        }
    }
    say(what, tried, counts, healed);
}

fn truncations(what: &str, path: &Path, open: &dyn Fn() -> Result<Shard, String>) {
    let good = fs::read(path).unwrap();
    let mut counts = [0; 3];
    for len in 0..good.len() {
        fs::write(path, &good[..len]).unwrap();
        counts[read(open())] += 1;
    }
    fs::write(path, &good).unwrap();
    say(what, good.len(), counts, 0);
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below.max(1) as u64) as usize
    }

    /// Up to three changes: replaced, removed, inserted, digits made huge.
    fn edit(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for _ in 0..=self.roll(3) {
            let at = self.roll(bytes.len());
            let some = self.roll(256) as u8;
            match self.roll(4) {
                0 => bytes[at] = some,
                1 => drop(bytes.drain(at..(at + self.roll(40)).min(bytes.len()))),
                2 => bytes.insert(at, some),
                _ => {
                    if let Some(digit) = bytes[at..].iter().position(u8::is_ascii_digit) {
                        bytes.splice(at + digit..=at + digit, b"18446744073709551615".iter().copied());
                    }
                }
            }
            if bytes.is_empty() {
                bytes.push(some);
            }
        }
        bytes
    }
}

fn edits(
    what: &str,
    path: &Path,
    range: std::ops::Range<usize>,
    count: usize,
    open: &dyn Fn() -> Result<Shard, String>,
) {
    let good = fs::read(path).unwrap();
    let (mut dice, mut counts) = (Dice(88_172_645_463_325_252), [0; 3]);
    for _ in 0..count {
        let mut bad = good.clone();
        let part = dice.edit(&good[range.clone()]);
        bad.splice(range.clone(), part);
        fs::write(path, &bad).unwrap();
        counts[read(open())] += 1;
    }
    fs::write(path, &good).unwrap();
    say(what, count, counts, 0);
}

/// Sessions with a holder in which some frame is not what it should be. What it then holds must be
/// whole.
fn frames(directory: &Path, source: &Arc<Slot>, count: usize) {
    let kept = directory.join("kept");
    fs::create_dir_all(&kept).unwrap();
    let (holder, peer) = hold(&kept);
    let (label, index) = source.described().unwrap();
    let hello = Ask::Hello { version: VERSION, token: "t".into(), job: job_hash("j") };
    let crc = description_crc(&label, &index);
    let begin = Ask::Begin { label, region: source.region_bytes(), index: index.len() as u64, crc, base: None };
    let mut dice = Dice(0x2545_f491_4f6c_dd1d);
    let mut counts = [0; 3];
    for _ in 0..count {
        let mut region = vec![0; source.region_bytes() as usize];
        assert!(source.load(0, &mut region));
        let mut extent = 0u64.to_le_bytes().to_vec();
        extent.extend((region.len() as u32).to_le_bytes());
        extent.extend(&region);
        extent.extend([0; 12]);
        let parts = [
            frame::encode(&begin).unwrap(),
            index.clone(),
            frame::encode(&Ask::Data).unwrap(),
            extent,
            frame::encode(&Ask::Seal).unwrap(),
        ];
        let bad = dice.roll(parts.len());
        let mut stream = TcpStream::connect(&peer.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let _ = stream.write_all(&frame::encode(&hello).unwrap());
        for (i, part) in parts.iter().enumerate() {
            let bytes = if i == bad { dice.edit(part) } else { part.clone() };
            if stream.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
        drop(stream);
        let held = holder.held();
        // One of our own making is whole; a label that was edited is another shard, whole as well.
        let outcome = held.iter().map(|h| read(open_slot(&h.path))).max().unwrap_or(0);
        counts[outcome] += 1;
        for h in held {
            let _ = fs::remove_file(h.path);
        }
    }
    say("frames", count, counts, 0);
    // It still works.
    Link::new(peer, 1).push(source, Window::default(), &Open).unwrap();
    assert_eq!(holder.held().len(), 1);
}

fn hold(directory: &Path) -> (Arc<ReplicaHolder>, Peer) {
    // SAFETY: no other holder has this directory.
    let holder = Arc::new(unsafe { ReplicaHolder::new(vec![directory.into()], job_hash("j")) });
    holder.set_token(Token::from_text("t"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serving = Arc::clone(&holder);
    std::thread::spawn(move || serving.serve(&listener, |line| eprintln!("{line}")));
    (holder, Peer { address, token: "t".into(), job: job_hash("j") })
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let (directory, count): (&Path, usize) = (arguments[1].as_ref(), arguments[2].parse().unwrap());
    let path = directory.join("local-0-slot-0");
    let slot = captured(&path);
    assert_eq!((slot.state(), read(open_slot(&path))), (State::Sealed, 1));
    let (out, replica) = (directory.join("out"), directory.join("replica"));
    let shard = persist::write_shard(&slot, &out, &MARK, 1, Rank(0), &Throttle::new(0)).unwrap();
    persist::publish(&out, &MARK, 1, &[shard], Target::Branch).unwrap();
    fs::create_dir_all(&replica).unwrap();
    let (holder, peer) = hold(&replica);
    slot.release(Pin::Persist);
    Link::new(peer.clone(), 1).push(&slot, Window::default(), &Open).unwrap();
    let replica_path = holder.held()[0].path.clone();

    bits("slot-bits", &path, &|| open_slot(&path), Some(&peer));
    let file = out.join("step-1/rank-0.safetensors");
    bits("file-bits", &file, &|| open_file(&out), None);
    let manifest = out.join("step-1/manifest.json");
    bits("manifest-bits", &manifest, &|| open_file(&out), None);
    truncations("file-truncations", &file, &|| open_file(&out));
    truncations("manifest-truncations", &manifest, &|| open_file(&out));
    edits("manifest-edits", &manifest, 0..fs::read(&manifest).unwrap().len(), count, &|| open_file(&out));
    let good = fs::read(&path).unwrap();
    let word = |i: usize| u64::from_le_bytes(good[i * 8..i * 8 + 8].try_into().unwrap()) as usize;
    edits("index-edits", &path, word(7)..word(7) + word(8), count, &|| open_slot(&path));
    let header = u64::from_le_bytes(fs::read(&file).unwrap()[..8].try_into().unwrap()) as usize;
    edits("header-edits", &file, 0..8 + header, count, &|| open_file(&out));

    // A replica that rots is found out by whoever fetches it.
    let (mut counts, back) = ([0; 3], directory.join("back"));
    let whole = fs::read(&replica_path).unwrap();
    for at in (0..whole.len()).step_by(23) {
        let mut bad = whole.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(&replica_path, &bad).unwrap();
        let target = Arc::new(Slot::reserve(&back, slot_bytes(64 << 10, 4096)).unwrap());
        let want = Want { rank: 0, world_size: 1, generation: 1, step: 1 };
        // SAFETY: nobody else uses the slot.
        let fill = |f| unsafe { fill(&target, vec![(&peer, f)], want, 1, &AtomicBool::new(false)) };
        let got = find(&peer, want).and_then(fill);
        counts[if got.is_ok() { read(open_slot(&back)) } else { 0 }] += 1;
    }
    fs::write(&replica_path, &whole).unwrap();
    say("replica-flips", whole.len().div_ceil(23), counts, 0);
    frames(directory, &Arc::new(Slot::open(&path).unwrap()), count);
    println!(
        "{{\"what\": \"largest-allocation\", \"bytes\": {}, \"limit\": {INDEX_BYTES_MAX}}}",
        LARGEST.load(Ordering::Relaxed)
    );
}
