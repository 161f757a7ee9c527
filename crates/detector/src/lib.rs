//! Which machine behaves unlike its peers: numbers in, scores out. Nothing here acts, and nothing here knows what was wrong.
//!
//! ```text
//!  Series (metrics × seconds × machines)
//! ```
#![forbid(unsafe_code)]

pub mod alarms;
pub mod calibrate;
pub mod catalogue;
mod center;
pub mod clock;
pub mod counter;
pub mod lstm_vae;
pub mod minder;
pub mod models;
mod numbered;
pub mod origin;
pub mod prepare;
pub mod priority;
pub mod rings;
pub mod robust;
mod series;
pub mod steps;
mod verdict;
pub mod watch;

pub use numbered::numbered;
pub use series::{Family, Metric, Series, Worse};
pub use verdict::{Detector, Verdict};
