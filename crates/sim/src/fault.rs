//! Everything that can go wrong in a simulated cluster.

use std::collections::BTreeMap;

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// One kind of fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Fault { $($(#[$doc])* $name),* }

        impl Fault {
            /// Every kind.
            pub const ALL: &'static [Fault] = &[$(Fault::$name),*];
        }
    };
}

faults! {
    /// A worker is killed.
    WorkerCrash,
    /// A worker dies again right after each of its next starts.
    CrashLoop,
    /// A worker ends with an error of its own, and says of what.
    WorkerErrs,
    /// The same on two machines at once.
    TwoWorkersErr,
    /// A worker dies again while the job recovers.
    RecoveryFails,
    /// A GPU of a machine fails for good: whatever is started there fails.
    GpuFails,
    /// The driver of a machine's GPUs notes memory errors without end; nothing fails of them.
    EccStorm,
    /// A link of a machine goes down and comes up again and again; nothing fails of it.
    LinkFlaps,
    /// A worker stops making progress.
    WorkerHang,
    /// The agent process is killed and started again.
    AgentCrash,
    /// The machine is lost with all its memory and comes back later.
    NodeCrash,
    /// Two machines are lost with all their memory at once, and come back later.
    TwoNodesCrash,
    /// A machine forgets the copies it keeps.
    ReplicasLost,
    /// A machine's newest copies are gone, older ones stay.
    ReplicasStale,
    /// The next copies arrive only in part.
    ReplicasPartial,
    /// What a slot holds, a rank's own or a copy, changes by itself.
    SlotRots,
    /// The machine never comes back; another one takes its id.
    NodeReplaced,
    /// The machine never comes back and nobody takes its place.
    NodeGone,
    /// Everything a machine says and does takes much longer.
    SlowNode,
    /// A message is lost, and with it, after the silence time, its connection.
    Drop,
    /// Messages take long.
    Delay,
    /// A message arrives twice.
    Duplicate,
    /// A message is overtaken by later ones.
    Reorder,
    /// A connection is reset while both ends live on.
    Reset,
    /// Nothing from the node reaches the coordinator.
    PartitionToCoordinator,
    /// Nothing from the coordinator reaches the node.
    PartitionFromCoordinator,
    /// Nothing passes between the node and the coordinator.
    PartitionFull,
    /// A frozen machine comes back after its id was given to another one.
    OldIncarnationReturns,
    /// A second agent claims the id of a living one.
    DuplicateNodeId,
    /// The coordinator dies just before a write reaches the store.
    CoordinatorCrashBeforePersist,
    /// The coordinator dies just after a write reached the store.
    CoordinatorCrashAfterPersist,
    /// The coordinator is killed at any time.
    CoordinatorCrash,
    /// A second coordinator starts beside the first.
    TwoCoordinators,
    /// Someone else writes the job's key.
    StoreConflict,
    /// The store does not answer for a while.
    StoreUnavailable,
    /// The coordinator's clock jumps.
    ClockJump,
}

/// How often each kind was injected.
pub type FaultCounts = BTreeMap<Fault, u64>;
