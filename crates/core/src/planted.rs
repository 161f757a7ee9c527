//! Known bugs, re-introduced one at a time so that the simulator can prove that it would find them.

/// One bug that the simulator must find through a named invariant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bug {
    /// The agent starts workers for a generation that was already fenced.
    MissingGenerationCheck,
    /// `Start` leaves before the record with its generation is in the store.
    SendBeforePersist,
    /// A duplicate join is entered into the world a second time.
    DoubleAssignment,
    /// A restarted coordinator forgets which restarts were already used.
    BudgetResetOnRestart,
    /// A node that was left out of one world is never considered again.
    TrimmedNeverReadmitted,
    /// The end of an old connection removes the node that has already come back on a new one.
    StaleLostAfterJoined,
    /// An agent does not say which copies of other nodes' shards it keeps.
    CopiesUnsaid,
    /// An agent does not tell those who keep copies or parity which step everybody would go back to.
    BaseForgotten,
}

impl Bug {
    /// Every planted bug.
    pub const ALL: [Bug; 8] = [
        Bug::MissingGenerationCheck,
        Bug::SendBeforePersist,
        Bug::DoubleAssignment,
        Bug::BudgetResetOnRestart,
        Bug::TrimmedNeverReadmitted,
        Bug::StaleLostAfterJoined,
        Bug::CopiesUnsaid,
        Bug::BaseForgotten,
    ];
}
