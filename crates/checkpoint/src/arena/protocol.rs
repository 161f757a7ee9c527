//! Tests of the slot protocol between threads, on memory of this process. Miri runs them, and finds
//! races that a run on a processor does not reveal.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::capture::{Described, Early, InOrder, Plan, Source, start};
use crate::format::index::Tensor;
use crate::memory::Heap;
use std::sync::Arc;

const BYTES: usize = 3000;

fn slot() -> Arc<Slot<Heap>> {
    Arc::new(Slot { memory: Heap::new(3 * REGION_AT), path: PathBuf::new() })
}

fn label(step: u64) -> Label {
    Label { run: 1, rank: 0, world_size: 1, generation: 1, step, purpose: Purpose::Recovery, shared: true }
}

/// Returns the descriptions and the memory of two tensors, which share `bytes`. Every byte is the
/// number of the step.
fn state(bytes: &[u8]) -> (Described, Vec<Source>) {
    let tensor = |name: &str, bytes: usize| Tensor {
        name: name.into(),
        dtype: "U8".into(),
        shape: vec![bytes as u64],
        bytes: bytes as u64,
    };
    let (a, b) = bytes.split_at(BYTES / 3);
    let source = |part: &[u8], eager| Source { address: part.as_ptr().expose_provenance(), bytes: part.len(), eager };
    let tensors = Described::of(&[tensor("a", a.len()), tensor("b", b.len())]).unwrap();
    (tensors, vec![source(a, false), source(b, true)])
}

/// Checks that a counted reader sees one whole step, no matter how often the writer tries again and
/// who releases the pin.
fn read_while(slot: &Arc<Slot<Heap>>, write: impl Fn(u64)) {
    let reader = std::thread::spawn({
        let slot = Arc::clone(slot);
        move || {
            let mut seen = 0;
            while seen < 2 {
                if !slot.pin(Pin::Persist) {
                    std::thread::yield_now();
                    continue;
                }
                let reader = slot.read().unwrap();
                slot.release(Pin::Persist);
                let (label, index) = slot.inspect().unwrap();
                let region = reader.region(0, BYTES).unwrap();
                assert!(region.iter().all(|byte| u64::from(*byte) == label.step), "two steps in one");
                assert_eq!(index.crcs(), [crc(region)]);
                seen += 1;
            }
        }
    });
    let mut step = 0;
    while !reader.is_finished() {
        step += 1;
        write(step % 200);
        std::thread::yield_now();
    }
    reader.join().unwrap();
}

#[test]
fn whoever_is_counted_reads_one_step_even_after_the_pin_was_released() {
    let slot = slot();
    read_while(&slot, |step| {
        if let Err(e) = capture(&slot, step) {
            assert_eq!(e.kind(), io::ErrorKind::ResourceBusy);
        }
    });
}

#[test]
fn whoever_is_counted_reads_one_step_of_an_early_copy() {
    let slot = slot();
    read_while(&slot, |step| {
        let bytes = vec![u8::try_from(step).unwrap(); BYTES];
        let (tensors, sources) = state(&bytes);
        // SAFETY: `bytes` lives, and is not changed, until `finish` has returned. No other thread
        // writes the slot.
        match unsafe { Early::begin(Arc::clone(&slot), tensors, &InOrder::of(&sources), label(step), false) } {
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::ResourceBusy),
            Ok(early) => early.finish(Vec::new(), None).unwrap(),
        }
    });
}

/// Begins to write a slot.
fn begin(slot: &Arc<Slot<Heap>>) -> Option<Writing<Heap>> {
    // SAFETY: one thread of each test writes the slot, and never twice at a time.
    unsafe { slot.begin() }
}

