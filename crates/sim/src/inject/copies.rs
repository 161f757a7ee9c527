//! Faults of slots, copies and parity.

use crate::oracle::Kept;
use crate::world::{Happening, World};

impl World {
    /// A machine forgets everything that it keeps for others.
    pub(super) fn replicas_lost(&mut self) -> Option<()> {
        let host = self.any_host(|h| !h.replicas.is_empty() || !h.parity.is_empty())?;
        self.hosts[host].replicas.clear();
        self.hosts[host].parity.clear();
        self.oracle.gone(host, Kept::for_others);
        Some(())
    }

    /// A machine forgets the newest of what it keeps for others.
    pub(super) fn replicas_stale(&mut self) -> Option<()> {
        let host = self.any_host(|h| !h.replicas.is_empty() || !h.parity.is_empty())?;
        let h = &mut self.hosts[host];
        let copies = h.replicas.iter().map(|m| (m.of.generation, m.of.step));
        let newest = copies.chain(h.parity.iter().map(|p| (p.of.generation, p.of.step))).max()?;
        h.replicas.retain(|m| (m.of.generation, m.of.step) < newest);
        h.parity.retain(|p| (p.of.generation, p.of.step) < newest);
        self.oracle.gone(host, Kept::for_others);
        Some(())
    }

    /// The next copies arrive in part.
    pub(super) fn replicas_partial(&mut self) -> Option<()> {
        let host = self.running()?;
        if self.rng.percent(50) {
            self.hosts[host].cut_next = 1;
            self.worker_dies_soon(host);
        } else {
            // Two steps in a row; then the machine is lost, so that what those before them have left counts.
            (self.hosts[host].cut_next, self.hosts[host].doomed) = (2, true);
        }
        Some(())
    }

    /// What a slot holds changes by itself.
    pub(super) fn slot_rots(&mut self) -> Option<()> {
        let host = self.any_host(|h| h.all().next().is_some())?;
        let shards = self.hosts[host].all().count();
        let slots = (shards + self.hosts[host].parity.len()) as u64;
        let which = usize::try_from(self.rng.range(0, slots)).unwrap_or(0);
        let h = &mut self.hosts[host];
        if which < shards {
            let slot = h.memory.values_mut().flatten().chain(&mut h.replicas).nth(which)?;
            slot.rotten = true;
            let of = slot.of;
            self.oracle.gone(host, |kept| kept.shard() == Some(of));
        } else {
            let slot = h.parity.get_mut(which - shards)?;
            slot.rotten = true;
            let of = slot.of.clone();
            self.oracle.gone(host, |kept| kept.parity() == Some(&of));
        }
        self.worker_dies_soon(host);
        Some(())
    }

    /// Something must be restored for the fault to show, after a while.
    fn worker_dies_soon(&mut self, host: usize) {
        let delay = self.rng.range(500, 5000);
        self.at(delay, Happening::WorkerDies { host });
    }
}
