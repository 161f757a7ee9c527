//! Where the coordinator's records live.

pub mod redb;
pub mod writer;

use everstep_core::coordinator::command::Precondition;
use everstep_core::coordinator::event::{StoreFailure, Version};

/// The seam: versioned values with compare-and-swap per key.
///
/// Contract: `put` is durable when it returns `Ok`; versions of a key start at 1 and rise by one per
/// write; a failed precondition is `Conflict` and changes nothing; `Unavailable` means that nothing
/// is known to be written. The embedded store is exclusive to one process; a store shared by several
/// coordinators must also report a newer epoch (watch), which reaches the core as `Superseded`.
pub trait Store: Send {
    /// Value and version of a key.
    ///
    /// # Errors
    /// When the store cannot be read.
    fn get(&self, key: &str) -> Result<Option<(Vec<u8>, Version)>, StoreFailure>;

    /// Writes if the precondition holds; returns the new version.
    ///
    /// # Errors
    /// [`StoreFailure`].
    fn put(&self, key: &str, value: &[u8], when: Precondition) -> Result<Version, StoreFailure>;

    /// All keys with this prefix, in order.
    ///
    /// # Errors
    /// When the store cannot be read.
    fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>, Version)>, StoreFailure>;
}
