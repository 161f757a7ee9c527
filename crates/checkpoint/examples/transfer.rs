//! Moves bytes as the agent does, beside the bare system calls that are its limit; prints seconds
//! as JSON lines. For the figures: `transfer serve DIR HOST`, `transfer send HOLDER RAW DIR BYTES
//! ROUNDS`, `transfer persist DIR MEMORY BYTES ROUNDS`, `transfer commits DIR MEMORY BYTES ROUNDS`,
//! `transfer slot FILE BYTES`, `transfer load FILE (memcpy|verified|unverified)`.

#![allow(clippy::unwrap_used, reason = "a measurement may end where it stands")]

use everstep_checkpoint::arena::{Label, Pin, Slot, job_hash, slot_bytes};
use everstep_checkpoint::capture::{Described, Plan, Source, start};
use everstep_checkpoint::direct_io::Throttle;
use everstep_checkpoint::format::index::Tensor;
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::persist;
use everstep_checkpoint::replicate::protocol::{Peer, Want};
use everstep_checkpoint::replicate::pull::{fill, find};
use everstep_checkpoint::replicate::push::{Link, Open, Window};
use everstep_checkpoint::replicate::replica_holder::ReplicaHolder;
use everstep_checkpoint::restore::{Shard, Target};
use everstep_checkpoint::retain::Policy;
use everstep_core::id::{Rank, RunId};
use everstep_core::message::Purpose;
use everstep_wire::token::Token;
use memmap2::MmapMut;
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

const MARK: Mark = Mark { run: RunId(1), epoch: 1, generation: 1, attempt: 0 };

const TENSORS: usize = 320;
const PIECE: usize = 256 << 10;
const O_DIRECT: i32 = 0o40000;

fn timed(what: &str, act: impl FnOnce()) {
    let began = Instant::now();
    act();
    println!("{{\"what\": \"{what}\", \"seconds\": {}}}", began.elapsed().as_secs_f64());
}

fn named(what: &str, round: u64) -> String {
    if round <= 1 { format!("warm-up {what}") } else { what.to_owned() }
}

/// A sealed, pinned slot of a few hundred tensors of random-looking bytes.
fn slot(path: &Path, bytes: usize, step: u64) -> Arc<Slot> {
    let per = bytes / TENSORS / 64 * 64;
    let mut data = MmapMut::map_anon(per * TENSORS).unwrap();
    let mut x = 0x9e37_79b9_7f4a_7c15u64 ^ step;
    for word in data.chunks_exact_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        word.copy_from_slice(&x.to_le_bytes());
    }
    let slot = Arc::new(Slot::reserve(path, slot_bytes((per * TENSORS) as u64, 1 << 20)).unwrap());
    slot.release(Pin::Replicate);
    slot.populate().unwrap();
    let tensor = |i| Tensor { name: format!("t{i}"), dtype: "U8".into(), shape: vec![per as u64], bytes: per as u64 };
    let source = |i: usize| Source { address: data.as_ptr() as usize + i * per, bytes: per, eager: false };
    let (purpose, shared) = (Purpose::Recovery, false);
    let label = Label { run: job_hash("j"), rank: 0, world_size: 1, generation: 1, step, purpose, shared };
    let tensors: Vec<_> = (0..TENSORS).map(tensor).collect();
    let sources = (0..TENSORS).map(source).collect();
    let plan = Plan {
        tensors: Described::of(&tensors).unwrap(),
        sources,
        label,
        persist: false,
        threads: 2,
        background: false,
        compare: true,
    };
    // SAFETY: `data` lives and stays unchanged until `wait` has returned.
    unsafe { start(slot.clone(), plan, None) }.unwrap().wait().unwrap();
    assert!(slot.pin(Pin::Replicate));
    slot
}

/// Keeps replicas, and beside that swallows or sends raw bytes.
fn serve(directory: &Path, host: &str) {
    // SAFETY: no other holder has this directory.
    let holder = Arc::new(unsafe { ReplicaHolder::new(vec![directory.into()], job_hash("j")) });
    holder.set_token(Token::from_text("t"));
    let raw = TcpListener::bind((host, 0)).unwrap();
    let listener = TcpListener::bind((host, 0)).unwrap();
    println!("{} {}", listener.local_addr().unwrap(), raw.local_addr().unwrap());
    std::io::stdout().flush().unwrap();
    std::thread::spawn(move || holder.serve(&listener, |line| eprintln!("{line}")));
    for stream in raw.incoming().flatten() {
        let file = directory.join("raw");
        std::thread::spawn(move || raw_end(stream, &file));
    }
}

