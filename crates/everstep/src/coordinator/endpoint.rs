//! The file in a store's directory that records the address of its coordinator, for agents and
//! commands on the same machine.

use crate::paths;
use everstep_core::id::Epoch;
use everstep_wire::raw::Raw;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// How to reach a coordinator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EndpointFile {
    /// Host and port.
    pub endpoint: String,
    /// Its process id.
    pub pid: u32,
    /// Its epoch.
    pub epoch: Epoch,
    /// File with the token that it requires.
    pub token_file: Raw,
}

impl EndpointFile {
    /// Name of the file in a store's directory.
    pub(super) const NAME: &str = "endpoint.json";

    /// Returns the path of the file in a store's directory.
    pub fn path(store: &Path) -> PathBuf {
        store.join(Self::NAME)
    }

    /// Reads the file. Returns `None` if it does not exist or this version cannot read it.
    pub fn read(store: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(Self::path(store)).ok()?).ok()
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn write(&self, store: &Path) -> std::io::Result<()> {
        paths::write_whole(&Self::path(store), &serde_json::to_vec(self)?)
    }
}
