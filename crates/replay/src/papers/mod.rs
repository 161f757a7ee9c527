//! Numbers printed in papers, next to our own. `make papers` writes the tables of docs/benchmarks.

pub mod checkfreq;
pub mod ettr;
pub mod gemini;
pub mod unicron;

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
