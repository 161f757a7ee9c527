//! Faults of slots, copies and parity.

use crate::oracle::Kept;
use crate::world::{Happening, World};

impl World {
    /// Discards everything that a machine keeps for others.
    pub(super) fn replicas_lost(&mut self) -> Option<()> {
        let host = self.any_host(|h| !h.copies.replicas.is_empty() || !h.copies.parity.is_empty())?;
        self.hosts[host].copies.replicas.clear();
        self.hosts[host].copies.parity.clear();
        self.oracle.gone(host, Kept::for_others);
        Some(())
    }

    /// Discards the newest of what a machine keeps for others.
    pub(super) fn replicas_stale(&mut self) -> Option<()> {
        let host = self.any_host(|h| !h.copies.replicas.is_empty() || !h.copies.parity.is_empty())?;
        let h = &mut self.hosts[host];
        let copies = h.copies.replicas.iter().map(|m| (m.of.generation, m.of.step));
        let newest = copies.chain(h.copies.parity.iter().map(|p| (p.of.generation, p.of.step))).max()?;
        h.copies.replicas.retain(|m| (m.of.generation, m.of.step) < newest);
        h.copies.parity.retain(|p| (p.of.generation, p.of.step) < newest);
        self.oracle.gone(host, Kept::for_others);
        Some(())
    }

    /// Makes the next copies arrive incomplete.
    pub(super) fn replicas_partial(&mut self) -> Option<()> {
        let host = self.running()?;
        if self.rng.percent(50) {
            self.hosts[host].faults.cut_next = 1;
            self.worker_dies_soon(host);
        } else {
            // Two consecutive steps; then the machine is lost, so that recovery depends on what
            // remains of earlier steps.
            (self.hosts[host].faults.cut_next, self.hosts[host].faults.doomed) = (2, true);
        }
        Some(())
    }

    /// Corrupts the contents of a slot.
    pub(super) fn slot_rots(&mut self) -> Option<()> {
        let host = self.any_host(|h| h.all().next().is_some())?;
        let shards = self.hosts[host].all().count();
        let slots = (shards + self.hosts[host].copies.parity.len()) as u64;
        let which = usize::try_from(self.rng.range(0, slots)).unwrap_or(0);
        let h = &mut self.hosts[host];
        if which < shards {
            let slot = h.memory.values_mut().flatten().chain(&mut h.copies.replicas).nth(which)?;
            slot.rotten = true;
            let of = slot.of;
            self.oracle.gone(host, |kept| kept.shard() == Some(of));
        } else {
            let slot = h.copies.parity.get_mut(which - shards)?;
            slot.rotten = true;
            let of = slot.of.clone();
            self.oracle.gone(host, |kept| kept.parity() == Some(&of));
        }
        self.worker_dies_soon(host);
        Some(())
    }

    /// Kills a worker after a while: the fault shows only when something is restored.
    fn worker_dies_soon(&mut self, host: usize) {
        let delay = self.rng.range(500, 5000);
        self.at(delay, Happening::WorkerDies { host });
    }
}
