//! Tests of the slot protocol between threads, on memory of this process. Miri runs them, and finds races that a run on a
//! processor does not reveal.
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

/// Returns the descriptions and the memory of two tensors, which share `bytes`. Every byte is the number of the step.
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

/// Checks that a reader that pins the slot sees one whole step, no matter how many times the writer returns.
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
                let (label, index) = slot.inspect().unwrap();
                // SAFETY: the slot is sealed and pinned.
                let region = unsafe { slot.region(0, BYTES) }.unwrap();
                assert!(region.iter().all(|byte| u64::from(*byte) == label.step), "two steps in one");
                assert_eq!(index.crcs(), [crc(region)]);
                slot.release(Pin::Persist);
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
fn whoever_has_pinned_a_slot_reads_one_step() {
    let slot = slot();
    read_while(&slot, |step| {
        let bytes = vec![u8::try_from(step).unwrap(); BYTES];
        let (tensors, sources) = state(&bytes);
        let (persist, threads, background, compare) = (false, 2, false, false);
        let plan = Plan { tensors, sources, label: label(step), persist, threads, background, compare };
        // SAFETY: `bytes` lives until the capture, which is not in the background, is complete.
        match unsafe { start(Arc::clone(&slot), plan, None) } {
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::ResourceBusy),
            Ok(done) => assert!(done.is_done()),
        }
    });
}

#[test]
fn whoever_has_pinned_a_slot_reads_one_step_of_an_early_copy() {
    let slot = slot();
    read_while(&slot, |step| {
        let bytes = vec![u8::try_from(step).unwrap(); BYTES];
        let (tensors, sources) = state(&bytes);
        // SAFETY: `bytes` lives, and is not changed, until `finish` has returned.
        match unsafe { Early::begin(Arc::clone(&slot), (tensors, &InOrder::of(&sources)), label(step), false) } {
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::ResourceBusy),
            Ok(early) => early.finish(Vec::new(), None).unwrap(),
        }
    });
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
        // SAFETY: this is not safe. It is the planted mistake.
        unsafe { slot.memory().copy_from(REGION_AT, bytes.as_ptr(), BYTES) }.unwrap();
        slot.describe(label(step), index.as_bytes(), BYTES as u64).unwrap();
        slot.finish(None);
    });
}
