//! Which machine behaves unlike its peers: numbers in, scores out. Nothing here acts, and nothing here knows what was wrong.
//!
//! ```text
//!  Series (metrics × seconds × machines)
//! ```
#![forbid(unsafe_code)]

pub mod lstm_vae;
pub mod minder;
pub mod prepare;
pub mod robust;
mod series;
mod verdict;

pub use series::{Family, Metric, Series};
pub use verdict::{Detector, Verdict};
