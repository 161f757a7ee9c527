//! The bytes of one durable shard: a file, or an object in a store.

use crate::direct_io::Source;
use crate::objects::Object;
use std::io;

/// Number of requests to a store in flight: each connection has a limit of its own.
const CONNECTIONS: usize = 16;

/// Source of the bytes of one shard.
pub(crate) enum ShardSource {
    /// A file on a file system.
    File(Source),
    /// An object in a store.
    Object(Object),
}

impl ShardSource {
    /// Returns the length in bytes.
    pub fn bytes(&self) -> io::Result<u64> {
        match self {
            ShardSource::File(file) => file.bytes(),
            ShardSource::Object(object) => Ok(object.bytes),
        }
    }

    /// Fills `into` (aligned, as is `at`) up to the end of the shard; returns the number of bytes
    /// read.
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
