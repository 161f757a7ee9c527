//! The state word of a slot: FREE → WRITING → SEALED, and the pins of those who need a sealed slot.
//!
//! State and pins share a word, so that nobody can begin to write what somebody else has just pinned. A reader that pins
//! a sealed slot sees everything that was written before the seal. A writer that begins to write sees that every earlier reader
//! with a pin has finished.

use std::sync::atomic::{AtomicU64, Ordering};

const WRITING: u64 = 1;
const SEALED: u64 = 2;
const STATE_MASK: u64 = 0xff;

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Holds nothing.
    Free,
    /// Being written; holds nothing that can be read.
    Writing,
    /// Complete.
    Sealed,
}

/// Who still needs a sealed slot; such a slot is not written again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// It goes to durable storage.
    Persist = 1 << 8,
    /// It goes to other nodes, or is the version that all nodes hold.
    Replicate = 1 << 9,
}

/// The atomic operations that the protocol uses. As a trait, so that a model checker can take the place of the processor.
pub trait Word {
    /// As [`AtomicU64::load`].
    fn load(&self, order: Ordering) -> u64;
    /// As [`AtomicU64::store`].
    fn store(&self, value: u64, order: Ordering);
    /// As [`AtomicU64::fetch_and`].
    fn fetch_and(&self, value: u64, order: Ordering);
    /// As [`AtomicU64::fetch_update`]; returns true if the word was changed.
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

    /// Returns whether somebody still needs the slot.
    #[must_use]
    pub fn pinned(&self) -> bool {
        self.0.load(Ordering::Acquire) & !STATE_MASK != 0
    }

    /// Returns whether the slot has this pin.
    #[must_use]
    pub fn pinned_for(&self, pin: Pin) -> bool {
        self.0.load(Ordering::Acquire) & pin as u64 != 0
    }

    /// Pins a sealed slot; false when it is not sealed (any more).
    #[must_use]
    pub fn pin(&self, pin: Pin) -> bool {
        let sealed = |w: u64| (w & STATE_MASK == SEALED).then_some(w | pin as u64);
        self.0.update(Ordering::AcqRel, Ordering::Acquire, sealed)
    }

    /// Removes a pin. Its holder must have finished reading.
    pub fn release(&self, pin: Pin) {
        self.0.fetch_and(!(pin as u64), Ordering::AcqRel);
    }

    /// Begins to write. Returns false if the slot is pinned.
    #[must_use]
    pub fn begin(&self) -> bool {
        let free = |w: u64| (w & !STATE_MASK == 0).then_some(WRITING);
        self.0.update(Ordering::AcqRel, Ordering::Acquire, free)
    }

    /// Begins to write memory that has never been a slot.
    pub fn begin_new(&self) {
        self.0.store(WRITING, Ordering::Release);
    }

    /// Seals what has been written and, if `pin` is given, pins it in the same store.
    pub fn seal(&self, pin: Option<Pin>) {
        self.0.store(SEALED | pin.map_or(0, |p| p as u64), Ordering::Release);
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

    /// A state word and the memory that it guards. Loom fails a test that accesses this memory while it is being written.
    struct Modelling {
        word: Modelled,
        region: UnsafeCell<u64>,
    }

    // SAFETY: the state word decides who may use the region; loom fails the test if that is not enough.
    unsafe impl Sync for Modelling {}
    // SAFETY: as above.
    unsafe impl Send for Modelling {}

    impl Modelling {
        fn state(&self) -> StateWord<'_, Modelled> {
            StateWord(&self.word)
        }

        fn write(&self, value: u64) {
            // SAFETY: loom checks that nobody else accesses the region.
            self.region.with_mut(|region| unsafe { *region = value });
        }

        fn read(&self) -> u64 {
            // SAFETY: loom checks that nobody writes to the region.
            self.region.with(|region| unsafe { *region })
        }
    }

    /// Checks every interleaving of a worker that captures steps 1 and 2 into the same slot, an agent that persists it, and an
    /// agent that replicates it. `begin`, `seal` and `release` are those of the protocol or planted mistakes.
    fn all_interleavings(
        begin: fn(&Modelling) -> bool,
        seal: fn(&Modelling),
        release: fn(&Modelling, Pin, &mut dyn FnMut()),
    ) {
        loom::model(move || {
            let slot = Arc::new(Modelling { word: Modelled::new(0), region: UnsafeCell::new(0) });
            let readers = [Pin::Persist, Pin::Replicate].map(|pin| {
                let slot = Arc::clone(&slot);
                thread::spawn(move || {
                    if slot.state().pin(pin) {
                        release(&slot, pin, &mut || assert!([1, 2].contains(&slot.read())));
                    }
                })
            });
            for step in [1, 2] {
                if begin(&slot) {
                    slot.write(step);
                    seal(&slot);
                }
            }
            for reader in readers {
                assert!(reader.join().is_ok());
            }
        });
    }

    fn begins(slot: &Modelling) -> bool {
        slot.state().begin()
    }

    fn seals(slot: &Modelling) {
        slot.state().seal(None);
    }

    fn reads_then_releases(slot: &Modelling, pin: Pin, read: &mut dyn FnMut()) {
        read();
        slot.state().release(pin);
    }

    #[test]
    fn nobody_writes_what_somebody_reads() {
        all_interleavings(begins, seals, reads_then_releases);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn a_seal_that_others_may_see_before_the_bytes_is_found() {
        all_interleavings(begins, |slot| slot.word.store(SEALED, Ordering::Relaxed), reads_then_releases);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn a_writer_that_looks_at_the_pins_and_then_begins_is_found() {
        let begin = |slot: &Modelling| {
            let free = !slot.state().pinned();
            if free {
                slot.state().begin_new();
            }
            free
        };
        all_interleavings(begin, seals, reads_then_releases);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn a_reader_that_lets_go_before_it_has_read_is_found() {
        let release = |slot: &Modelling, pin, read: &mut dyn FnMut()| {
            slot.state().release(pin);
            read();
        };
        all_interleavings(begins, seals, release);
    }
}
