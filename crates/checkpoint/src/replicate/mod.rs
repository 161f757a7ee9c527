//! Replicas: a sealed slot's bytes on other nodes, and back. Agents speak to each other on plain
//! TCP streams; the training process takes no part.
//!
//! ```text
//!  slot ──push──> holder's slot     (chunks that it lacks, verified on arrival, then sealed)
//!  slot <──pull── holders' slots    (ranges from several at once, verified on arrival; a bad chunk comes from the next)
//! ```

pub mod bringers;
mod budget;
mod conversation;
mod entrance;
pub mod holder;
pub mod protocol;
pub mod pull;
pub mod push;
pub mod refusal;
mod room;
pub mod taken;
mod upload;

pub use room::{Named, Room};
