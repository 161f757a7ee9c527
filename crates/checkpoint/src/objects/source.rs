//! A shard in a store, read by ranges.

use super::bucket::{Location, body, failed, wait};
use bytes::Bytes;
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, ObjectStore};
use std::io;

/// Bytes that are read at once with the object's length: most headers are shorter.
const HEAD_BYTES: u64 = 256 << 10;

/// A shard of a checkpoint in a store.
pub struct Object {
    from: Location,
    key: Key,
    head: Bytes,
    /// Length of the object in bytes.
    pub bytes: u64,
}

impl Object {
    /// Opens a shard of a checkpoint. `file` is a name with one `/` in it.
    ///
    /// # Errors
    /// Those of the store.
    pub fn open(checkpoint: &Location, file: &str) -> io::Result<Self> {
        // Shards of all checkpoints of a step lie side by side.
        let (above, step) = checkpoint.parent()?;
        let key = above.join(&format!("step-{step}/{file}"));
        let (head, bytes) = wait(async {
            let options = GetOptions { range: Some(GetRange::Bounded(0..HEAD_BYTES)), ..GetOptions::default() };
            let got = checkpoint.bucket.store.get_opts(&key, options).await.map_err(failed)?;
            let bytes = got.meta.size;
            Ok((body(got, HEAD_BYTES).await?, bytes))
        })?;
        Ok(Object { from: checkpoint.clone(), key, head, bytes })
    }

    /// Fills `into` up to the end of the object; returns the number of bytes read.
    ///
    /// # Errors
    /// Those of the store.
    pub fn read(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        let end = (at + into.len() as u64).min(self.bytes);
        let bytes = usize::try_from(end.saturating_sub(at)).map_err(io::Error::other)?;
        let room = into.get_mut(..bytes).unwrap_or_default();
        let near = usize::try_from(at).ok().and_then(|at| self.head.get(at..at + bytes));
        match near {
            Some(data) => room.copy_from_slice(data),
            None => {
                let data = wait(async {
                    let options = GetOptions { range: Some(GetRange::Bounded(at..end)), ..GetOptions::default() };
                    let got = self.from.bucket.store.get_opts(&self.key, options).await.map_err(failed)?;
                    body(got, bytes as u64).await
                })?;
                if data.len() != bytes {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the store sent less than was asked for"));
                }
                room.copy_from_slice(&data);
            }
        }
        Ok(bytes)
    }
}