/// One byte says which way, then eight say where and eight how many.
fn raw_end(mut stream: TcpStream, file: &PathBuf) {
    let mut head = [0; 17];
    // Mapped once, as the holder's slots are.
    let mut mapped: Option<MmapMut> = None;
    while stream.read_exact(&mut head).is_ok() {
        let number = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().unwrap()) as usize;
        let (at, bytes) = (number(1), number(9));
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(file).unwrap();
        // Only ever makes it longer: the other stream's thread does the same.
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, (at + bytes) as u64).unwrap();
        if mapped.as_ref().is_none_or(|m| m.len() < at + bytes) {
            // SAFETY: a scratch file of this run.
            mapped = Some(unsafe { MmapMut::map_mut(&file) }.unwrap());
        }
        let map = mapped.as_mut().unwrap();
        for piece in map[at..at + bytes].chunks_mut(PIECE) {
            let moved = if head[0] == 0 { stream.read_exact(piece) } else { stream.write_all(piece) };
            if moved.is_err() {
                return;
            }
        }
        if head[0] == 0 && stream.write_all(&[1]).is_err() {
            return;
        }
    }
}

/// The limit: two streams, the same memory on both ends.
fn raw(streams: &mut [TcpStream], slot: &Slot, bytes: usize, receive: bool) {
    let half = bytes / streams.len();
    let one = |i: usize, stream: &mut TcpStream| {
        let mut head = [u8::from(receive); 17];
        head[1..9].copy_from_slice(&((i * half) as u64).to_le_bytes());
        head[9..].copy_from_slice(&(half as u64).to_le_bytes());
        stream.write_all(&head).unwrap();
        for at in (i * half..(i + 1) * half).step_by(PIECE) {
            let n = PIECE.min((i + 1) * half - at);
            if receive {
                // SAFETY: nobody else uses this part of the slot in this run.
                stream.read_exact(unsafe { slot.region_mut(at, n) }.unwrap()).unwrap();
            } else {
                // SAFETY: nobody writes the slot in this run.
                stream.write_all(unsafe { slot.still_region(at, n) }.unwrap()).unwrap();
            }
        }
        if !receive {
            stream.read_exact(&mut [0]).unwrap();
        }
    };
    std::thread::scope(|scope| {
        let one = &one;
        for (i, stream) in streams.iter_mut().enumerate() {
            scope.spawn(move || one(i, stream));
        }
    });
}

fn send(addresses: (&str, &str), directory: &Path, bytes: usize, rounds: u64) {
    let peer = Peer { address: addresses.0.into(), token: "t".into(), job: job_hash("j") };
    let mut link = Link::new(peer.clone(), 2);
    let mut streams: Vec<TcpStream> = (0..2).map(|_| TcpStream::connect(addresses.1).unwrap()).collect();
    let room = |name: &str| {
        let slot = Slot::reserve(&directory.join(name), slot_bytes(bytes as u64, 2 << 20)).unwrap();
        slot.populate().unwrap();
        Arc::new(slot)
    };
    let (back, scratch) = (room("back"), room("scratch"));
    for round in 0..=rounds + 1 {
        let slot = slot(&directory.join("slot"), bytes, round + 1);
        let size = usize::try_from(slot.region_bytes()).unwrap();
        timed(&named("raw-send", round), || raw(&mut streams, &slot, size, false));
        timed(&named("push", round), || link.push(&slot, Window::default(), &Open).unwrap());
        timed(&named("raw-receive", round), || raw(&mut streams, &scratch, size, true));
        timed(&named("pull", round), || {
            let want = Want { rank: 0, world_size: 1, generation: 1, step: round + 1 };
            let found = find(&peer, want).unwrap();
            // SAFETY: nobody else uses the slot.
            unsafe { fill(&back, vec![(&peer, found)], want, 2, &AtomicBool::new(false)) }.unwrap();
        });
    }
}

/// The limit: a new file, space reserved, four threads, past the cache, made durable.
fn raw_write(path: &Path, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).create_new(true).custom_flags(O_DIRECT).open(path).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes.len() as u64).unwrap();
    let next = AtomicUsize::new(0);
    let one = || {
        loop {
            let at = next.fetch_add(8 << 20, Ordering::Relaxed);
            if at >= bytes.len() {
                return;
            }
            file.write_all_at(&bytes[at..(at + (8 << 20)).min(bytes.len())], at as u64).unwrap();
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(one);
        }
    });
    file.sync_data().unwrap();
}

