//! The state word of a slot: FREE → WRITING → SEALED, the pins of a sealed slot that is still
//! needed, and the number of readers that read it in place.
//!
//! A pin means that a slot is still wanted. Several threads may rely on the same pin, and the one
//! that decides that the slot is no longer wanted releases it, even during a read. The count is the
//! number of active readers: each reader adds one and removes its own one only.
//!
//! State, pins and count share a word, so that no thread can begin to write a slot that another has
//! just pinned or begun to read. A reader sees everything that was written before the seal. A
//! writer that begins to write sees that every earlier reader has finished.
//!
//! ```text
//!  bits  0..8    8        9          15      16..32
//!        state   persist  replicate  repair  number of readers
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

const WRITING: u64 = 1;
const SEALED: u64 = 2;
const STATE_MASK: u64 = 0xff;
const PINS: u64 = Pin::Persist as u64 | Pin::Replicate as u64;
/// Damaged bytes of the sealed slot are being replaced.
const REPAIR: u64 = 1 << 15;
const READER: u64 = 1 << 16;
const READERS: u64 = 0xffff * READER;

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Empty.
    Free,
    /// Being written; has no contents that can be read.
    Writing,
    /// Complete, with contents that can be read.
    Sealed,
}

/// A reason to keep a sealed slot; a pinned slot is not written before the pin is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// The step is written to durable storage.
    Persist = 1 << 8,
    /// The step is sent to other nodes, or is the version that all nodes have.
    Replicate = 1 << 9,
}

/// The atomic operations that the protocol uses. They are a trait, so that a model checker can
/// replace the processor.
pub trait Word {
    /// Loads the word; see [`AtomicU64::load`].
    fn load(&self, order: Ordering) -> u64;
    /// Stores a value; see [`AtomicU64::store`].
    fn store(&self, value: u64, order: Ordering);
    /// Applies a bitwise "and"; see [`AtomicU64::fetch_and`].
    fn fetch_and(&self, value: u64, order: Ordering);
    /// Applies `change`; see [`AtomicU64::fetch_update`]. Returns true if the word was changed.
    fn update(&self, set: Ordering, fetch: Ordering, change: impl Fn(u64) -> Option<u64>) -> bool;
}

macro_rules! word {
    ($atomic:ty) => {
        impl Word for $atomic {
            fn load(&self, order: Ordering) -> u64 {
                <$atomic>::load(self, order)
            }

            fn store(&self, value: u64, order: Ordering) {
                <$atomic>::store(self, value, order);
            }

            fn fetch_and(&self, value: u64, order: Ordering) {
                <$atomic>::fetch_and(self, value, order);
            }

            fn update(&self, set: Ordering, fetch: Ordering, change: impl Fn(u64) -> Option<u64>) -> bool {
                self.fetch_update(set, fetch, change).is_ok()
            }
        }
    };
}

word!(AtomicU64);

/// A slot's state word.
#[derive(Debug)]
pub struct StateWord<'a, W>(pub &'a W);

