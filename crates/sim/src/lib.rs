//! Runs the real coordinator and the real agents against a simulated network, store, cluster and
//! workload. One seed decides everything. The oracle checks the named invariants after every event.
//!
//! ```text
//!  seed ─> world ─┬─ control   coordinators and the store     ─┐
//!                 ├─ host      agents, workers, memory tiers   ├─> oracle (INV-01 … INV-18), trace
//!                 ├─ network   sessions, delays, partitions   ─┘
//!                 └─ fault     what goes wrong
//! ```
#![forbid(unsafe_code)]

mod ailing;
pub mod control;
mod coordinators;
mod copying;
pub mod fault;
mod final_step;
mod first_error;
pub mod host;
pub mod inject;
mod keep_alive;
mod machines;
mod memory;
pub mod network;
mod node_check;
pub mod oracle;
mod provisioner;
pub mod scale;
pub mod trace;
pub mod world;

pub use world::{Options, Outcome, run};
