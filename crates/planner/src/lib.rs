//! Divides a cluster among its jobs: finds the number of nodes for each job that is worth most in
//! total (Unicron, section 5).
//!
//! ```text
//!  Problem (jobs, their throughput by number of units, their current units)
//!      ├──> solve() ──> Plan
//!      └──> Table: the plans for every possible next change
//! ```
//!
//! The planner computes with integers only and breaks ties: the same problem gives the same plan
//! everywhere. A unit is what is given to a job as a whole: a node, unless the jobs are small.
//! [`mod@assign`] chooses the units for a plan. Problems can be read with [`mod@file`], and their
//! numbers computed with [`throughput`].

#![forbid(unsafe_code)]

mod assign;
mod choice;
mod dwell;
pub mod file;
mod lookup;
mod problem;
mod reason;
mod solve;
mod split;
pub mod throughput;

pub use assign::{Assignment, Unit, assign};
pub use lookup::{Change, Table};
pub use problem::{Job, Mode, Move, Problem, Rates};
pub use reason::{Done, Limit, Reason, reasons};
pub use solve::{Plan, solve};
pub use split::by_shares;
