//! Which machine behaves unlike its peers: numbers in, scores out. Nothing here acts, and nothing here knows what was wrong.
//!
//! ```text
//!  Series (metrics × seconds × machines)
//! ```
#![forbid(unsafe_code)]

mod center;
pub mod lstm_vae;
pub mod minder;
pub mod prepare;
pub mod robust;
mod series;
pub mod steps;
mod verdict;

pub use series::{Family, Metric, Series, Worse};
pub use verdict::{Detector, Verdict};
