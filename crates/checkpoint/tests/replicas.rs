//! Replicas over real sockets: pushed, resumed, pulled, healed.

#![allow(clippy::unwrap_used, reason = "a test may end where it stands")]

mod region;

use everstep_checkpoint::arena::{Label, Pin, REGION_AT, Slot, State, job_hash, slot_bytes};
use everstep_checkpoint::capture::{Described, Plan, Source, start};
use everstep_checkpoint::format::index::{Index, Tensor};
use everstep_checkpoint::replicate::protocol::{Answer, Ask, Peer, Stream, Want, description_crc};
use everstep_checkpoint::replicate::pull::{fill, find, heal};
use everstep_checkpoint::replicate::push::{Gate, Link, Open, Pass, Window};
use everstep_checkpoint::replicate::replica_holder::ReplicaHolder;
use everstep_checkpoint::restore::Shard;
use everstep_core::message::Purpose;
use everstep_wire::frame;
use everstep_wire::token::Token;
use region::{flip, intact, overwrite, region};
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const BYTES: usize = 9_500_000;

fn captured(path: &Path, rank: u64, step: u64, generation: u64) -> Arc<Slot> {
    let data: Vec<u8> = (0..BYTES).map(|i| ((i as u64 * 2_654_435_761 + step * 7 + rank) >> 11) as u8).collect();
    let slot = Arc::new(Slot::reserve(path, slot_bytes(BYTES as u64, 64 << 10)).unwrap());
    slot.release(Pin::Replicate);
    let tensors = vec![Tensor { name: "w".into(), dtype: "U8".into(), shape: vec![BYTES as u64], bytes: BYTES as u64 }];
    let sources = vec![Source { address: data.as_ptr() as usize, bytes: BYTES, eager: false }];
    let label =
        Label { run: job_hash("j"), rank, world_size: 4, generation, step, purpose: Purpose::Recovery, shared: false };
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

fn holder(directory: &Path) -> (Arc<ReplicaHolder>, Peer) {
    std::fs::create_dir_all(directory).unwrap();
    // SAFETY: a test writes into `directory` with one holder at a time.
    let holder = Arc::new(unsafe { ReplicaHolder::new(vec![directory.into()], job_hash("j")) });
    holder.set_token(Token::from_text("secret"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serving = Arc::clone(&holder);
    std::thread::spawn(move || serving.serve(&listener, |line| eprintln!("{line}")));
    (holder, Peer { address, token: "secret".into(), job: job_hash("j") })
}

fn want(rank: u64, step: u64, generation: u64) -> Want {
    Want { rank, world_size: 4, generation, step }
}

struct After(AtomicUsize);

impl Gate for After {
    fn pass(&self, bytes: usize) -> Pass {
        let left = self.0.load(Ordering::Relaxed);
        self.0.store(left.saturating_sub(1), Ordering::Relaxed);
        Pass { bytes: if left == 0 { 0 } else { bytes }, alone: left.is_multiple_of(2) }
    }
}

#[test]
fn what_is_pushed_comes_back_from_two_holders_and_two_steps_stay() {
    let scratch = tempfile::tempdir().unwrap();
    let (a, b) = (scratch.path().join("a"), scratch.path().join("b"));
    let ((holder_a, peer_a), (holder_b, peer_b)) = (holder(&a), holder(&b));
    let (mut to_a, mut to_b) = (Link::new(peer_a.clone(), 2), Link::new(peer_b.clone(), 2));
    for step in 1..=5 {
        let slot = captured(&scratch.path().join("slot"), 3, step, 1);
        to_a.push(&slot, Window::default(), &Open).unwrap();
        to_b.push(&slot, Window { extent: 100_000, buffers: 2, streams: 2 }, &Open).unwrap();
    }
    for holder in [&holder_a, &holder_b] {
        let steps: Vec<u64> = holder.held().iter().map(|h| h.label.step).collect();
        assert_eq!(steps, [4, 5]);
    }
    let peers = [peer_a.clone(), peer_b];
    let found = || peers.iter().map(|p| (p, find(p, want(3, 5, 1)).unwrap())).collect::<Vec<_>>();
    let back = Arc::new(Slot::reserve(&scratch.path().join("back"), slot_bytes(BYTES as u64, 64 << 10)).unwrap());
    // SAFETY: nobody else uses the slot.
    let fill = |streams, over: &AtomicBool| unsafe { fill(&back, found(), want(3, 5, 1), streams, over) };
    assert_eq!(fill(2, &AtomicBool::new(true)).unwrap_err().kind(), std::io::ErrorKind::Interrupted);
    assert_eq!(back.state(), State::Writing);
    let over = AtomicBool::new(false);
    fill(2, &over).unwrap();
    let original = std::fs::read(scratch.path().join("slot")).unwrap();
    let copy = std::fs::read(scratch.path().join("back")).unwrap();
    assert_eq!(original[REGION_AT..REGION_AT + BYTES], copy[REGION_AT..REGION_AT + BYTES]);
    assert!(find(&peers[0], want(3, 3, 1)).is_err() && find(&peers[0], want(3, 5, 2)).is_err());

    // Rot in one holder: the other one brings what is damaged. In both: nothing is sealed.
    let rot = |holder: &ReplicaHolder, at: usize| {
        let path = holder.held().iter().find(|h| h.label.step == 5).unwrap().path.clone();
        flip(&Slot::open(&path).unwrap(), at);
    };
    rot(&holder_a, 5_000_000);
    fill(1, &over).unwrap();
    assert!(intact(&back));
    rot(&holder_b, 5_000_001);
    assert!(fill(1, &over).is_err());
    assert_eq!(back.state(), State::Writing);
    // A damaged chunk of one's own is healed from a holder that has it good.
    rot(&holder_b, 5_000_001);
    let own = Arc::new(Slot::open(&scratch.path().join("slot")).unwrap());
    overwrite(&own, REGION_AT + 7_000_000, &[1, 2, 3]);
    let shard = Shard::from_slot(own.clone()).unwrap().0;
    assert!(shard.verify(2).is_err());
    assert_eq!(heal(&own.repair().unwrap(), &peers[1], want(3, 5, 1), &[6]).unwrap(), [6]);
    assert!(shard.verify(2).is_ok());
}

#[test]
fn an_interrupted_push_goes_on_where_it_stopped_and_a_stale_one_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let kept = scratch.path().join("kept");
    let (holder, peer) = holder(&kept);
    let slot = captured(&scratch.path().join("slot"), 0, 7, 2);
    let mut link = Link::new(peer.clone(), 1);
    let stopped = link.push(&slot, Window::default(), &After(AtomicUsize::new(6)));
    assert!(stopped.is_err() && holder.held().is_empty());
    let before = link.sent.load(Ordering::Relaxed);
    // Not even a new holder process has to begin anew: the chunks are told by their checksums.
    let (holder, peer) = self::holder(&kept);
    let mut link = Link::new(peer.clone(), 2);
    link.push(&slot, Window::default(), &Open).unwrap();
    let after = link.sent.load(Ordering::Relaxed);
    // What was under way when the stream was closed may be lost; what was answered is not sent
    // again.
    assert!(before >= 5 << 20 && after <= (BYTES - (2 << 20)) as u64, "{before} {after}");
    assert_eq!(holder.held().len(), 1);
    assert!(intact(&Slot::open(&holder.held()[0].path).unwrap()));
    // Once more: nothing is sent.
    link.push(&slot, Window::default(), &Open).unwrap();
    assert_eq!(link.sent.load(Ordering::Relaxed), after);
    holder.raise_floor(3);
    let late = captured(&scratch.path().join("slot"), 0, 8, 2);
    assert!(Link::new(peer.clone(), 1).push(&late, Window::default(), &Open).is_err());
    assert!(Link::new(Peer { token: "guess".into(), ..peer }, 1).push(&late, Window::default(), &Open).is_err());
    holder.keep_only(&[], &[]);
    assert!(holder.held().is_empty());
}

/// Looks, each time that something may go, whether all that went before has arrived.
struct Arrived<'a> {
    kept: &'a Path,
    original: &'a Slot,
    passed: AtomicUsize,
}

impl Gate for Arrived<'_> {
    fn pass(&self, bytes: usize) -> Pass {
        let passed = self.passed.fetch_add(bytes, Ordering::Relaxed);
        let copy = std::fs::read_dir(self.kept).unwrap().map(|f| f.unwrap().path()).find(|p| p.is_file()).unwrap();
        let copy = Slot::open(&copy).unwrap();
        assert_eq!(region(&copy, passed), region(self.original, passed), "at {passed}");
        Pass { bytes, alone: false }
    }
}

