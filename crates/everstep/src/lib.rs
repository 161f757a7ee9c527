//! The parts of the binary that parse input of other programs and of people. They are a library so
//! that the fuzz targets in `fuzz/` reach them; everything else is in `main.rs`.

pub mod detect;
pub mod user_file;

/// The process-group store without its sockets: torch's TCPStore protocol over any stream.
pub mod tcp_store {
    pub mod client;
    pub mod keys;
    mod memory_budget;
}
