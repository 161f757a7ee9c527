//! everstep-wire speaks: what goes over sockets, how it is framed, how large it may be, and who may say it.
#![forbid(unsafe_code)]

#[cfg(feature = "net")]
pub mod client;
pub mod door;
pub mod envelope;
pub mod frame;
pub mod limits;
pub mod private;
pub mod raw;
#[cfg(feature = "net")]
pub mod server;
pub mod token;
pub mod worker;
