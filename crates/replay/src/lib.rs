//! What a cluster's failures would have cost: the same failures, under different policies, down to where every node's time went.
//!
//! ```text
//!  generate | read ──> Failures ──┐
//!  Workload (jobs, nodes) ────────┼──> run() ──> Outcome (Books: productive + blocked + discarded + unavailable = N·T) ──> compare()
//!  Policy (a small file) ─────────┘
//! ```
//!
//! Time is whole microseconds and accounts are whole numbers: a seed gives the same bytes on every machine. All policies see the same
//! failures of the same nodes. Which nodes a job gets where jobs share a cluster is decided by the core's planner, the one that `everstep plan`
//! asks; whether a job of everstep's trains on with the nodes that it has is decided by its coordinator, the real one (`live`).
#![forbid(unsafe_code)]

mod books;
mod compare;
mod failures;
mod fit;
mod generate;
mod held;
mod live;
pub mod papers;
mod policy;
mod read;
mod recipe;
mod record;
mod run;
mod sizing;
mod state;
mod work;

pub use books::{Books, Cause};
pub use compare::{Compared, Interval, compare};
pub use failures::{DAY, Failure, Failures, HOUR, Kind, SECOND};
pub use fit::{Fit, fit, poisson, quantile};
pub use generate::{Recipe, Renewal, Repair, generate};
pub use policy::{OnLoss, Policy};
pub use read::{from_faults, from_lines, to_lines};
pub use record::recorded;
pub use run::{Outcome, history, run};
pub use sizing::{Knobs, Range, Sized, Tried, size, spares, spoken};
pub use work::{Job, Workload};
