//! Computes parity as the agents do, beside the limits of the machine; prints seconds as JSON
//! lines. For the figures: `erasure code ROUNDS` (cache-hot pieces), `erasure nodes DIR NODES
//! PARITY BYTES ROUNDS` (that many nodes' slots to sealed parity over loopback, then a lost shard),
//! `erasure copies DIR NODES REPLICAS BYTES ROUNDS` (full copies, the same way).

#![allow(clippy::unwrap_used, reason = "a measurement may end where it stands")]

use everstep_checkpoint::arena::{Label, Pin, Slot, job_hash, slot_bytes};
use everstep_checkpoint::capture::{Described, Plan, Source, start};
use everstep_checkpoint::erasure::encode::{Task, encode};
use everstep_checkpoint::erasure::rebuild::{self, outline};
use everstep_checkpoint::erasure::reed_solomon::{Encoder, PIECE_BYTES};
use everstep_checkpoint::erasure::streams::Streams;
use everstep_checkpoint::format::index::Tensor;
use everstep_checkpoint::replicate::protocol::{ParityWant, Peer, Want};
use everstep_checkpoint::replicate::push::{Link, Open, Window};
use everstep_checkpoint::replicate::replica_holder::ReplicaHolder;
use everstep_core::id::Rank;
use everstep_core::message::Purpose;
use everstep_core::placement::stripe;
use everstep_wire::token::Token;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

const JOB: &str = "figure";

fn seconds(act: impl FnOnce()) -> f64 {
    let began = Instant::now();
    act();
    began.elapsed().as_secs_f64()
}

fn number<T: std::str::FromStr>(n: usize) -> T {
    std::env::args().nth(n).and_then(|a| a.parse().ok()).unwrap_or_else(|| panic!("argument {n} is missing"))
}

fn random(bytes: usize, seed: u64) -> Vec<u8> {
    let mut x = 0x9e37_79b9_7f4a_7c15 ^ (seed << 17 | 1);
    let mut data = vec![0; bytes];
    for word in data.chunks_exact_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        word.copy_from_slice(&x.to_le_bytes());
    }
    data
}

/// Four pieces and their parity, again and again, on two threads: everything stays in the cache.
/// And a copy of the same bytes within the cache, as the limit.
fn code(rounds: u64) {
    const TIMES: usize = 2000;
    let both = |work: &(dyn Fn() + Sync)| seconds(|| std::thread::scope(|s| (0..2).for_each(|_| drop(s.spawn(work)))));
    let bytes = (2 * TIMES * 4 * PIECE_BYTES) as f64;
    for _ in 0..rounds {
        let encoding = both(&|| {
            let pieces: Vec<Vec<u8>> = (0..4).map(|i| random(PIECE_BYTES, i)).collect();
            let mut encoder = Encoder::new(4, 2).unwrap();
            let mut sum = 0u64;
            for _ in 0..TIMES {
                let add = |_, piece: &[u8]| {
                    sum = sum.wrapping_add(u64::from(piece[0]));
                    Ok(())
                };
                encoder.encode(&pieces, add).unwrap();
            }
            std::hint::black_box(sum);
        });
        let copying = both(&|| {
            let (from, mut to) = (random(4 * PIECE_BYTES, 1), vec![0; 4 * PIECE_BYTES]);
            (0..TIMES).for_each(|_| std::hint::black_box(&mut to).copy_from_slice(std::hint::black_box(&from)));
        });
        println!("{{\"encode\": {}, \"copy\": {}}}", bytes / encoding / 1e9, bytes / copying / 1e9);
    }
}

struct Node {
    holder: Arc<ReplicaHolder>,
    peer: Peer,
    slot: Arc<Slot>,
    streams: Streams,
}

