//! The messages that cross sockets: their framing, their size limits, and who may send them. Also
//! the documents that commands print as JSON.
#![forbid(unsafe_code)]

pub mod admission;
#[cfg(feature = "net")]
pub mod client;
pub mod envelope;
pub mod frame;
pub mod limits;
pub mod output;
pub mod private;
pub mod raw;
#[cfg(feature = "net")]
pub mod server;
mod socket_owner;
pub mod token;
pub mod worker;