fn persist_rounds(directory: &Path, memory: &Path, bytes: usize, rounds: u64) {
    for round in 0..=rounds + 1 {
        let slot = slot(&memory.join("slot"), bytes, round + 1);
        let size = usize::try_from(slot.region_bytes()).unwrap().next_multiple_of(4096);
        let (path, out) = (directory.join("raw"), directory.join("out"));
        let bare = || {
            // SAFETY: nobody writes the slot now.
            timed(&named("raw", round), || raw_write(&path, unsafe { slot.still_region(0, size) }.unwrap()));
            std::fs::remove_file(&path).unwrap();
        };
        let ours = || {
            timed(&named("persist", round), || {
                let shard = persist::write_shard(&slot, &out, &MARK, round + 1, Rank(0), &Throttle::new(0)).unwrap();
                persist::publish(&out, &MARK, round + 1, &[shard], persist::Target::Branch).unwrap();
            });
            std::fs::remove_dir_all(&out).unwrap();
        };
        // A device tires and recovers: neither is always the second.
        if round.is_multiple_of(2) {
            bare();
            ours();
        } else {
            ours();
            bare();
        }
    }
}

/// Commits of small checkpoints with retention after each, for whoever records what is asked of the
/// file system.
fn commits(out: &Path, memory: &Path, bytes: usize, rounds: u64) {
    for step in 1..=rounds {
        let slot = slot(&memory.join("slot"), bytes, step);
        let shard = persist::write_shard(&slot, out, &MARK, step, Rank(0), &Throttle::new(0)).unwrap();
        persist::publish(out, &MARK, step, &[shard], persist::Target::Branch).unwrap();
        persist::prune(out, Policy { last: 2, every: None, epochs: false, abandoned: false }, &MARK).unwrap();
    }
}

/// In a fresh process: nothing of the slot is mapped yet, the target is memory in use.
fn load(path: &Path, how: &str) {
    let slot = Arc::new(Slot::open(path).unwrap());
    let size = usize::try_from(slot.region_bytes()).unwrap();
    let mut model = MmapMut::map_anon(size).unwrap();
    model.fill(1);
    let address = model.as_mut_ptr() as usize;
    if how == "memcpy" {
        return timed(how, || {
            // SAFETY: nobody writes the slot any more.
            let from = unsafe { slot.still_region(0, size) }.unwrap();
            let (a, b) = model.split_at_mut(size / 2);
            std::thread::scope(|scope| {
                scope.spawn(|| a.copy_from_slice(&from[..size / 2]));
                b.copy_from_slice(&from[size / 2..]);
            });
        });
    }
    timed(how, || {
        // SAFETY: nobody writes the slot any more.
        let (shard, _) = unsafe { Shard::from_still_slot(slot.clone()) }.unwrap();
        let mut offset = 0;
        let mut target = |bytes: u64| {
            let target = Target { offset, bytes, address: address + offset as usize };
            offset += bytes;
            target
        };
        let targets: Vec<Target> = shard.index().tensors().iter().map(|t| target(t.bytes)).collect();
        // SAFETY: the targets are disjoint parts of `model`.
        unsafe { shard.load(&targets, 2, how == "verified") }.unwrap();
    });
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["serve", directory, host] => serve(directory.as_ref(), host),
        ["send", holder, raw, directory, bytes, rounds] => {
            send((holder, raw), directory.as_ref(), bytes.parse().unwrap(), rounds.parse().unwrap());
        }
        ["persist", directory, memory, bytes, rounds] => {
            persist_rounds(directory.as_ref(), memory.as_ref(), bytes.parse().unwrap(), rounds.parse().unwrap());
        }
        ["commits", out, memory, bytes, rounds] => {
            commits(out.as_ref(), memory.as_ref(), bytes.parse().unwrap(), rounds.parse().unwrap());
        }
        ["slot", path, bytes] => drop(slot(path.as_ref(), bytes.parse().unwrap(), 1)),
        ["load", path, how] => load(path.as_ref(), how),
        _ => {
            eprintln!("usage: see the head of this file");
            std::process::exit(2);
        }
    }
}
