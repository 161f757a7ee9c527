//! Numbers printed in papers, next to our own. `make papers` writes the tables of docs/benchmarks.

pub mod checkfreq;
pub mod ettr;
pub mod gemini;
pub mod unicron;

use crate::{CompareError, PolicyError};
use everstep_planner::throughput::{HardwareError, ModelError};

/// A number that cannot be computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PaperError {
    #[error("Unicron's table 3 has the cases 1 to 5")]
    UnknownCase,
    #[error("{policy} achieves nothing on some trace")]
    NothingAchieved { policy: String },
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    #[error(transparent)]
    Compare(#[from] CompareError),
}

/// How a number was obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A parameter was chosen so that the number fits.
    Fitted,
    /// No parameter was fitted.
    Predicted,
}

/// One number of a paper.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// What the number is.
    pub what: String,
    /// The paper's value.
    pub paper: f64,
    /// Our value.
    pub ours: f64,
    /// See [`Origin`].
    pub origin: Origin,
    /// The assumptions.
    pub assumed: String,
}

impl Row {
    fn predicted(what: impl Into<String>, paper: f64, ours: f64, assumed: &str) -> Row {
        Row { what: what.into(), paper, ours, origin: Origin::Predicted, assumed: assumed.into() }
    }

    /// Returns the deviation as a share of the paper's value.
    #[must_use]
    pub fn off(&self) -> f64 {
        self.ours / self.paper - 1.0
    }
}