impl<W: Word> StateWord<'_, W> {
    /// Returns the state of the slot.
    #[must_use]
    pub fn state(&self) -> State {
        match self.0.load(Ordering::Acquire) & STATE_MASK {
            WRITING => State::Writing,
            SEALED => State::Sealed,
            _ => State::Free,
        }
    }

    /// Returns whether the slot has a pin.
    #[must_use]
    pub fn pinned(&self) -> bool {
        self.0.load(Ordering::Acquire) & PINS != 0
    }

    /// Returns whether the slot has this pin.
    #[must_use]
    pub fn pinned_for(&self, pin: Pin) -> bool {
        self.0.load(Ordering::Acquire) & pin as u64 != 0
    }

    /// Returns whether the slot is pinned, read or being repaired, so that [`StateWord::begin`]
    /// would refuse.
    #[must_use]
    pub fn in_use(&self) -> bool {
        self.0.load(Ordering::Acquire) & !STATE_MASK != 0
    }

    /// Pins a sealed slot. Returns false if it is not sealed, or no longer sealed.
    #[must_use]
    pub fn pin(&self, pin: Pin) -> bool {
        let sealed = |w: u64| (w & STATE_MASK == SEALED).then_some(w | pin as u64);
        self.0.update(Ordering::AcqRel, Ordering::Acquire, sealed)
    }

    /// Removes a pin. A slot that is being read is still not overwritten.
    pub fn release(&self, pin: Pin) {
        self.0.fetch_and(!(pin as u64), Ordering::AcqRel);
    }

    /// Counts a reader. Returns false if the slot is not sealed or is being repaired, or if there
    /// are too many readers to count.
    #[must_use]
    pub fn read(&self) -> bool {
        let another = |w: u64| {
            let readable = w & (STATE_MASK | REPAIR) == SEALED && w & READERS != READERS;
            readable.then(|| w + READER)
        };
        self.0.update(Ordering::AcqRel, Ordering::Acquire, another)
    }

    /// Removes a reader that [`StateWord::read`] has counted.
    pub fn end_read(&self) {
        // If the count was cleared, nothing is borrowed from the neighbouring bits.
        let fewer = |w: u64| (w & READERS != 0).then(|| w - READER);
        let _ = self.0.update(Ordering::AcqRel, Ordering::Acquire, fewer);
    }

    /// Begins to repair a sealed slot. Returns false if it is not sealed, is being read, or is
    /// being repaired already.
    #[must_use]
    pub fn repair(&self) -> bool {
        let unread = |w: u64| (w & (STATE_MASK | REPAIR | READERS) == SEALED).then_some(w | REPAIR);
        self.0.update(Ordering::AcqRel, Ordering::Acquire, unread)
    }

    /// Ends a repair.
    pub fn end_repair(&self) {
        self.0.fetch_and(!REPAIR, Ordering::AcqRel);
    }

    /// Returns whether the slot is being repaired.
    #[must_use]
    pub fn under_repair(&self) -> bool {
        self.0.load(Ordering::Acquire) & REPAIR != 0
    }

    /// Forgets readers and repairs of a process that has ended. No other process may be reading or
    /// repairing the slot.
    pub fn forget_readers(&self) {
        self.0.fetch_and(!(READERS | REPAIR), Ordering::AcqRel);
    }

    /// Begins to write. Returns false if the slot is in use ([`StateWord::in_use`]).
    #[must_use]
    pub fn begin(&self) -> bool {
        let free = |w: u64| (w & !STATE_MASK == 0).then_some(WRITING);
        self.0.update(Ordering::AcqRel, Ordering::Acquire, free)
    }

    /// Begins to write memory that has never been a slot.
    pub fn begin_new(&self) {
        self.0.store(WRITING, Ordering::Release);
    }

    /// Seals what has been written and, if `pin` is given, pins it in the same update.
    pub fn seal(&self, pin: Option<Pin>) {
        // An update, because another thread may release a pin at this moment, even one that is not
        // set any more.
        let sealed = |w: u64| Some(w & !STATE_MASK | SEALED | pin.map_or(0, |p| p as u64));
        let _ = self.0.update(Ordering::AcqRel, Ordering::Acquire, sealed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64 as Modelled;
    use loom::thread;

    word!(Modelled);

    /// A state word and the memory that it guards. Loom fails a test that accesses this memory
    /// while it is being written.
    struct Modelling {
        word: Modelled,
        region: UnsafeCell<u64>,
    }

    // SAFETY: the state word decides which threads may use the region; loom fails the test if that
    // is not enough.
    unsafe impl Sync for Modelling {}
    // SAFETY: the state word decides which threads may use the region; loom fails the test if that
    // is not enough.
    unsafe impl Send for Modelling {}

    impl Modelling {
        fn state(&self) -> StateWord<'_, Modelled> {
            StateWord(&self.word)
        }

        fn write(&self, value: u64) {
            // SAFETY: loom checks that no other thread accesses the region.
            self.region.with_mut(|region| unsafe { *region = value });
        }

        fn read(&self) -> u64 {
            // SAFETY: loom checks that no other thread writes to the region.
            self.region.with(|region| unsafe { *region })
        }
    }

    type Read<'a> = &'a mut dyn FnMut();
    type Reader = fn(&Modelling, Read<'_>);
    type Begin = fn(&Modelling) -> bool;
    type Seal = fn(&Modelling);

    /// Checks every interleaving of a worker that captures steps 1 and 2 into the same slot, and
    /// two agent threads that do something else with it. These get a function that reads the
    /// region. Each action is either that of the protocol or a planted mistake.
    fn all_interleavings(begin: Begin, seal: Seal, others: [Reader; 2]) {
        interleavings(None, &[1, 2], begin, seal, others);
    }

    /// Does what [`all_interleavings`] does, with a step that is `sealed` before the other threads
    /// start, and steps that are captured while they run.
    fn interleavings(sealed: Option<u64>, captured: &'static [u64], begin: Begin, seal: Seal, others: [Reader; 2]) {
        loom::model(move || {
            let slot = Arc::new(Modelling { word: Modelled::new(0), region: UnsafeCell::new(0) });
            let capture = |step| {
                if begin(&slot) {
                    slot.write(step);
                    seal(&slot);
                }
            };
            sealed.into_iter().for_each(capture);
            let others = others.map(|other| {
                let slot = Arc::clone(&slot);
                thread::spawn(move || other(&slot, &mut || assert!([1, 2, REPAIRED].contains(&slot.read()))))
            });
            captured.iter().copied().for_each(capture);
            for other in others {
                assert!(other.join().is_ok());
            }
            assert!(!slot.state().in_use());
        });
    }

    /// Value that a repair writes.
    const REPAIRED: u64 = 3;

    fn begins(slot: &Modelling) -> bool {
        slot.state().begin()
    }

    fn seals(slot: &Modelling) {
        slot.state().seal(None);
    }

    /// Relies on a pin that no other thread releases.
    fn persists(slot: &Modelling, read: Read<'_>) {
        if slot.state().pin(Pin::Persist) {
            read();
            slot.state().release(Pin::Persist);
        }
    }

    fn replicates(slot: &Modelling, read: Read<'_>) {
        if slot.state().pin(Pin::Replicate) {
            read();
            slot.state().release(Pin::Replicate);
        }
    }

    /// Reads while it is counted, so that it does not rely on a pin.
    fn replicates_counted(slot: &Modelling, read: Read<'_>) {
        if slot.state().pin(Pin::Replicate) {
            if slot.state().read() {
                read();
                slot.state().end_read();
            }
            slot.state().release(Pin::Replicate);
        }
    }

    /// Decides that the slot is no longer wanted, whether it is being read or not.
    fn moves_the_pin(slot: &Modelling, _: Read<'_>) {
        slot.state().release(Pin::Replicate);
    }

    fn reads_counted(slot: &Modelling, read: Read<'_>) {
        if slot.state().read() {
            read();
            slot.state().end_read();
        }
    }

    fn repairs(slot: &Modelling, _: Read<'_>) {
        if slot.state().repair() {
            slot.write(REPAIRED);
            slot.state().end_repair();
        }
    }

    #[test]
    fn nobody_writes_what_somebody_reads() {
        all_interleavings(begins, seals, [persists, replicates]);
    }

    #[test]
    fn nobody_writes_what_a_counted_reader_reads_after_its_pin_was_moved() {
        all_interleavings(begins, seals, [replicates_counted, moves_the_pin]);
    }

    #[test]
    fn nobody_writes_before_the_last_of_two_counted_readers_has_read() {
        interleavings(Some(1), &[2], begins, seals, [reads_counted, reads_counted]);
    }

    #[test]
    fn nobody_reads_what_is_being_repaired() {
        all_interleavings(begins, seals, [reads_counted, repairs]);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn a_reader_that_relies_on_a_pin_that_is_moved_is_found() {
        all_interleavings(begins, seals, [replicates, moves_the_pin]);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn two_readers_that_share_a_pin_and_are_not_counted_is_found() {
        all_interleavings(begins, seals, [replicates, replicates]);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn a_reader_that_is_counted_without_a_look_at_the_state_is_found() {
        let counts = |slot: &Modelling, read: Read<'_>| {
            if Word::update(&slot.word, Ordering::AcqRel, Ordering::Acquire, |w| Some(w + READER)) {
                read();
                slot.state().end_read();
            }
        };
        all_interleavings(begins, seals, [counts, moves_the_pin]);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn a_repair_that_does_not_wait_for_readers_is_found() {
        let repairs = |slot: &Modelling, _: Read<'_>| {
            if slot.state().pin(Pin::Persist) {
                slot.write(REPAIRED);
                slot.state().release(Pin::Persist);
            }
        };
        all_interleavings(begins, seals, [reads_counted, repairs]);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn a_seal_that_others_may_see_before_the_bytes_is_found() {
        all_interleavings(begins, |slot| slot.word.store(SEALED, Ordering::Relaxed), [persists, replicates]);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn a_writer_that_looks_at_the_pins_and_then_begins_is_found() {
        let begin = |slot: &Modelling| {
            let free = !slot.state().in_use();
            if free {
                slot.state().begin_new();
            }
            free
        };
        all_interleavings(begin, seals, [persists, replicates]);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn a_reader_that_lets_go_before_it_has_read_is_found() {
        let lets_go = |slot: &Modelling, read: Read<'_>| {
            if slot.state().read() {
                slot.state().end_read();
                read();
            }
        };
        all_interleavings(begins, seals, [lets_go, moves_the_pin]);
    }

    #[test]
    fn readers_are_refused_before_their_count_overflows() {
        let word = AtomicU64::new(SEALED | Pin::Persist as u64);
        let state = StateWord(&word);
        for _ in 0..0xffff {
            assert!(state.read());
        }
        assert!(!state.read() && state.state() == State::Sealed && state.pinned_for(Pin::Persist));
        state.end_read();
        assert!(state.read() && !state.read());
        (0..0xffff).for_each(|_| state.end_read());
        assert_eq!(word.load(Ordering::Relaxed), SEALED | Pin::Persist as u64);
        // A count that was cleared in the meantime does not wrap either.
        state.end_read();
        assert_eq!(word.load(Ordering::Relaxed), SEALED | Pin::Persist as u64);
    }
}