#[test]
fn what_may_go_goes_at_once_and_not_when_there_is_room() {
    let scratch = tempfile::tempdir().unwrap();
    let kept = scratch.path().join("kept");
    let (_holder, peer) = holder(&kept);
    let slot = captured(&scratch.path().join("slot"), 0, 1, 1);
    let gate = Arrived { kept: &kept, original: &slot, passed: AtomicUsize::new(0) };
    let one = Window { extent: 1 << 20, buffers: 1, streams: 1 };
    Link::new(peer, 1).push(&slot, one, &gate).unwrap();
    assert_eq!(gate.passed.load(Ordering::Relaxed), BYTES);
}

#[test]
fn a_sender_whose_slot_is_damaged_is_told() {
    let scratch = tempfile::tempdir().unwrap();
    let kept = scratch.path().join("kept");
    let (holder, peer) = holder(&kept);
    let slot = captured(&scratch.path().join("slot"), 0, 7, 2);
    overwrite(&slot, REGION_AT + 3_000_000, &[9, 9, 9]);
    let refused = Link::new(peer, 2).push(&slot, Window::default(), &Open).unwrap_err();
    assert!(refused.to_string().contains("damaged"), "{refused}");
    assert!(holder.held().is_empty());
}

/// A peer that has the token, and answers the beginning of an upload with this.
fn peer_that_misses(runs: Vec<(u64, u64)>) -> Peer {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let (mut tcp, _) = listener.accept().unwrap();
        frame::read::<Ask>(&mut tcp).unwrap();
        frame::write(&mut tcp, &Answer::Done).unwrap();
        let Ask::Begin { index, .. } = frame::read::<Ask>(&mut tcp).unwrap() else { panic!("no upload") };
        frame::read_bytes(&mut tcp, index).unwrap();
        frame::write(&mut tcp, &Answer::Missing(runs)).unwrap();
    });
    Peer { address, token: "secret".into(), job: job_hash("j") }
}

