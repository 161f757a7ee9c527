//! Corruption and crash states: every flip is noticed, every crash leaves the previous checkpoint
//! whole.

#![allow(clippy::unwrap_used, reason = "a test may end where it stands")]

mod region;

use everstep_checkpoint::arena::{Label, Pin, REGION_AT, Slot, State, job_hash, slot_bytes};
use everstep_checkpoint::capture::{Described, Plan, Source, start};
use everstep_checkpoint::direct_io::Throttle;
use everstep_checkpoint::format::index::Tensor;
use everstep_checkpoint::format::manifest::{self, MANIFEST_FILE, Manifest, ManifestError};
use everstep_checkpoint::format::mark::MARK_FILE;
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::lineage::Lineage;
use everstep_checkpoint::persist;
use everstep_checkpoint::restore::Shard;
use everstep_checkpoint::retain::Policy;
use everstep_core::id::{Rank, RunId};
use everstep_core::message::Purpose;
use everstep_core::shard::ShardFile;
use region::{intact, overwrite};
use std::fs;
use std::io::{Write, stdout};
use std::path::Path;
use std::sync::Arc;

/// Prints a line about what was covered, also if the test passes: only what `print!` writes is held
/// back then.
fn report(line: &str) {
    stdout().write_all(format!("\n{line}\n").as_bytes()).unwrap();
}

fn tensors() -> (Vec<Tensor>, Vec<Vec<u8>>) {
    let sizes = [("a", 70_000usize), ("b", 12), ("c", 1_500_000), ("d", 0)];
    let data: Vec<Vec<u8>> = sizes.iter().map(|(_, n)| (0..*n).map(|i| (i * 31 % 251) as u8).collect()).collect();
    let tensor = |(name, n): &(&str, usize)| Tensor {
        name: (*name).into(),
        dtype: "U8".into(),
        shape: vec![*n as u64],
        bytes: *n as u64,
    };
    (sizes.iter().map(tensor).collect(), data)
}

fn mark(generation: u64) -> Mark {
    Mark { run: RunId(1), epoch: 1, generation, attempt: 0 }
}

fn captured(path: &Path, step: u64) -> Arc<Slot> {
    let (tensors, data) = tensors();
    let slot = Arc::new(Slot::reserve(path, slot_bytes(2 << 20, 64 << 10)).unwrap());
    let source = |(i, d): (usize, &Vec<u8>)| Source { address: d.as_ptr() as usize, bytes: d.len(), eager: i % 2 == 1 };
    let sources = data.iter().enumerate().map(source).collect();
    let label = Label {
        run: job_hash("j"),
        rank: 0,
        world_size: 1,
        generation: 1,
        step,
        purpose: Purpose::Recovery,
        shared: false,
    };
    let plan = Plan {
        tensors: Described::of(&tensors).unwrap(),
        sources,
        label,
        persist: true,
        threads: 2,
        background: false,
        compare: true,
    };
    // SAFETY: `data` lives and stays unchanged until `wait` has returned.
    unsafe { start(slot.clone(), plan, None) }.unwrap().wait().unwrap();
    slot
}

#[test]
fn what_was_captured_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let slot = captured(&dir.path().join("slot"), 5);
    let (shard, label) = Shard::from_slot(slot).unwrap();
    let (_, data) = tensors();
    assert_eq!(label.step, 5);
    let offsets = shard.index().offsets();
    for (name, expected) in ["a", "b", "c", "d"].iter().zip(&data) {
        let (offset, tensor) = offsets[name];
        assert_eq!(shard.fetch(offset, tensor.bytes).unwrap(), expected.as_slice(), "{name}");
    }
}

#[test]
fn every_flip_in_a_slot_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot");
    drop(captured(&path, 5));
    let good = fs::read(&path).unwrap();
    let region: usize = tensors().1.iter().map(Vec::len).sum();
    let index_at = REGION_AT + region.next_multiple_of(4096);
    let index_bytes = u64::from_le_bytes(good[64..72].try_into().unwrap()) as usize;
    // The words that are summed, the sum, every bit of the index, and every 997th byte of the
    // region.
    let exact = (24..120).chain(index_at..index_at + index_bytes).flat_map(|b| (0..8).map(move |bit| (b, bit)));
    let sampled = (REGION_AT..REGION_AT + region).step_by(997).map(|b| (b, b % 8));
    let (mut flips, mut missed) = (0u32, Vec::new());
    for (byte, bit) in exact.chain(sampled) {
        let slot = Slot::open(&path).unwrap();
        overwrite(&slot, byte, &[good[byte] ^ (1 << bit)]);
        flips += 1;
        if intact(&slot) {
            missed.push((byte, bit));
        }
        overwrite(&slot, byte, &[good[byte]]);
    }
    report(&format!("corruption: {flips} flips in a slot, {} undetected", missed.len()));
    assert!(missed.is_empty(), "{missed:?}");
}

