//! The slots that this node has pinned for the current round of replication. Nodes that compute
//! parity of its shards wait for them.

use super::protocol::{SILENCE, Want};
use crate::arena::Slot;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

#[derive(Debug, Default)]
struct Round {
    generation: u64,
    number: u64,
    /// Pinned slots of all local ranks; none if this node does not have the step.
    slots: Vec<Arc<Slot>>,
}

/// The pinned slots of the current round, which other threads wait for.
#[derive(Debug, Default)]
pub struct RoundSlots {
    round: Mutex<Round>,
    changed: Condvar,
}

impl RoundSlots {
    /// Records that this node has pinned these slots for a round; none if it does not have that
    /// step.
    pub fn set(&self, generation: u64, number: u64, slots: Vec<Arc<Slot>>) {
        if let Ok(mut round) = self.round.lock() {
            *round = Round { generation, number, slots };
        }
        self.changed.notify_all();
    }

    /// Waits until the round has begun here, and returns the wanted slot. `None` at once if the
    /// round has another step or is over, and `None` if it does not begin in time.
    #[must_use]
    pub fn await_slot(&self, want: Want, number: u64) -> Option<Arc<Slot>> {
        let until = Instant::now() + SILENCE / 2;
        let mut round = self.round.lock().ok()?;
        // A round counts within its generation.
        while (round.generation, round.number) < (want.generation, number) {
            let left = until.checked_duration_since(Instant::now())?;
            round = self.changed.wait_timeout(round, left).ok()?.0;
        }
        if (round.generation, round.number) != (want.generation, number) {
            return None;
        }
        round.slots.iter().find(|s| s.label().is_some_and(|l| want.is(&l))).cloned()
    }
}
