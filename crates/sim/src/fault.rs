//! Everything that can go wrong in a simulated cluster.

use std::collections::BTreeMap;

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// One kind of fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Fault { $($(#[$doc])* $name),* }

        impl Fault {
            /// All kinds.
            pub const ALL: &'static [Fault] = &[$(Fault::$name),*];
        }
    };
}

faults! {
    /// A worker is killed.
    WorkerCrash,
    /// A worker dies again right after each of its next starts.
    CrashLoop,
    /// A worker exits with an error of its own and reports it.
    WorkerErrs,
    /// The same on two machines at once.
    TwoWorkersErr,
    /// A worker dies again while the job recovers.
    RecoveryFails,
    /// A GPU fails for good, or until it is repaired: all workers started on that machine fail.
    GpuFails,
    /// The driver of a machine's GPUs keeps reporting memory errors, but nothing fails.
    EccStorm,
    /// A machine's link goes down and up again repeatedly, but nothing fails.
    LinkFlaps,
    /// A worker stops making progress.
    WorkerHang,
    /// The agent process is killed and started again.
    AgentCrash,
    /// A machine is lost with all its memory and comes back later.
    NodeCrash,
    /// Two machines are lost with all their memory at once and come back later.
    TwoNodesCrash,
    /// A machine loses the copies it keeps for others.
    ReplicasLost,
    /// A machine loses the newest copies it keeps for others; older ones stay.
    ReplicasStale,
    /// The next copies arrive incomplete.
    ReplicasPartial,
    /// Two machines are lost, and another one does not find the durable checkpoints for a minute,
    /// as with a stale listing of NFS.
    ListingStale,
    /// The contents of a slot, a rank's own or a copy, become corrupt.
    SlotRots,
    /// A machine never comes back; another one takes its id.
    NodeReplaced,
    /// A machine never comes back and is not replaced.
    NodeGone,
    /// A machine and its link become much slower.
    SlowNode,
    /// A message is lost, and so is its connection when the silence timeout expires.
    Drop,
    /// Messages are delayed.
    Delay,
    /// A message arrives twice.
    Duplicate,
    /// A message is overtaken by later ones.
    Reorder,
    /// A connection is reset while both ends stay alive.
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
    /// The coordinator dies just after a write has reached the store.
    CoordinatorCrashAfterPersist,
    /// The coordinator is killed at any time.
    CoordinatorCrash,
    /// A second coordinator starts beside the first.
    TwoCoordinators,
    /// Another writer updates the job's key.
    StoreConflict,
    /// The store does not respond for a while.
    StoreUnavailable,
    /// The coordinator's clock jumps.
    ClockJump,
}

/// How often each kind of fault was injected.
pub type FaultCounts = BTreeMap<Fault, u64>;