#[test]
fn a_crash_while_capturing_leaves_the_other_slots() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (captured(&dir.path().join("a"), 5), captured(&dir.path().join("b"), 6));
    b.release(Pin::Persist);
    // SAFETY: nobody else uses the slot.
    assert!(unsafe { b.begin() }.is_some()); // and then the process died
    assert!(intact(&a));
    assert_eq!((b.state(), intact(&b)), (State::Writing, false));
}

/// The newest step that a reader accepts, everything verified.
fn readable(directory: &Path) -> Option<u64> {
    persist::list(directory).unwrap().into_iter().find_map(|(step, path, manifest)| {
        let manifest: Manifest = manifest.ok()?;
        manifest.shards.iter().all(|s| Shard::from_file(&path, s).is_ok_and(|s| s.verify(2).is_ok())).then_some(step)
    })
}

#[test]
fn a_crash_at_any_point_of_a_commit_leaves_the_previous_checkpoint_or_the_new_one() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let commit = |step: u64| {
        let slot = captured(&scratch.path().join(format!("slot-{step}")), step);
        let shard = persist::write_shard(&slot, &out, &mark(1), step, Rank(0), &Throttle::new(0)).unwrap();
        persist::publish(&out, &mark(1), step, &[shard], persist::Target::Branch).unwrap();
    };
    commit(3);
    commit(6);
    let new = out.join("step-6");
    let (manifest, shard) =
        (fs::read(new.join(MANIFEST_FILE)).unwrap(), fs::read(new.join("rank-0.safetensors")).unwrap());
    fs::remove_dir_all(&new).unwrap();
    let mut states = 0;
    let mut state = |visible: bool, manifest: Option<&[u8]>, shard: Option<&[u8]>, expected: u64| {
        let at = if visible { out.join("step-6") } else { out.join("step-6.tmp-1") };
        fs::create_dir_all(&at).unwrap();
        manifest.inspect(|m| fs::write(at.join(MANIFEST_FILE), m).unwrap());
        shard.inspect(|s| fs::write(at.join("rank-0.safetensors"), s).unwrap());
        assert_eq!(readable(&out), Some(expected), "visible {visible}, manifest {:?}", manifest.map(<[u8]>::len));
        fs::remove_dir_all(&at).unwrap();
        states += 1;
    };
    for cut in (0..shard.len()).step_by(9973) {
        state(false, None, Some(&shard[..cut]), 3);
        // A file system that reorders: the rename is there, the bytes are not.
        state(true, Some(&manifest), Some(&shard[..cut]), 3);
    }
    for cut in 0..manifest.len() - 1 {
        state(false, Some(&manifest[..cut]), Some(&shard), 3);
        state(true, Some(&manifest[..cut]), Some(&shard), 3);
    }
    state(true, None, Some(&shard), 3);
    state(true, Some(&manifest), None, 3);
    state(false, Some(&manifest), Some(&shard), 3);
    state(true, Some(&manifest), Some(&shard), 6);
    report(&format!("crash states: {states} tried, previous or new checkpoint every time"));
}

#[test]
fn publishing_twice_and_pruning_keep_what_is_needed() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    for (generation, step) in [(1, 2), (1, 4), (2, 4), (2, 6), (2, 8)] {
        let path = scratch.path().join("slot");
        if let Ok(slot) = Slot::open(&path) {
            slot.release(Pin::Persist);
        }
        let slot = captured(&path, step);
        let shard = persist::write_shard(&slot, &out, &mark(generation), step, Rank(0), &Throttle::new(0)).unwrap();
        persist::publish(&out, &mark(generation), step, std::slice::from_ref(&shard), persist::Target::Branch).unwrap();
        persist::publish(&out, &mark(generation), step, &[shard], persist::Target::Branch).unwrap();
    }
    // Half of what this run wrote goes, what is being written stays, and so does what has no mark.
    for (generation, marked) in [(1, true), (2, true), (1, false)] {
        let at = out.join(format!("step-{}.tmp-1.{generation}", if marked { 9 } else { 10 }));
        fs::create_dir(&at).unwrap();
        fs::write(at.join("rank-0.safetensors"), b"half").unwrap();
        if marked {
            fs::write(at.join(MARK_FILE), serde_json::to_vec(&mark(generation)).unwrap()).unwrap();
        }
    }
    persist::prune(&out, Policy { last: 0, every: None, epochs: false, abandoned: false }, &mark(2)).unwrap();
    let steps: Vec<u64> = persist::list(&out).unwrap().into_iter().map(|(s, _, _)| s).collect();
    assert_eq!(steps, [8, 6], "two versions stay whatever is asked");
    assert!(!out.join("step-9.tmp-1.1").exists() && out.join("step-9.tmp-1.2").exists());
    assert!(out.join("step-10.tmp-1.1").exists());
}

