//! Faults of coordinators, their store and their clock.

use crate::world::{Happening, World};
use everstep_core::coordinator::command::Precondition;

impl World {
    pub(super) fn coordinator_crash(&mut self) -> Option<()> {
        let index = self.leader()?;
        self.kill_coordinator(index);
        Some(())
    }

    /// Kills the coordinator just before or just after its next write reaches the store.
    pub(super) fn coordinator_crash_at_persist(&mut self, before: bool) -> Option<()> {
        let index = self.leader()?;
        self.processes[index].crash_at_persist = Some(before);
        // The fault strikes at a write, so something must be written.
        let host = self.running()?;
        self.worker_dies(host, 0);
        Some(())
    }

    pub(super) fn two_coordinators(&mut self) -> Option<()> {
        self.start_coordinator(true);
        // Half of the agents find the new one.
        let sessions: Vec<_> = self.hosts.iter().filter_map(|h| h.session).collect();
        for session in sessions {
            if self.rng.percent(50) {
                self.agent_sees_end(session);
            }
        }
        Some(())
    }

    pub(super) fn store_conflict(&mut self) -> Option<()> {
        let (key, (value, version)) = self.store.entries.iter().find(|(k, _)| k.starts_with("job/"))?;
        let (key, value, version) = (key.clone(), value.clone(), *version);
        self.store.put(self.now, &key, value, Precondition::Version(version)).ok()?;
        let host = self.running()?;
        self.worker_dies(host, 0);
        Some(())
    }

    pub(super) fn store_unavailable(&mut self, until: u64) -> Option<()> {
        self.store.unavailable_until = until;
        if let Some(host) = self.running() {
            self.worker_dies(host, 0);
        }
        Some(())
    }

    pub(super) fn clock_jump(&mut self) -> Option<()> {
        let index = self.leader()?;
        let jump = i64::try_from(self.rng.range(0, 7_200_000)).ok()? - 3_600_000;
        self.processes[index].clock_offset += jump;
        // Wakes the core at the new time, as the next event would at the latest.
        self.processes[index].wake_at = Some(self.now + 1);
        self.at(1, Happening::CoordinatorTick { index });
        Some(())
    }

    fn leader(&mut self) -> Option<usize> {
        (0..self.processes.len()).rev().find(|i| self.processes[*i].alive)
    }
}
