//! Parity over real sockets: six nodes in one process, any two of them lost, damaged, or lost while
//! they compute.

#![allow(clippy::unwrap_used, reason = "a test may end where it stands")]

mod region;

use everstep_checkpoint::arena::{Label, Pin, Slot, job_hash, slot_bytes};
use everstep_checkpoint::capture::{Described, Plan, Source, start};
use everstep_checkpoint::erasure::encode::{self, encode};
use everstep_checkpoint::erasure::parity_shard::{Description, verify};
use everstep_checkpoint::erasure::rebuild::{self, outline};
use everstep_checkpoint::erasure::streams::Streams;
use everstep_checkpoint::format::index::Tensor;
use everstep_checkpoint::replicate::protocol::{ParityWant, Peer, Want};
use everstep_checkpoint::replicate::push::{Gate, Open, Pass, Window};
use everstep_checkpoint::replicate::replica_holder::ReplicaHolder;
use everstep_core::id::Rank;
use everstep_core::message::Purpose;
use everstep_core::placement::stripe;
use everstep_wire::token::Token;
use region::{flip, intact, region};
use serde_json::value::RawValue;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const JOB: &str = "j";

struct Node {
    directory: PathBuf,
    holder: Arc<ReplicaHolder>,
    peer: Peer,
    slot: Arc<Slot>,
}

/// Nodes whose shards have these lengths, each with one rank, and what a stripe's parity is worth.
struct Group {
    nodes: Vec<Node>,
    parity: usize,
    _scratch: tempfile::TempDir,
}

