//! Small objects beside the checkpoints: shards for the rank that publishes, and measurements.

use super::bucket::{Location, body, failed, wait};
use crate::format::mark::Mark;
use everstep_core::message::ShardFile;
use everstep_wire::limits::NOTE_BYTES_MAX;
use object_store::path::Path as Key;
use object_store::{Error, ObjectStoreExt, PutMode, PutPayload};
use serde::{Deserialize, Serialize};
use std::io;

/// A shard that a rank has written.
#[derive(Serialize, Deserialize)]
pub(super) struct Note {
    /// Mark of the writer.
    pub mark: Mark,
    shard: ShardFile,
}

fn get(of: &Location, key: &Key) -> io::Result<Vec<u8>> {
    wait(async { Ok(body(of.bucket.store.get(key).await.map_err(failed)?, NOTE_BYTES_MAX).await?.to_vec()) })
}

/// Returns the contents of the object `name`.
///
/// # Errors
/// Those of the store.
pub(super) fn recall(of: &Location, name: &str) -> io::Result<Vec<u8>> {
    get(of, &of.join(name))
}

/// Writes the object `name`.
///
/// # Errors
/// Those of the store.
pub(super) fn remember(of: &Location, name: &str, bytes: Vec<u8>) -> io::Result<()> {
    wait(async { of.bucket.store.put(&of.join(name), bytes.into()).await.map_err(failed) }).map(drop)
}

/// Writes the object `name` unless it exists; returns false if it does. In a store that ignores
/// conditions, the last writer wins, and the result is false.
///
/// # Errors
/// Those of the store.
pub(super) fn create_new(of: &Location, name: &str, bytes: Vec<u8>) -> io::Result<bool> {
    wait(async {
        let (key, bytes) = (of.join(name), PutPayload::from(bytes));
        if !of.heeds_conditions().await? {
            of.bucket.store.put(&key, bytes).await.map_err(failed)?;
            // A writer that came at the same time reads the same contents afterwards.
            return Ok(false);
        }
        match of.bucket.store.put_opts(&key, bytes, PutMode::Create.into()).await {
            Ok(_) => Ok(true),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(false),
            Err(e) => Err(failed(e)),
        }
    })
}

/// Returns the names of the objects right below `prefix`.
///
/// # Errors
/// Those of the store.
pub(super) fn names(of: &Location, prefix: &str) -> io::Result<Vec<String>> {
    let below = of.join(prefix);
    let found = wait(async { of.bucket.store.list_with_delimiter(Some(&below)).await.map_err(failed) })?;
    Ok(found.objects.iter().filter_map(|o| o.location.filename().map(str::to_owned)).collect())
}

/// Deletes the object `name`.
///
/// # Errors
/// Those of the store; `NotFound`.
pub(super) fn remove(of: &Location, name: &str) -> io::Result<()> {
    wait(async { of.bucket.store.delete(&of.join(name)).await.map_err(failed) })
}

fn note_of(to: &Location, mark: &Mark, step: u64, rank: u32) -> Key {
    to.join(&format!("notes/step-{step}.{}/rank-{rank}.json", mark.turn_text()))
}

/// Writes a note of a shard for the rank that publishes.
///
/// # Errors
/// Those of the store.
pub(super) fn note(to: &Location, mark: &Mark, step: u64, shard: &ShardFile) -> io::Result<()> {
    let key = note_of(to, mark, step, shard.rank.0);
    let bytes = serde_json::to_vec(&Note { mark: *mark, shard: shard.clone() })?;
    wait(async { to.bucket.store.put(&key, bytes.into()).await.map_err(failed) }).map(drop)
}

/// Returns the shard that [`note`] has written for a rank, if this run wrote it.
#[must_use]
pub(super) fn noted(to: &Location, mark: &Mark, step: u64, rank: u32) -> Option<ShardFile> {
    let key = note_of(to, mark, step, rank);
    let note: Note = serde_json::from_slice(&get(to, &key).ok()?).ok()?;
    (note.mark.run == mark.run).then_some(note.shard)
}

/// Removes a note.
///
/// # Errors
/// Those of the store; `NotFound`.
pub(super) fn forget(to: &Location, mark: &Mark, step: u64, rank: u32) -> io::Result<()> {
    wait(async { to.bucket.store.delete(&note_of(to, mark, step, rank)).await.map_err(failed) })
}
