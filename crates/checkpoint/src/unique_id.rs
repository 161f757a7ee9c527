//! Numbers for names that nobody else gives.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A number that nobody else has.
pub(crate) fn unique_id() -> u64 {
    RandomState::new().build_hasher().finish()
}