fn captured(path: PathBuf, rank: u64, world_size: u64, step: u64, bytes: usize) -> Arc<Slot> {
    let data: Vec<u8> = (0..bytes).map(|i| ((i as u64 * 2_654_435_761 + step * 7 + rank * 31) >> 9) as u8).collect();
    let slot = Arc::new(Slot::reserve(&path, slot_bytes(bytes as u64, 64 << 10)).unwrap());
    slot.release(Pin::Replicate);
    let tensors = vec![Tensor { name: "w".into(), dtype: "U8".into(), shape: vec![bytes as u64], bytes: bytes as u64 }];
    let sources = vec![Source { address: data.as_ptr() as usize, bytes, eager: false }];
    let purpose = Purpose::Recovery;
    let label = Label { run: job_hash(JOB), rank, world_size, generation: 1, step, purpose, shared: false };
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

impl Group {
    fn new(lengths: &[usize], parity: usize) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let world = lengths.len() as u64;
        let nodes = (0..).zip(lengths).map(|(rank, bytes)| {
            let directory = scratch.path().join(rank.to_string());
            std::fs::create_dir_all(&directory).unwrap();
            // SAFETY: no other holder has this directory.
            let holder = Arc::new(unsafe { ReplicaHolder::new(vec![directory.clone()], job_hash(JOB)) });
            holder.set_token(Token::from_text("secret"));
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let serving = Arc::clone(&holder);
            std::thread::spawn(move || serving.serve(&listener, |line| eprintln!("{line}")));
            let slot = captured(directory.join("local-0-slot-0"), rank, world, 1, *bytes);
            Node { directory, holder, peer: Peer { address, token: "secret".into(), job: job_hash(JOB) }, slot }
        });
        Group { nodes: nodes.collect(), parity, _scratch: scratch }
    }

    fn want(&self, rank: usize, step: u64) -> Want {
        Want { rank: rank as u64, world_size: self.nodes.len() as u64, generation: 1, step }
    }

    fn of(&self, stripe: usize, step: u64) -> ParityWant {
        let stripe = u32::try_from(stripe).unwrap();
        ParityWant { stripe, number: 0, world_size: self.nodes.len() as u64, generation: 1, step }
    }

    fn capture(&mut self, step: u64) {
        let world = self.nodes.len() as u64;
        for (rank, node) in (0..).zip(&mut self.nodes) {
            let bytes = usize::try_from(node.slot.region_bytes()).unwrap();
            node.slot = captured(node.directory.join(format!("local-0-slot-{step}")), rank, world, step, bytes);
        }
    }

    fn take(&self, round: u64) {
        self.nodes.iter().for_each(|n| n.holder.round_slots.set(1, round, vec![n.slot.clone()]));
    }

    fn compute(&self, node: usize, step: u64, round: u64, base: Option<u64>, gate: &dyn Gate) -> std::io::Result<()> {
        let (members, keepers) = stripe(self.nodes.len(), self.parity, node);
        let task = encode::Task {
            of: self.of(node, step),
            run: job_hash(JOB),
            members: members.iter().map(|m| Some((self.nodes[*m].peer.clone(), self.want(*m, step)))).collect(),
            keepers: keepers.iter().map(|k| self.nodes[*k].peer.clone()).collect(),
            round,
            base,
        };
        // SAFETY: a test computes the stripes of a node one after the other.
        unsafe { encode(&task, &self.nodes[node].holder, &Streams::default(), gate, Window::default()) }
    }

    fn compute_all(&self, step: u64, round: u64, base: Option<u64>) {
        self.take(round);
        std::thread::scope(|scope| {
            (0..self.nodes.len())
                .for_each(|n| drop(scope.spawn(move || self.compute(n, step, round, base, &Open).unwrap())));
        });
    }

    /// How to compute a rank's shard when these nodes are lost.
    fn task(&self, rank: usize, step: u64, lost: &[usize]) -> rebuild::Task {
        let size = self.nodes.len();
        let alive = |n: &usize| (!lost.contains(n)).then(|| self.nodes[*n].peer.clone());
        let data = size - self.parity.min(size - 1);
        let stripes = (0..data).map(|part| {
            let at = (0..size).find(|at| stripe(size, self.parity, *at).0.get(part) == Some(&rank)).unwrap();
            let (members, keepers) = stripe(size, self.parity, at);
            let rank = |m: &usize| Some(Rank(u32::try_from(*m).unwrap()));
            rebuild::Sources {
                stripe: u32::try_from(at).unwrap(),
                members: members.iter().map(rank).collect(),
                data: members.iter().map(alive).collect(),
                parity: std::iter::once(&at).chain(&keepers).map(alive).collect(),
            }
        });
        rebuild::Task { want: self.want(rank, step), stripes: stripes.collect() }
    }

    fn rebuilt(&self, rank: usize, step: u64, lost: &[usize]) -> std::io::Result<bool> {
        let task = self.task(rank, step, lost);
        let outline = outline(&task)?;
        let into = tempfile::tempdir().unwrap();
        let slot = Arc::new(Slot::reserve(&into.path().join("slot"), slot_bytes(outline.region, 64 << 10)).unwrap());
        // SAFETY: nobody else uses the slot.
        unsafe { task.fill(&slot, &outline, &AtomicBool::new(false))? };
        let (own, bytes) = (&self.nodes[rank].slot, usize::try_from(outline.region).unwrap());
        assert_eq!(slot.described().unwrap(), own.described().unwrap());
        Ok(intact(&slot) && region(&slot, bytes) == region(own, bytes))
    }

    /// Bytes of parity on a node.
    fn kept(&self, node: usize) -> u64 {
        let slots = self.nodes[node].holder.held().into_iter().filter(|h| h.parity);
        slots.map(|h| Slot::open(&h.path).unwrap().region_bytes()).sum()
    }
}

fn pairs(n: usize) -> impl Iterator<Item = [usize; 2]> {
    (0..n).flat_map(move |a| (a + 1..n).map(move |b| [a, b]))
}

#[test]
fn any_two_of_six_come_back_for_half_a_shard_each() {
    let group = Group::new(&[16 << 20; 6], 2);
    group.compute_all(1, 1, None);
    for lost in pairs(6) {
        for rank in lost {
            assert!(group.rebuilt(rank, 1, &lost).unwrap(), "rank {rank} without {lost:?}");
        }
    }
    assert!(group.rebuilt(0, 1, &[0, 1, 2]).is_err(), "three are one too many");
    for node in 0..6 {
        assert_eq!(group.kept(node), 8 << 20);
    }
    // What is there already is not computed again.
    let none = After(AtomicUsize::new(0));
    (0..6).for_each(|n| group.compute(n, 1, 1, None, &none).unwrap());
}

