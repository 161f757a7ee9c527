//! Faults of workers.

use crate::world::World;

impl World {
    pub(super) fn worker_crash(&mut self) -> Option<()> {
        let host = self.running()?;
        let local = u32::from(self.rng.percent(50));
        self.worker_dies(host, local);
        Some(())
    }

    /// Kills a worker, and kills it again after each of its next two starts.
    pub(super) fn crash_loop(&mut self) -> Option<()> {
        let host = self.running()?;
        self.hosts[host].faults.crash_loop = 2;
        self.worker_dies(host, 0);
        Some(())
    }

    /// Makes one worker exit with an error, or two, usually on different machines.
    pub(super) fn worker_errors(&mut self, two: bool) -> Option<()> {
        let host = self.running()?;
        self.worker_errs_soon(host, 1);
        if two {
            let other = self.running()?;
            self.worker_errs_soon(other, 300);
        }
        Some(())
    }

    /// Makes a worker exit with an error, and another one while the job recovers.
    pub(super) fn recovery_fails(&mut self) -> Option<()> {
        let host = self.running()?;
        self.worker_errs_soon(host, 1);
        let other = self.running()?;
        self.worker_errs_soon(other, 8000);
        Some(())
    }

    pub(super) fn worker_hang(&mut self) -> Option<()> {
        let host = self.running()?;
        let h = &mut self.hosts[host];
        let crew = h.crews.last_mut()?;
        crew.hung.push(1);
        self.oracle.blames.cause(crew.generation, &h.node);
        Some(())
    }
}
