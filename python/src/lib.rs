//! The native half of the Python package: code that must be fast or shared with other processes. It
//! makes no decisions; every module works without an agent.

mod arena;
mod error;
mod frequency;
mod layout;
mod listing;
mod mark;
mod members;
mod memory;
mod network;
mod plain;
mod resharded;
mod sample_order;
mod shards;
mod socket;
mod step_board;
mod tensor_metadata;
mod torch_object;

use pyo3::prelude::*;

// Objects of torch and Python are compared without taking a reference to each, so no other thread
// may run meanwhile.
#[pymodule(gil_used = true)]
fn _internal(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(m)?;
    arena::register(m)?;
    step_board::register(m)?;
    frequency::register(m)?;
    layout::register(m)?;
    listing::register(m)?;
    mark::register(m)?;
    members::register(m)?;
    memory::register(m)?;
    network::register(m)?;
    sample_order::register(m)?;
    tensor_metadata::register(m)?;
    plain::register(m)?;
    socket::register(m)?;
    resharded::register(m)?;
    shards::register(m)
}