#[test]
fn shards_of_any_lengths_come_back() {
    for lengths in [
        vec![5_000_000, 1, 3_333_333, 9_999_999, 0, 1 << 20],
        vec![100, 200, 300, 50, 6000, 1],
        vec![2_500_000; 3],
        vec![2_500_000, 7_000_000],
        vec![3_000_000, 1_500_000, 2_000_000, 700_000],
        vec![1_200_000; 9],
    ] {
        let group = Group::new(&lengths, 2);
        group.compute_all(1, 1, None);
        let n = lengths.len();
        let all: Vec<Vec<usize>> = if n > 2 { pairs(n).map(Vec::from).collect() } else { vec![vec![0], vec![1]] };
        for lost in all {
            for rank in &lost {
                assert!(group.rebuilt(*rank, 1, &lost).unwrap(), "rank {rank} of {lengths:?} without {lost:?}");
            }
        }
    }
}

struct After(AtomicUsize);

impl Gate for After {
    fn pass(&self, bytes: usize) -> Pass {
        let left = self.0.load(Ordering::Relaxed);
        self.0.store(left.saturating_sub(1), Ordering::Relaxed);
        Pass { bytes: if left == 0 { 0 } else { bytes.min(300_000) }, alone: left.is_multiple_of(3) }
    }
}

/// Two nodes go while step 2 is being computed, at any moment: what all hold is step 1, and it
/// comes back.
#[test]
fn what_all_hold_comes_back_when_nodes_go_while_the_next_step_is_computed() {
    for (turn, lost) in pairs(6).enumerate() {
        let mut group = Group::new(&[4_300_000; 6], 2);
        group.compute_all(1, 1, None);
        let first: Vec<Arc<Slot>> = group.nodes.iter().map(|n| n.slot.clone()).collect();
        group.capture(2);
        group.take(2);
        for node in 0..6 {
            // Some have done all, others stop somewhere.
            let gate = After(AtomicUsize::new((turn * 7 + node * 11) % 40));
            let done = group.compute(node, 2, 2, Some(1), &gate);
            assert!(done.is_ok() || done.unwrap_err().kind() == std::io::ErrorKind::Interrupted);
        }
        group.nodes.iter_mut().zip(first).for_each(|(n, slot)| n.slot = slot);
        for rank in lost {
            assert!(group.rebuilt(rank, 1, &lost).unwrap(), "rank {rank} without {lost:?}");
        }
    }
}

/// Another round takes over where one has stopped; nothing of the first is in the way.
#[test]
fn an_attempt_that_has_stopped_is_made_again() {
    let mut group = Group::new(&[3 << 20; 6], 2);
    for step in 2..6 {
        group.capture(step);
        group.take(step * 10);
        let gate = After(AtomicUsize::new(usize::try_from(step).unwrap()));
        let _ = group.compute(0, step, step * 10, None, &gate);
        group.compute_all(step, step * 10 + 1, (step > 2).then(|| step - 1));
        assert!(group.rebuilt(3, step, &[3, 4]).unwrap());
    }
    // Two steps stay.
    assert!(group.nodes.iter().all(|n| n.holder.held().iter().filter(|h| h.parity).count() == 4));
}

