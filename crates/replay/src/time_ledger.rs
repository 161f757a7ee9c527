//! Accounts of where every node's time went, to the microsecond.

/// Why a node that is up achieves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// Something has failed, and the failure is not detected yet.
    Detection,
    /// The job restarts, or continues with other nodes.
    Restart,
    /// The job has too few nodes.
    Waiting,
    /// A checkpoint is being written.
    Checkpoint,
    /// The node belongs to no job: it is a spare, or no job can use it.
    Idle,
}

impl Cause {
    /// All causes, in the order of [`TimeLedger::blocked`].
    pub const ALL: [Cause; 5] = [Cause::Detection, Cause::Restart, Cause::Waiting, Cause::Checkpoint, Cause::Idle];

    /// Returns the name used in output.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Cause::Detection => "detection",
            Cause::Restart => "restart",
            Cause::Waiting => "waiting",
            Cause::Checkpoint => "checkpoint",
            Cause::Idle => "idle",
        }
    }
}

/// Accounts in node-microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeLedger {
    /// Work that is still kept at the end.
    pub productive: u64,
    /// Time up without achieving anything, by [`Cause`].
    pub blocked: [u64; 5],
    /// Work that was lost and done again.
    pub discarded: u64,
    /// Time down.
    pub unavailable: u64,
}

impl TimeLedger {
    /// Enters a node's time as blocked.
    pub fn block(&mut self, cause: Cause, node_micros: u64) {
        self.blocked[cause as usize] += node_micros;
    }

    /// Returns the total, which is the number of nodes times the length.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.productive + self.blocked.iter().sum::<u64>() + self.discarded + self.unavailable
    }
}
