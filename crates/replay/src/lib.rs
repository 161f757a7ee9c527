//! What a cluster's failures would have cost: the same failures under different policies, with an
//! account of every node's time.
//!
//! ```text
//!  generate | read ──> Failures ──┐
//!  Workload (jobs, nodes) ────────┼──> run() ──> Outcome (TimeLedger) ──> compare()
//!  Policy (a small file) ─────────┘
//!
//!  TimeLedger: productive + blocked + discarded + unavailable = nodes · length
//! ```
//!
//! Time is in whole microseconds and accounts are whole numbers, so a seed gives the same bytes on
//! every machine. All policies see the same failures of the same nodes. If jobs share a cluster,
//! the core's planner, which `everstep plan` also uses, decides which nodes each job gets. Whether
//! a job under everstep trains on with the nodes it has is decided by the real coordinator
//! (`live`).
#![forbid(unsafe_code)]

mod compare;
mod failures;
mod fit;
mod generate;
mod live;
pub mod papers;
mod policy;
mod read;
mod recipe;
mod record;
mod run;
mod sizing;
mod state;
mod time_ledger;
mod unsaved_work;
mod work;

pub use compare::{CompareError, Compared, Interval, compare};
pub use failures::{DAY, Failure, Failures, HOUR, ImpossibleError, Kind, SECOND};
pub use fit::{Fit, NothingToFit, fit, poisson, quantile};
pub use generate::{Recipe, Renewal, Repair, generate};
pub use policy::{InvalidPolicy, OnLoss, Policy, PolicyError};
pub use read::{LineError, TraceError, from_faults, from_lines, to_lines};
pub use recipe::RecipeError;
pub use record::recorded;
pub use run::{Outcome, TooFewNodes, history, run};
pub use sizing::{Knobs, Range, SizeError, Sized, Tried, size, spares, spoken};
pub use time_ledger::{Cause, TimeLedger};
pub use work::{Job, Workload};
