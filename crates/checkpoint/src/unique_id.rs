//! Numbers for unique names.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Returns a random 64-bit number, which is unique for all practical purposes.
pub(crate) fn unique_id() -> u64 {
    RandomState::new().build_hasher().finish()
}
