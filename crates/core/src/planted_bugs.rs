//! Known bugs, reintroduced one at a time to prove that the simulator finds them.

/// A bug that the simulator must find through a named invariant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bug {
    /// The agent starts workers for a generation that was already fenced.
    MissingGenerationCheck,
    /// `Start` is sent before the record with its generation is in the store.
    SendBeforePersist,
    /// A duplicate join adds the node to the world a second time.
    DoubleAssignment,
    /// A restarted coordinator forgets the restarts already used.
    BudgetResetOnRestart,
    /// A node left out of one world is never considered again.
    TrimmedNeverReadmitted,
    /// The end of an old connection removes a node that has already come back on a new one.
    StaleLostAfterJoined,
    /// An agent does not report the copies of other nodes' shards that it keeps.
    CopiesUnsaid,
    /// An agent does not send the step that all ranks would go back to, to the nodes that keep its
    /// copies or parity.
    BaseForgotten,
    /// An agent keeps a step in mind that all ranks have gone back behind, and makes it durable
    /// when the job ends.
    LeftStepSaved,
    /// An agent ends with the error of the first attempt that failed, not of the latest.
    OldErrorPassedOn,
}

impl Bug {
    /// All planted bugs.
    pub const ALL: [Bug; 10] = [
        Bug::MissingGenerationCheck,
        Bug::SendBeforePersist,
        Bug::DoubleAssignment,
        Bug::BudgetResetOnRestart,
        Bug::TrimmedNeverReadmitted,
        Bug::StaleLostAfterJoined,
        Bug::CopiesUnsaid,
        Bug::BaseForgotten,
        Bug::LeftStepSaved,
        Bug::OldErrorPassedOn,
    ];
}
