//! The decision logic of everstep, without clocks, sockets, files, threads or randomness. Events
//! and the current time go in, commands come out:
//!
//! ```text
//!  events ──> handle(now, event) ──> state ──> poll() ──> commands
//!                                    deadline() ──> when to call handle(now, Tick) next
//! ```
//!
//! There are two state machines: [`coordinator::Coordinator`] (one per cluster) and
//! [`agent::Agent`] (one per node). The drivers in `crates/everstep` and the simulator in
//! `crates/sim` feed them the same events and carry out the same commands.
#![forbid(unsafe_code)]

pub mod agent;
pub mod coordinator;
pub mod copy_estimate;
pub mod digests;
pub mod exit_code;
pub mod failure;
pub mod frequency;
pub mod health;
pub mod history;
pub mod id;
pub mod idle_exit;
pub mod injection;
pub mod interleave;
pub mod invariant;
pub mod keep_alive;
pub mod ledger;
pub mod median;
pub mod message;
pub mod node_check;
pub mod notify;
pub mod ownership;
pub mod pacing;
pub mod placement;
#[cfg(feature = "planted")]
pub mod planted_bugs;
pub mod progress;
pub mod sample_order;
pub mod severity;
pub mod shard;
pub mod slow;
pub mod spec;
pub mod stacks;
pub mod survival;
pub mod time;
pub mod world;

/// Evaluates to `true` if the named bug is planted; always `false` outside the simulator's
/// planted-bug runs.
#[cfg(feature = "planted")]
macro_rules! is_planted {
    ($self:expr, $bug:ident) => {
        $self.planted == Some($crate::planted_bugs::Bug::$bug)
    };
}
#[cfg(not(feature = "planted"))]
macro_rules! is_planted {
    ($self:expr, $bug:ident) => {
        false
    };
}
pub(crate) use is_planted;
