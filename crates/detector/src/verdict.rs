//! What a detector says.

/// Machines that behave unlike their peers.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Which; more than one where they went bad together.
    pub machines: Vec<usize>,
    /// Second of the series in which it was certain.
    pub at: usize,
    /// What gave it away, the clearest first: metrics by number. Empty where samples ceased to come.
    pub metrics: Vec<usize>,
    /// How far from the peers, in their spread.
    pub score: f32,
    /// So many of one role at once that it is not these machines by themselves: a switch, a rack, a stage.
    pub group: bool,
}

/// Looks at the whole of a series as if it came second by second.
pub trait Detector {
    /// The first that is certain, if any.
    fn first(&self, series: &crate::Series) -> Option<Verdict>;
}
