//! The bytes of one durable shard: a file, or an object in a store.

use crate::direct_io::Source;
use crate::objects::Object;
use std::io;

/// Requests to a store under way at a time: each connection has a limit of its own.
const CONNECTIONS: usize = 16;

/// Durable storage of one shard.
pub(crate) enum ShardSource {
    /// On a file system.
    File(Source),
    /// In a store.
    Object(Object),
}

impl ShardSource {
    /// Its length.
    pub fn bytes(&self) -> io::Result<u64> {
        match self {
            ShardSource::File(file) => file.bytes(),
            ShardSource::Object(object) => Ok(object.bytes),
        }
    }

    /// Fills `into` (aligned, as is `at`) as far as it goes; returns how far that is.
    pub fn read(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        match self {
            ShardSource::File(file) => file.read(into, at),
            ShardSource::Object(object) => object.read(into, at),
        }
    }

    /// Returns the number of threads to read it with; a file would be read with `files`.
    pub fn threads(&self, files: usize) -> usize {
        match self {
            ShardSource::File(_) => files,
            ShardSource::Object(_) => files.max(CONNECTIONS),
        }
    }
}

/// Returns whether a shard's name has this many parts and stays below its checkpoint.
pub(crate) fn is_inside(file: &str, parts: usize) -> bool {
    let found: Vec<&str> = file.split('/').collect();
    found.len() == parts && found.iter().all(|p| !p.is_empty() && !p.starts_with('.'))
}
