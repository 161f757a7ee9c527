//! Carries out one fault: chooses a target and makes it fail.

mod control_plane;
mod copies;
mod links;
mod machines;
mod workers;

use crate::fault::Fault;
use crate::host::Host;
use crate::world::World;

impl World {
    /// Injects `fault` into a suitable target, or another kind of fault if there is none. Counts
    /// the kind that took effect.
    pub(crate) fn inject(&mut self, fault: Fault) {
        let mut next = fault;
        for _ in 0..8 {
            if self.try_inject(next).is_some() {
                *self.counts.entry(next).or_default() += 1;
                return;
            }
            next = *self.rng.pick(Fault::ALL).unwrap_or(&fault);
        }
    }

    pub(crate) fn any_host(&mut self, suits: impl Fn(&Host) -> bool) -> Option<usize> {
        let suitable: Vec<usize> = (0..self.hosts.len()).filter(|i| suits(&self.hosts[*i])).collect();
        self.rng.pick(&suitable).copied()
    }

    pub(crate) fn running(&mut self) -> Option<usize> {
        self.any_host(|h| h.up && !h.frozen && h.agent.is_some() && h.crews.iter().any(crate::host::Crew::alive))
    }

    pub(crate) fn attached(&mut self) -> Option<usize> {
        self.any_host(|h| h.up && !h.frozen && h.agent.is_some() && h.session.is_some())
    }

    fn try_inject(&mut self, fault: Fault) -> Option<()> {
        // Everything heals before the quiet time begins.
        let span = self.rng.range(200, 15_000);
        let until = (self.now + span).min(self.quiet_at);
        match fault {
            Fault::WorkerCrash => self.worker_crash(),
            Fault::CrashLoop => self.crash_loop(),
            Fault::WorkerErrs => self.worker_errors(false),
            Fault::TwoWorkersErr => self.worker_errors(true),
            Fault::RecoveryFails => self.recovery_fails(),
            Fault::WorkerHang => self.worker_hang(),
            Fault::GpuFails => self.gpu_fails(),
            Fault::EccStorm => self.notes(crate::ailing::ECC, 200),
            Fault::LinkFlaps => self.notes(crate::ailing::LINK, 12),
            Fault::ListingStale => self.listing_stale(),
            Fault::AgentCrash => self.agent_crash(),
            Fault::NodeCrash => self.node_crash(),
            Fault::TwoNodesCrash => self.two_nodes_crash(),
            Fault::NodeGone => self.node_gone(),
            Fault::NodeReplaced => self.node_replaced(),
            Fault::OldIncarnationReturns => self.old_incarnation_returns(),
            Fault::DuplicateNodeId => self.duplicate_node_id(),
            Fault::SlowNode => self.slow_node(until),
            Fault::ReplicasLost => self.replicas_lost(),
            Fault::ReplicasStale => self.replicas_stale(),
            Fault::ReplicasPartial => self.replicas_partial(),
            Fault::SlotRots => self.slot_rots(),
            Fault::Drop => self.drop_message(),
            Fault::Delay => self.delay_messages(until),
            Fault::Duplicate => self.duplicate_message(),
            Fault::Reorder => self.reorder_messages(),
            Fault::Reset => self.reset_connection(),
            Fault::PartitionToCoordinator => self.partition(until, true, false),
            Fault::PartitionFromCoordinator => self.partition(until, false, true),
            Fault::PartitionFull => self.partition(until, true, true),
            Fault::CoordinatorCrash => self.coordinator_crash(),
            Fault::CoordinatorCrashBeforePersist => self.coordinator_crash_at_persist(true),
            Fault::CoordinatorCrashAfterPersist => self.coordinator_crash_at_persist(false),
            Fault::TwoCoordinators => self.two_coordinators(),
            Fault::StoreConflict => self.store_conflict(),
            Fault::StoreUnavailable => self.store_unavailable(until),
            Fault::ClockJump => self.clock_jump(),
        }
    }
}