#[test]
fn a_node_that_has_taken_another_step_is_told_apart_at_once() {
    let mut group = Group::new(&[3 << 20; 6], 2);
    group.take(1);
    let step_1 = group.nodes[5].slot.clone();
    group.capture(2);
    group.take(2);
    // Node 5 has gone on with step 1, a whole round earlier or in this one.
    for round in [1, 2] {
        group.nodes[5].holder.round_slots.set(1, round, vec![step_1.clone()]);
        let began = std::time::Instant::now();
        let done = group.compute(0, 2, 2.min(round), None, &Open);
        assert_eq!(done.unwrap_err().kind(), std::io::ErrorKind::NotFound);
        // One that waits gives the same answer, half of `SILENCE` (5 s) later: only time tells.
        assert!(began.elapsed().as_secs() < 4, "it did not wait for the step");
    }
    // It waits for a node that has not begun the round yet.
    std::thread::scope(|scope| {
        let group = &group;
        let waits = scope.spawn(move || {
            group.take(2);
            group.nodes[5].holder.round_slots.set(1, 2, vec![]);
            group.compute(1, 2, 3, None, &Open)
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        group.take(3);
        waits.join().unwrap().unwrap();
    });
}

#[test]
fn what_is_damaged_is_found_and_another_source_is_used() {
    let group = Group::new(&[9_500_000; 6], 2);
    group.compute_all(1, 1, None);
    // Every byte of one other node, own shard and parity: one node lost and one rotten is as good
    // as two lost.
    for held in group.nodes[1].holder.held() {
        let slot = Slot::open(&held.path).unwrap();
        let bytes = usize::try_from(slot.region_bytes()).unwrap();
        (0..bytes).step_by(1 << 20).for_each(|at| flip(&slot, at));
    }
    assert!(group.rebuilt(0, 1, &[0]).unwrap());
    assert!(group.rebuilt(5, 1, &[5]).unwrap());
    assert!(group.rebuilt(3, 1, &[3, 4]).is_err());
    // A chunk of one's own is healed, too.
    let own = &group.nodes[1].slot;
    let chunks: Vec<usize> = (0..10).collect();
    let mut healed = group.task(1, 1, &[]).heal(&own.repair().unwrap(), &chunks, &AtomicBool::new(false)).unwrap();
    healed.sort_unstable();
    assert_eq!(healed, chunks);
    assert!(intact(own));
    // A member whose slot is damaged when it is read for parity: nothing wrong is computed.
    let group = Group::new(&[3 << 20; 6], 2);
    flip(&group.nodes[2].slot, 77);
    group.take(1);
    let wrong: Vec<usize> = (0..6).filter(|n| group.compute(*n, 1, 1, None, &Open).is_err()).collect();
    assert_eq!(wrong, [3], "the one that computes from its first part");
}

#[test]
fn parity_that_speaks_of_another_shard_is_not_used() {
    let group = Group::new(&[5_000_000; 4], 2);
    group.compute_all(1, 1, None);
    let parity: Vec<Arc<Slot>> = group
        .nodes
        .iter()
        .flat_map(|n| n.holder.held())
        .filter(|h| h.parity)
        .map(|h| Arc::new(Slot::open(&h.path).unwrap()))
        .collect();
    assert!(parity.iter().all(|slot| verify(slot).is_ok()));
    // All parity of the second part says that rank 0's tensor has another name.
    let second = group.task(0, 1, &[0]).stripes[1].stripe;
    let of_second = |slot: &&Arc<Slot>| slot.label().unwrap().rank == u64::from(second);
    for slot in parity.iter().filter(of_second) {
        let (label, json) = slot.described().unwrap();
        let mut found = Description::from_bytes(&json).unwrap();
        let own = found.members[1].as_mut().unwrap();
        assert_eq!(own.label.rank, 0);
        own.index = RawValue::from_string(own.index.get().replace("\"w\"", "\"v\"")).unwrap();
        let (json, region) = (found.to_bytes().unwrap(), slot.region_bytes());
        // SAFETY: no parity is computed any more.
        let writing = unsafe { slot.begin() }.unwrap();
        writing.describe(label, &json, region).unwrap();
        writing.seal(None);
    }
    let refused = group.rebuilt(0, 1, &[0]).unwrap_err();
    assert!(refused.to_string().contains("different shards"), "{refused}");
    let slot = &parity[0];
    flip(slot, 0);
    assert!(verify(slot).is_err());
}
