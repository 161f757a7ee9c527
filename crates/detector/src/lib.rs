//! Finds machines that behave unlike their peers: numbers in, scores out. This crate takes no
//! action and does not know what went wrong.
//!
//! ```text
//!  Series (metrics × seconds × machines)
//! ```
//!
//! There are two detectors. [`robust`] needs no model and is the default. [`minder`], with the
//! models of [`lstm_vae`], is the published one; settings choose it by the name `lstm-vae`
//! (docs/adr/0018).
#![forbid(unsafe_code)]

pub mod alarms;
pub mod calibrate;
pub mod catalogue;
pub mod clock;
pub mod counter;
mod grouping;
pub mod lstm_vae;
pub mod minder;
pub mod models;
pub mod onset;
pub mod prepare;
pub mod priority;
mod quantiles;
pub mod rings;
pub mod robust;
mod series;
pub mod stragglers;
mod verdict;
pub mod watch;

pub use grouping::group_numbers;
pub use series::{Family, Metric, Series, Worse};
pub use verdict::{Detector, Verdict};
