//! Where every node's time went, to the microsecond.

/// Why a node that works achieves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// Something has failed, and nobody knows yet.
    Detection,
    /// The job is started again, or goes on with other nodes.
    Restart,
    /// The job has too few nodes.
    Waiting,
    /// A checkpoint is written.
    Checkpoint,
    /// It belongs to no job: a spare, or nobody can use it.
    Idle,
}

impl Cause {
    /// All of them, as accounts are listed.
    pub const ALL: [Cause; 5] = [Cause::Detection, Cause::Restart, Cause::Waiting, Cause::Checkpoint, Cause::Idle];

    /// For people and programs.
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

/// Node-microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Books {
    /// Work that is still there at the end.
    pub productive: u64,
    /// Up, and achieving nothing, by [`Cause`].
    pub blocked: [u64; 5],
    /// Work that was lost and done again.
    pub discarded: u64,
    /// Down.
    pub unavailable: u64,
}

impl Books {
    /// Books a node's time as blocked.
    pub fn block(&mut self, cause: Cause, node_micros: u64) {
        self.blocked[cause as usize] += node_micros;
    }

    /// All of it: nodes times length.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.productive + self.blocked.iter().sum::<u64>() + self.discarded + self.unavailable
    }
}
