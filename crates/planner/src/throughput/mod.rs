//! What a model achieves on so many GPUs, before anybody has measured it (Megatron's arithmetic, analytically).
//!
//! ```text
//!  Transformer + Layout + Hardware ──> iteration() ──> seconds, where they go ──┐
//!                                  └─> memory()    ──> bytes, does it fit ──────┴─> best() ──> the best layout for each number of GPUs
//!  Points (measured) ──> Calibration: what was measured overrides and scales what was computed
//! ```
//!
//! Fractions here, and whole numbers again where a plan begins: only `+ - * /` are used, which give the same bits everywhere. Where a
//! hardware's numbers come from is said in its file; the fitted ones are fitted by `examples/fit_throughput.rs`.

mod hardware;
mod layout;
mod memory;
mod points;
mod search;
mod seconds;
mod transformer;

pub use hardware::{Fitted, Hardware};
pub use layout::{Layout, Recompute};
pub use memory::{Memory, memory};
pub use points::{Calibration, Point, Split};
pub use search::{Best, best, ranked};
pub use seconds::{Seconds, iteration};
pub use transformer::Transformer;
