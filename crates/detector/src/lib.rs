//! Finds machines that behave unlike their peers: numbers in, scores out. This crate takes no
//! action and does not know what went wrong.
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