#[test]
fn a_peer_that_asks_for_more_than_there_is_gets_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let slot = captured(&scratch.path().join("slot"), 0, 1, 1);
    let mut link = Link::new(peer_that_misses(vec![(0, 1 << 16)]), 1);
    let refused = link.push(&slot, Window::default(), &Open).unwrap_err();
    assert!(refused.to_string().contains("asks for chunks"), "{refused}");
    assert_eq!(link.sent.load(Ordering::Relaxed), 0);
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Begins an upload of a shard of one byte, and returns how it is named.
fn begin(stream: &mut Stream, run: u64, rank: u64) -> Label {
    let label = Label { run, rank, world_size: 4, generation: 1, step: 1, purpose: Purpose::Recovery, shared: false };
    let tensors = vec![Tensor { name: "w".into(), dtype: "U8".into(), shape: vec![1], bytes: 1 }];
    let index = serde_json::to_vec(&Index::new(tensors).unwrap().with_checksums(vec![0]).unwrap()).unwrap();
    let crc = description_crc(&label, &index);
    frame::write(&mut stream.tcp, &Ask::Begin { label, region: 1, index: index.len() as u64, crc, base: None })
        .unwrap();
    stream.tcp.write_all(&index).unwrap();
    assert_eq!(stream.answer().unwrap(), Answer::Missing(vec![(0, 1)]));
    label
}

#[test]
fn a_stream_that_joins_again_and_again_takes_no_more_descriptors() {
    let scratch = tempfile::tempdir().unwrap();
    let (_holder, peer) = holder(&scratch.path().join("kept"));
    let (mut one, mut two) = (Stream::open(&peer).unwrap(), Stream::open(&peer).unwrap());
    let labels = [begin(&mut one, peer.job, 0), begin(&mut two, peer.job, 1)];
    let before = descriptors();
    for n in 0..200 {
        one.expect_done(&Ask::Join { label: labels[n % 2] }).unwrap();
    }
    // Other tests of this process open some, too.
    assert!(descriptors() < before + 100, "{before} before, {} now", descriptors());
    // It is the second upload's now: that the first one begins anew does not concern it.
    let mut three = Stream::open(&peer).unwrap();
    begin(&mut three, peer.job, 0);
    one.expect_done(&Ask::Join { label: labels[1] }).unwrap();
}
