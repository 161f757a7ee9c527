//! How many nodes each job gets: the split of a cluster over its jobs that is worth most (Unicron, section 5).
//!
//! ```text
//!  Problem (jobs, what each achieves on how many units, where they are) ──> solve() ──> Plan
//!                                                                      └──> Table: the plans for all that may happen next
//! ```
//!
//! Whole numbers only, and ties are broken: the same problem gives the same plan everywhere. A unit is whatever is given to one job as a
//! whole: a node, unless the jobs are small. [`assign`] says which units they are. Where the numbers come from is not known here.

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
