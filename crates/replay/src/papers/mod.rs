//! What the papers print, and what comes out here: `make papers` writes the tables of docs/benchmarks.

pub mod checkfreq;
pub mod ettr;
pub mod gemini;
pub mod unicron;

/// How a number came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Something was chosen so that it fits.
    Fitted,
    /// Nothing was.
    Predicted,
}

/// One number of a paper.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Which.
    pub what: String,
    /// As the paper has it.
    pub paper: f64,
    /// As it comes out here.
    pub ours: f64,
    /// See [`Origin`].
    pub origin: Origin,
    /// What is assumed.
    pub assumed: String,
}

impl Row {
    fn predicted(what: impl Into<String>, paper: f64, ours: f64, assumed: &str) -> Row {
        Row { what: what.into(), paper, ours, origin: Origin::Predicted, assumed: assumed.into() }
    }

    /// Of the paper's number.
    #[must_use]
    pub fn off(&self) -> f64 {
        self.ours / self.paper - 1.0
    }
}
