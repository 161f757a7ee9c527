//! Small objects beside the checkpoints: shards for whoever publishes, and what was measured.

use super::bucket::{Location, body, failed, wait};
use crate::format::mark::Mark;
use everstep_core::message::ShardFile;
use everstep_wire::limits::NOTE_BYTES_MAX;
use object_store::path::Path as Key;
use object_store::{Error, ObjectStoreExt, PutMode, PutPayload};
use serde::{Deserialize, Serialize};
use std::io;

/// What a rank has written, and for whom.
#[derive(Serialize, Deserialize)]
pub(super) struct Note {
    /// Whose it is.
    pub mark: Mark,
    shard: ShardFile,
}

fn get(of: &Location, key: &Key) -> io::Result<Vec<u8>> {
    wait(async { Ok(body(of.bucket.store.get(key).await.map_err(failed)?, NOTE_BYTES_MAX).await?.to_vec()) })
}

/// The object of this name.
///
/// # Errors
/// Those of the store.
pub(super) fn recall(of: &Location, name: &str) -> io::Result<Vec<u8>> {
    get(of, &of.join(name))
}

/// Writes it.
///
/// # Errors
/// Those of the store.
pub(super) fn remember(of: &Location, name: &str, bytes: Vec<u8>) -> io::Result<()> {
    wait(async { of.bucket.store.put(&of.join(name), bytes.into()).await.map_err(failed) }).map(drop)
}

/// Writes it unless it is there. False when it is, whoever wrote it. A store that ignores
/// conditions gives the last one its way.
///
/// # Errors
/// Those of the store.
pub(super) fn create_new(of: &Location, name: &str, bytes: Vec<u8>) -> io::Result<bool> {
    wait(async {
        let (key, bytes) = (of.join(name), PutPayload::from(bytes));
        if !of.heeds_conditions().await? {
            of.bucket.store.put(&key, bytes).await.map_err(failed)?;
            // Whoever came at the same time reads the same afterwards.
            return Ok(false);
        }
        match of.bucket.store.put_opts(&key, bytes, PutMode::Create.into()).await {
            Ok(_) => Ok(true),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(false),
            Err(e) => Err(failed(e)),
        }
    })
}

/// Names of the objects right below `prefix`.
///
/// # Errors
/// Those of the store.
pub(super) fn names(of: &Location, prefix: &str) -> io::Result<Vec<String>> {
    let below = of.join(prefix);
    let found = wait(async { of.bucket.store.list_with_delimiter(Some(&below)).await.map_err(failed) })?;
    Ok(found.objects.iter().filter_map(|o| o.location.filename().map(str::to_owned)).collect())
}

/// Deletes it.
///
/// # Errors
/// Those of the store; `NotFound`.
pub(super) fn remove(of: &Location, name: &str) -> io::Result<()> {
    wait(async { of.bucket.store.delete(&of.join(name)).await.map_err(failed) })
}

fn note_of(to: &Location, mark: &Mark, step: u64, rank: u32) -> Key {
    to.join(&format!("notes/step-{step}.{}/rank-{rank}.json", mark.turn_text()))
}

/// Writes down a shard, for whoever publishes.
///
/// # Errors
/// Those of the store.
pub(super) fn note(to: &Location, mark: &Mark, step: u64, shard: &ShardFile) -> io::Result<()> {
    let key = note_of(to, mark, step, shard.rank.0);
    let bytes = serde_json::to_vec(&Note { mark: *mark, shard: shard.clone() })?;
    wait(async { to.bucket.store.put(&key, bytes.into()).await.map_err(failed) }).map(drop)
}

/// What [`note`] has written for a rank.
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
