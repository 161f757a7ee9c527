//! Numbers for names that nobody else gives.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A number that nobody else has.
pub(crate) fn unique() -> u64 {
    RandomState::new().build_hasher().finish()
}