#[test]
fn a_step_that_lacks_a_shard_is_not_published() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let write = |rank, step| {
        let slot = captured(&scratch.path().join(format!("slot-{rank}")), step);
        let _ = slot.pin(Pin::Persist);
        persist::write_shard(&slot, &out, &mark(1), step, Rank(rank), &Throttle::new(0)).unwrap()
    };
    let shards = [write(0, 4), write(1, 4)];
    let publish = || persist::publish(&out, &mark(1), 4, &shards, persist::Target::Branch);
    let file = out.join("step-4.tmp-1.1").join(&shards[1].file);
    let whole = fs::read(&file).unwrap();
    let spoil: [&dyn Fn(); 3] =
        [&|| fs::remove_file(&file).unwrap(), &|| fs::write(&file, &whole[1..]).unwrap(), &|| {
            fs::remove_file(&file).unwrap();
            fs::create_dir(&file).unwrap();
        }];
    for spoiled in spoil {
        spoiled();
        assert!(publish().unwrap_err().to_string().contains(&shards[1].file));
        assert!(persist::list(&out).unwrap().is_empty());
    }
    fs::remove_dir(&file).unwrap();
    fs::write(&file, &whole).unwrap();
    publish().unwrap();
    assert_eq!(persist::list(&out).unwrap().len(), 1);
}

/// Ranks that all take themselves for the first one write one file in turn.
#[test]
fn shards_that_are_not_one_of_each_rank_are_not_published() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let write = |rank: u32, generation: u64| {
        let slot = captured(&scratch.path().join(format!("slot-{rank}-{generation}")), 4);
        persist::write_shard(&slot, &out, &mark(generation), 4, Rank(rank), &Throttle::new(0)).unwrap()
    };
    persist::publish(&out, &mark(1), 4, &[write(0, 1)], persist::Target::Branch).unwrap();
    let (first, third) = (write(0, 2), write(2, 2));
    for shards in [vec![], vec![first.clone(), first.clone()], vec![first, third.clone()], vec![third]] {
        let refused = persist::publish(&out, &mark(2), 4, &shards, persist::Target::Branch).unwrap_err().to_string();
        assert!(refused.contains("not every rank has exactly one shard"), "{refused}");
        assert_eq!(readable(&out), Some(4));
    }
}

/// The process died between the exchange of the two names and the deletion of what it had replaced.
#[test]
fn a_checkpoint_that_was_replaced_is_deleted_after_a_crash() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let commit = |generation: u64| {
        let slot = captured(&scratch.path().join(format!("slot-{generation}")), 4);
        let shard = persist::write_shard(&slot, &out, &mark(generation), 4, Rank(0), &Throttle::new(0)).unwrap();
        persist::publish(&out, &mark(generation), 4, &[shard], persist::Target::Branch).unwrap();
    };
    commit(1);
    let (step, aside) = (out.join("step-4"), scratch.path().join("aside"));
    fs::create_dir(&aside).unwrap();
    for file in fs::read_dir(&step).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), aside.join(file.file_name())).unwrap();
    }
    commit(2);
    let left = out.join("step-4.tmp-1.2");
    fs::rename(&aside, &left).unwrap();
    let pruned =
        persist::prune(&out, Policy { last: 2, every: None, epochs: false, abandoned: false }, &mark(3)).unwrap();
    assert_eq!((pruned.leftovers.as_slice(), left.exists()), (["step-4.tmp-1.2".to_owned()].as_slice(), false));
    assert_eq!(readable(&out), Some(4));
}

/// Two steps that become durable at the same moment are both published and both delete what nobody
/// needs.
#[test]
fn two_that_delete_at_once_do_not_fail_each_other() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    for round in 0..200 {
        for i in 0..20 {
            let left = out.join(format!("step-{i}.tmp-1.1"));
            fs::create_dir_all(&left).unwrap();
            fs::write(left.join(MARK_FILE), serde_json::to_vec(&mark(1)).unwrap()).unwrap();
            fs::write(left.join("rank-0.safetensors"), b"x").unwrap();
        }
        let policy = Policy { last: 2, every: None, epochs: false, abandoned: false };
        std::thread::scope(|s| {
            let both = [0, 1].map(|_| s.spawn(|| persist::prune(&out, policy, &mark(2))));
            for one in both {
                one.join().unwrap().unwrap_or_else(|e| panic!("round {round}: {e}"));
            }
        });
        assert_eq!(fs::read_dir(&out).unwrap().count(), 0, "round {round}");
    }
}

#[test]
fn a_turn_that_no_other_can_follow_is_damage() {
    let written = |branch, turn| Manifest {
        version: manifest::VERSION,
        step: 3,
        world_size: 1,
        saved_at: 0,
        writer: None,
        lineage: Some(Lineage { branch, turn, forks: Vec::new() }),
        shards: vec![ShardFile {
            rank: Rank(0),
            file: "rank-0".into(),
            bytes: 1,
            crc: "0".into(),
            purpose: Purpose::Recovery,
            objects: std::collections::BTreeSet::new(),
        }],
    };
    let read = |branch, turn| Manifest::from_bytes(&written(branch, turn).to_bytes().unwrap());
    assert!(read(3, 3).is_ok() && read(1, 7).is_ok());
    for (branch, turn) in [(1, u64::MAX), (4, 3), (u64::MAX, u64::MAX)] {
        assert!(matches!(read(branch, turn), Err(ManifestError::Damaged(_))), "{branch} in {turn}");
    }
}
