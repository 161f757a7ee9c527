//! The throughput of a model on a number of GPUs, computed before anybody has measured it
//! (Megatron's arithmetic, analytically).
//!
//! ```text
//!  Transformer + Layout + Hardware ──> iteration() ──> seconds, by purpose ─────┐
//!                                  └─> memory()    ──> bytes, whether it fits ──┴─> best()
//!  best(): the best layout for a number of GPUs
//!  Points (measured) ──> Calibration: measurements override and scale computed values
//! ```
//!
//! This module computes with fractions; a plan uses integers again. It uses only `+ - * /`, which
//! give the same bits everywhere. Each hardware file states the source of its numbers; the fitted
//! ones come from `examples/fit_throughput.rs`.

mod hardware;
mod layout;
mod memory;
mod points;
mod search;
mod seconds;
mod transformer;

pub use hardware::{Fitted, Hardware, HardwareError};
pub use layout::{Layout, Recompute};
pub use memory::{Memory, memory};
pub use points::{Calibration, Point, PointError, PointsError, Split};
pub use search::{Best, best, ranked};
pub use seconds::{Seconds, iteration};
pub use transformer::{ModelError, Transformer};
