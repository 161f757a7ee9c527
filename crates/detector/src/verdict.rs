//! The result of a detector.

/// Machines that behave unlike their peers.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The machines; more than one if they went bad together.
    pub machines: Vec<usize>,
    /// Second of the series in which the verdict became certain.
    pub at: usize,
    /// Indices of the metrics that deviate, the clearest first. Empty if samples stopped arriving.
    pub metrics: Vec<usize>,
    /// Deviation from the peers, in units of their spread.
    pub score: f32,
    /// Many machines of one role or failure domain deviate, which points to a shared cause: a
    /// switch, a rack, a stage.
    pub group: bool,
}

/// A detector that processes a whole series as if it arrived second by second.
pub trait Detector {
    /// Returns the first verdict, if any.
    fn first(&self, series: &crate::Series) -> Option<Verdict>;
}