/// Fills and seals a slot with `step`.
fn capture(slot: &Arc<Slot<Heap>>, step: u64) -> io::Result<()> {
    let bytes = vec![u8::try_from(step).unwrap(); BYTES];
    let (tensors, sources) = state(&bytes);
    let (persist, threads, background, compare) = (false, 2, false, false);
    let plan = Plan { tensors, sources, label: label(step), persist, threads, background, compare };
    // SAFETY: `bytes` lives until the capture, which is not in the background, is complete. No
    // other thread writes the slot.
    unsafe { start(Arc::clone(slot), plan, None) }.map(|done| assert!(done.is_done()))
}

#[test]
fn a_slot_is_not_written_while_it_is_read_in_place() {
    let slot = slot();
    assert!(slot.read().is_none(), "an empty slot is not read");
    capture(&slot, 1).unwrap();
    assert!(slot.pin(Pin::Replicate));
    let readers = [slot.read().unwrap(), slot.read().unwrap()];
    slot.release(Pin::Replicate);
    for reader in readers {
        assert!(slot.in_use() && !slot.pinned() && begin(&slot).is_none() && slot.repair().is_none());
        assert_eq!(capture(&slot, 2).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        assert_eq!(reader.region(0, BYTES), Some(&[1; BYTES][..]));
    }
    assert!(!slot.in_use());
    capture(&slot, 2).unwrap();
    assert_eq!(slot.read().unwrap().region(0, BYTES), Some(&[2; BYTES][..]));
}

#[test]
fn a_slot_under_repair_is_neither_read_in_place_nor_written_by_others() {
    let slot = slot();
    capture(&slot, 1).unwrap();
    let repair = slot.repair().unwrap();
    assert!(slot.under_repair() && slot.read().is_none() && slot.repair().is_none() && begin(&slot).is_none());
    repair.store(5, &[9]).unwrap();
    drop(repair);
    assert_eq!(slot.read().unwrap().region(5, 2), Some(&[9, 1][..]));
    assert!(begin(&slot).unwrap().store(5, &[1]).is_ok());
}

#[test]
fn what_a_dead_agent_was_doing_is_forgotten() {
    let slot = slot();
    // SAFETY: the test is the only user of the slot, and has neither a reader nor a repair.
    unsafe { slot.forget_readers() };
    assert_eq!(slot.state(), State::Free);
    capture(&slot, 1).unwrap();
    assert!(slot.pin(Pin::Persist));
    // Like the count of a process that was killed; the slot itself stays.
    assert!(slot.state_word().read() && slot.state_word().read());
    // SAFETY: the readers that are counted do not exist.
    unsafe { slot.forget_readers() };
    assert!(slot.pinned_for(Pin::Persist) && slot.state() == State::Sealed, "pins and contents stay");
    slot.release(Pin::Persist);
    assert!(slot.state_word().repair());
    assert!(begin(&slot).is_none());
    // SAFETY: the repair does not exist.
    unsafe { slot.forget_readers() };
    assert!(begin(&slot).is_some());
}

/// The control arm of figure house-miri: Miri must find its race.
#[test]
#[ignore = "has a race"]
fn planted_writer_that_does_not_look_at_the_pins() {
    let slot = slot();
    read_while(&slot, |step| {
        let bytes = vec![u8::try_from(step).unwrap(); BYTES];
        let (tensor, sum) = (format!(r#"{{"name":"a","dtype":"U8","shape":[{BYTES}],"bytes":{BYTES}}}"#), crc(&bytes));
        let index = format!(r#"{{"tensors":[{tensor}],"crcs":[{sum}]}}"#);
        slot.set(0, MAGIC);
        slot.state_word().begin_new();
        // SAFETY: this thread alone has begun to write the slot, and no other thread writes it.
        let slot = unsafe { slot.resume() }.unwrap();
        // SAFETY: this is not safe. It is the planted mistake.
        unsafe { slot.copy_from(0, bytes.as_ptr(), BYTES) }.unwrap();
        slot.describe(label(step), index.as_bytes(), BYTES as u64).unwrap();
        slot.seal(None);
    });
}
