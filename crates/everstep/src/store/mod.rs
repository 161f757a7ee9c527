//! The store of the coordinator's records.

pub mod redb;
pub mod writer;

use everstep_core::coordinator::command::Precondition;
use everstep_core::coordinator::event::{StoreFailure, Version};

/// Versioned values with compare-and-swap per key.
///
/// Contract: `put` is durable when it returns `Ok`. Versions of a key start at 1 and rise by one
/// per write. A failed precondition is `Conflict` and changes nothing. `Unavailable` means that
/// nothing is known to be written. The embedded store is exclusive to one process; a store shared
/// by several coordinators must also report a newer epoch (watch), which reaches the core as
/// `Superseded`.
pub trait Store: Send {
    /// Returns the value and version of a key.
    ///
    /// # Errors
    /// Fails if the store cannot be read.
    fn get(&self, key: &str) -> Result<Option<(Vec<u8>, Version)>, StoreFailure>;

    /// Writes if the precondition holds, and returns the new version.
    ///
    /// # Errors
    /// [`StoreFailure`].
    fn put(&self, key: &str, value: &[u8], when: Precondition) -> Result<Version, StoreFailure>;

    /// Returns all keys with this prefix, in order.
    ///
    /// # Errors
    /// Fails if the store cannot be read.
    fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>, Version)>, StoreFailure>;
}