fn node(directory: &Path, rank: u64, world: u64, bytes: usize) -> Node {
    std::fs::create_dir_all(directory).unwrap();
    // SAFETY: no other holder has this directory.
    let holder = Arc::new(unsafe { ReplicaHolder::new(vec![directory.into()], job_hash(JOB)) });
    holder.set_token(Token::from_text("secret"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serving = Arc::clone(&holder);
    std::thread::spawn(move || serving.serve(&listener, |line| eprintln!("{line}")));
    let slot = Arc::new(Slot::reserve(&directory.join("local-0-slot-0"), slot_bytes(bytes as u64, 1 << 20)).unwrap());
    slot.populate().unwrap();
    let peer = Peer { address, token: "secret".into(), job: job_hash(JOB) };
    let node = Node { holder, peer, slot, streams: Streams::default() };
    capture(&node, rank, world, 1, bytes);
    node
}

fn capture(node: &Node, rank: u64, world_size: u64, step: u64, bytes: usize) {
    let data = random(bytes, rank + (step << 8));
    let purpose = Purpose::Recovery;
    let label = Label { run: job_hash(JOB), rank, world_size, generation: 1, step, purpose, shared: false };
    let tensor = Tensor { name: "w".into(), dtype: "U8".into(), shape: vec![bytes as u64], bytes: bytes as u64 };
    let source = Source { address: data.as_ptr() as usize, bytes, eager: false };
    node.slot.release(Pin::Replicate);
    let plan = Plan {
        tensors: Described::of(&[tensor]).unwrap(),
        sources: vec![source],
        label,
        persist: false,
        threads: 2,
        background: false,
        compare: true,
    };
    // SAFETY: `data` lives and stays unchanged until `wait` has returned.
    unsafe { start(node.slot.clone(), plan, None) }.unwrap().wait().unwrap();
    assert!(node.slot.pin(Pin::Replicate));
}

fn group(directory: &Path, nodes: usize, bytes: usize) -> Vec<Node> {
    (0..nodes).map(|n| node(&directory.join(n.to_string()), n as u64, nodes as u64, bytes)).collect()
}

fn held(nodes: &[Node], step: u64) -> u64 {
    let all = nodes.iter().flat_map(|n| n.holder.held()).filter(|h| h.label.step == step);
    all.map(|h| Slot::open(&h.path).unwrap().region_bytes()).sum()
}

fn task(nodes: &[Node], parity: usize, at: usize, step: u64) -> Task {
    let (members, keepers) = stripe(nodes.len(), parity, at);
    let world_size = nodes.len() as u64;
    let want = |m: &usize| Want { rank: *m as u64, world_size, generation: 1, step };
    Task {
        of: ParityWant { stripe: u32::try_from(at).unwrap(), number: 0, world_size, generation: 1, step },
        run: job_hash(JOB),
        members: members.iter().map(|m| Some((nodes[*m].peer.clone(), want(m)))).collect(),
        keepers: keepers.iter().map(|k| nodes[*k].peer.clone()).collect(),
        round: step,
        base: step.checked_sub(1),
    }
}

/// Rank 0 of a group that has lost two nodes, from the others.
fn lost(nodes: &[Node], parity: usize, step: u64) -> rebuild::Task {
    let size = nodes.len();
    let alive = |n: &usize| (*n > 1).then(|| nodes[*n].peer.clone());
    let stripes = (0..size - parity).map(|part| {
        let at = (0..size).find(|at| stripe(size, parity, *at).0.get(part) == Some(&0)).unwrap();
        let (members, keepers) = stripe(size, parity, at);
        rebuild::Sources {
            stripe: u32::try_from(at).unwrap(),
            members: members.iter().map(|m| Some(Rank(u32::try_from(*m).unwrap()))).collect(),
            data: members.iter().map(alive).collect(),
            parity: std::iter::once(&at).chain(&keepers).map(alive).collect(),
        }
    });
    let want = Want { rank: 0, world_size: size as u64, generation: 1, step };
    rebuild::Task { want, stripes: stripes.collect() }
}

fn nodes(directory: &Path, count: usize, parity: usize, bytes: usize, rounds: u64) {
    let nodes = group(directory, count, bytes);
    let back = Arc::new(Slot::reserve(&directory.join("back"), slot_bytes(bytes as u64, 1 << 20)).unwrap());
    back.populate().unwrap();
    // The first steps find no memory yet, and no streams.
    for step in 1..=rounds + 2 {
        (0..).zip(&nodes).for_each(|(rank, n)| capture(n, rank, count as u64, step, bytes));
        nodes.iter().for_each(|n| n.holder.round_slots.set(1, step, vec![n.slot.clone()]));
        let took = seconds(|| {
            std::thread::scope(|s| {
                for at in 0..count {
                    let (task, node) = (task(&nodes, parity, at, step), &nodes[at]);
                    s.spawn(move || {
                        // SAFETY: each node computes one stripe at a time.
                        unsafe { encode(&task, &node.holder, &node.streams, &Open, Window::default()) }.unwrap();
                    });
                }
            });
        });
        let task = lost(&nodes, parity, step);
        let rebuilding = seconds(|| {
            // SAFETY: nobody else uses the slot.
            unsafe { task.fill(&back, &outline(&task).unwrap(), &AtomicBool::new(false)) }.unwrap();
        });
        let region = |slot: &Slot| {
            let mut region = vec![0; bytes];
            assert!(slot.load(0, &mut region));
            region
        };
        assert!(region(&nodes[0].slot) == region(&back));
        if step > 2 {
            let (state, held) = ((count * bytes) as f64, held(&nodes, step) as f64);
            let (encode, rebuild) = (state / took / 1e9, bytes as f64 / rebuilding / 1e9);
            println!("{{\"encode\": {encode}, \"rebuild\": {rebuild}, \"held\": {}}}", held / state);
        }
    }
}

fn copies(directory: &Path, count: usize, replicas: usize, bytes: usize, rounds: u64) {
    let nodes = group(directory, count, bytes);
    let mut links: Vec<Vec<Link>> = (0..count)
        .map(|n| (1..=replicas).map(|i| Link::new(nodes[(n + i) % count].peer.clone(), 2)).collect())
        .collect();
    for step in 1..=rounds + 2 {
        (0..).zip(&nodes).for_each(|(rank, n)| capture(n, rank, count as u64, step, bytes));
        let took = seconds(|| {
            std::thread::scope(|s| {
                for (node, links) in nodes.iter().zip(&mut links) {
                    for link in links {
                        s.spawn(|| link.push(&node.slot, Window::default(), &Open).unwrap());
                    }
                }
            });
        });
        if step > 2 {
            let (state, held) = ((count * bytes) as f64, held(&nodes, step) as f64);
            println!("{{\"copies\": {}, \"held\": {}}}", state / took / 1e9, held / state);
        }
    }
}

fn main() {
    let directory = || std::path::PathBuf::from(std::env::args().nth(2).unwrap());
    match std::env::args().nth(1).as_deref() {
        Some("code") => code(number(2)),
        Some("nodes") => nodes(&directory(), number(3), number(4), number(5), number(6)),
        Some("copies") => copies(&directory(), number(3), number(4), number(5), number(6)),
        _ => panic!("what to measure?"),
    }
}
