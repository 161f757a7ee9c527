//! The messages that cross sockets: their framing, their size limits, and who may send them. Also
//! the documents that commands print as JSON.
#![forbid(unsafe_code)]

#[cfg(feature = "net")]
pub mod client;
pub mod door;
pub mod envelope;
pub mod frame;
pub mod limits;
pub mod output;
mod owner;
pub mod private;
pub mod raw;
#[cfg(feature = "net")]
pub mod server;
pub mod token;
pub mod worker;
