//! Damages the region of a slot, and checks whether it is what was captured.
#![allow(dead_code, reason = "not every test needs all")]

use everstep_checkpoint::arena::{REGION_AT, Slot};
use everstep_checkpoint::memory::Memory;
use everstep_checkpoint::restore::Shard;
use std::sync::Arc;

/// Returns whether a slot is sealed and everything in it is what was captured.
pub fn intact(slot: &Slot) -> bool {
    let slot = Arc::new(Slot::open(slot.path()).unwrap());
    Shard::from_slot(slot).is_ok_and(|(shard, _)| shard.verify(1).is_ok())
}

/// Changes one bit of a slot's region.
pub fn flip(slot: &Slot, at: usize) {
    let mut byte = [0];
    assert!(slot.load(at, &mut byte));
    overwrite(slot, REGION_AT + at, &[byte[0] ^ 4]);
}

/// Writes into a slot, whatever its state.
pub fn overwrite(slot: &Slot, at: usize, bytes: &[u8]) {
    // SAFETY: a test calls it while nobody reads the slot in place.
    unsafe { slot.memory() }.store(at, &[bytes]).unwrap();
}

/// Returns the first `bytes` of a region.
pub fn region(slot: &Slot, bytes: usize) -> Vec<u8> {
    let mut region = vec![0; bytes];
    assert!(slot.load(0, &mut region));
    region
}
