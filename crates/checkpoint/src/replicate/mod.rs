//! Replicas: a sealed slot's bytes on other nodes, and back. Agents talk to each other on plain TCP
//! streams; the training process takes no part.
//!
//! ```text
//!  slot ──push──> holder's slot     (chunks that it lacks, verified on arrival, then sealed)
//!  slot <──pull── holders' slots    (ranges from several at once, verified on arrival; a bad chunk comes from the next)
//! ```

mod budget;
mod conversation;
mod entrance;
pub mod protocol;
pub mod pull;
pub mod push;
mod receive_slots;
pub mod refusal;
pub mod replica_holder;
pub mod round_slots;
pub mod suppliers;
mod upload;

pub use receive_slots::{NamedSlots, ReceiveSlot};
