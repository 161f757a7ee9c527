//! Error messages of workers, and machines that go bad.

use crate::host::Shows;
use crate::world::{Happening, World};
use everstep_core::agent::event::Event as AgentEvent;
use everstep_core::id::Generation;
use everstep_core::severity::Table;

/// The message of a worker whose peer is gone.
pub const CASCADE: &str = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:41234";
/// A driver's report of a corrected error.
pub const ECC: &str = "NVRM: Xid (PCI:0000:17:00): 92, pid='<unknown>', name=<unknown>, High single-bit ECC error rate";
/// A link that is down for a moment.
pub const LINK: &str = "mlx5_core 0000:3b:00.0 eth2: Link down";

/// The message of a worker that does not start fresh beside checkpoints.
pub const NO_COMMON_STEP: &str = "everstep.CheckpointError: no checkpoint in out can be restored on every rank";

/// Messages of workers that fail on their own.
const ERRORS: &[&str] = &[
    "ValueError: Expected input batch_size (32) to match target batch_size (31).",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "OSError: [Errno 28] No space left on device: 'out/step-40'",
    "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.",
];
/// The message of a worker whose GPU is gone.
const GPU_ERROR: &str = "RuntimeError: CUDA error: uncorrectable ECC error encountered";
/// The kernel's message about it.
const GPU_LINE: &str = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=python, GPU has fallen off the bus.";

impl World {
    /// Makes a worker exit with a random error of its own within `within` milliseconds.
    pub(crate) fn worker_errs_soon(&mut self, host: usize, within: u64) {
        let text = self.rng.pick(ERRORS).copied().unwrap_or(CASCADE);
        let local_rank = u32::from(self.rng.percent(50));
        let delay = self.rng.range(1, within + 1);
        self.at(delay, Happening::WorkerErrs { host, local_rank, text });
    }

    /// Breaks a GPU if the job can do without its machine. Half of the broken GPUs are repaired
    /// after a while.
    pub(crate) fn gpu_fails(&mut self) -> Option<()> {
        let well =
            self.hosts.iter().filter(|h| h.agent.is_some() && h.session.is_some() && h.faults.gpu.is_none()).count();
        if well <= self.spec.nodes_min as usize + 1 {
            return None;
        }
        let host = self.any_host(|h| {
            h.up && !h.frozen
                && h.faults.gpu.is_none()
                && h.agent.is_some()
                && h.crews.iter().any(crate::host::Crew::alive)
        })?;
        let shows = [Shows::Said, Shows::Hang, Shows::SilentThenSign, Shows::Never];
        let h = &mut self.hosts[host];
        h.faults.gpu = self.rng.pick(&shows).copied();
        self.oracle.ailed.insert(h.node.clone());
        let generation = h.crews.last()?.generation;
        self.at(1, Happening::Ails { host, generation });
        if self.rng.percent(50) {
            let delay = self.rng.range(60_000, 300_000);
            self.at(delay, Happening::Mended { host });
        }
        Some(())
    }

    /// Makes the broken GPU show in the workers of `generation`.
    pub(crate) fn ails(&mut self, host: usize, generation: Generation) {
        let Some(shows) = self.hosts[host].faults.gpu else { return };
        let Some(crew) = self.hosts[host].crews.last_mut().filter(|c| c.generation == generation) else { return };
        match shows {
            Shows::Said => self.worker_errs(host, 0, GPU_ERROR),
            Shows::Hang => {
                if crew.training {
                    crew.stuck = true;
                    let node = self.hosts[host].node.clone();
                    self.oracle.blames.cause(generation, &node);
                    self.signs(host, GPU_LINE, 1);
                } else {
                    // The workers are not in a collective yet: the GPU fails when it is first used.
                    self.worker_errs(host, 0, GPU_ERROR);
                }
            }
            Shows::Never => self.worker_errs(host, 0, CASCADE),
            Shows::SilentThenSign => {
                self.worker_dies(host, 0);
                let delay = self.rng.range(1, 900);
                self.at(delay, Happening::Signs { host, line: GPU_LINE, times: 1 });
            }
        }
    }

    /// Repairs the machine and restarts its agent.
    pub(crate) fn mended(&mut self, host: usize) {
        if self.hosts[host].faults.gpu.take().is_some() && self.hosts[host].agent.is_some() {
            self.crash_agent(host);
            let delay = self.rng.range(2000, 20_000);
            self.at(delay, Happening::StartAgent { host });
        }
    }

    /// Emits a kernel message `times` times, up to 0.4 s apart.
    pub(crate) fn signs(&mut self, host: usize, line: &'static str, times: u32) {
        if self.hosts[host].agent.is_none() || self.hosts[host].frozen {
            return;
        }
        if let Some(sign) = Table::built_in().sign(line) {
            self.agent(host, AgentEvent::Signed(sign));
        }
        if times > 1 {
            let delay = self.rng.range(10, 400);
            self.at(delay, Happening::Signs { host, line, times: times - 1 });
        }
    }
}
