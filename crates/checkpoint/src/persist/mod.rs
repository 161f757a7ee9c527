//! Durable checkpoints: shards and their manifest, on a file system ([`files`]) or in an object store ([`crate::objects`]). A directory is a
//! path, or the URL of a prefix in a store. Readers trust manifests only, and the manifest comes last.

mod files;
mod identity;
mod ownership;
mod prepared;

pub use files::mark_in;
pub use identity::{RUN_FILE, known_run, run_id};
pub use ownership::{Claim, ClaimError, Claimant, still_owned};
pub use prepared::Prepared;

use crate::arena::Slot;
use crate::direct::Throttle;
use crate::format::manifest::{Manifest, VERSION};
use crate::format::mark::Mark;
use crate::objects::{self, Location, is_url};
use crate::regular::read_regular;
use crate::retain::Policy;
use everstep_core::id::Rank;
use everstep_core::message::ShardFile;
use everstep_wire::limits::NOTE_BYTES_MAX;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// A published checkpoint: its step, its directory, its manifest or what is wrong with it.
pub type Found = (u64, PathBuf, Result<Manifest, String>);

/// Directory of a published checkpoint.
#[must_use]
pub fn step_directory(directory: &Path, step: u64) -> PathBuf {
    directory.join(format!("step-{step}"))
}

/// Writes a sealed slot as one rank's shard; the slot must be pinned.
///
/// # Errors
/// Those of the file system or store; `InvalidData` when the slot does not hold `step` any more.
pub fn write_shard(
    slot: &Arc<Slot>,
    directory: &Path,
    mark: &Mark,
    step: u64,
    rank: Rank,
    throttle: &Throttle,
) -> io::Result<ShardFile> {
    let prepared = Prepared::of(slot, step, rank)?;
    if is_url(directory) {
        objects::write_shard(&Location::of(directory)?, &prepared, mark, throttle)
    } else {
        files::write_shard(directory, &prepared, mark, throttle)
    }
}

/// Makes a checkpoint visible, if the directory is still its writer's. Doing it again changes nothing.
///
/// # Errors
/// Those of the file system or store; `PermissionDenied` when another job has taken the directory over.
pub fn publish(directory: &Path, mark: &Mark, step: u64, shards: &[ShardFile]) -> io::Result<()> {
    let manifest = Manifest {
        version: VERSION,
        step,
        world_size: u32::try_from(shards.len()).map_err(io::Error::other)?,
        saved_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        writer: Some(*mark),
        shards: shards.to_vec(),
    };
    if is_url(directory) {
        still_owned(directory, mark)?;
        return objects::publish(&Location::of(directory)?, mark, &manifest);
    }
    files::publish(directory, mark, &manifest)?;
    // This process may have been stopped between the last look and the rename.
    let owned = still_owned(directory, mark);
    if owned.is_err() {
        files::withdraw(directory, mark, step)?;
    }
    owned
}

/// Reads the manifest of a published checkpoint.
///
/// # Errors
/// A sentence with the path.
pub fn read_manifest(checkpoint: &Path) -> Result<Manifest, String> {
    if is_url(checkpoint) {
        objects::read_manifest(&Location::of(checkpoint).map_err(|e| e.to_string())?)
    } else {
        files::read_manifest(checkpoint)
    }
}

/// Whether checkpoints can be kept there at all: a store answers within seconds. Says nothing of directories.
///
/// # Errors
/// Those of the store; `TimedOut`.
pub fn reach(directory: &Path) -> io::Result<()> {
    if is_url(directory) { objects::reach(&Location::of(directory)?) } else { Ok(()) }
}

/// Published checkpoints, newest first; damaged ones with the reason.
///
/// # Errors
/// Those of reading the directory; one that is missing holds none.
pub fn list(directory: &Path) -> io::Result<Vec<Found>> {
    if is_url(directory) { objects::list(&Location::of(directory)?) } else { files::list(directory) }
}

/// Deletes published checkpoints that `policy` does not keep, and what turns before that of `mark` left unpublished. Returns the steps
/// that went.
///
/// # Errors
/// Those of the file system or store.
pub fn prune(directory: &Path, policy: Policy, mark: &Mark) -> io::Result<Vec<u64>> {
    still_owned(directory, mark)?;
    if is_url(directory) {
        objects::prune(&Location::of(directory)?, policy, mark)
    } else {
        files::prune(directory, policy, mark)
    }
}

/// Writes down a shard that was written without anybody who collects what is: at the end of a job, and without an agent.
///
/// # Errors
/// Those of the file system or store.
pub fn note(directory: &Path, mark: &Mark, step: u64, shard: &ShardFile) -> io::Result<()> {
    if is_url(directory) {
        objects::note(&Location::of(directory)?, mark, step, shard)
    } else {
        files::note(directory, mark, step, shard)
    }
}

/// A small file beside the checkpoints, such as what was measured of them: as it was written last; `None` when there is none.
///
/// # Errors
/// Those of the file system or store.
pub fn recall(directory: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
    let found = if is_url(directory) {
        Location::of(directory).and_then(|at| objects::recall(&at, name))
    } else {
        read_regular(&directory.join(name), NOTE_BYTES_MAX)
    };
    found.map(Some).or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(None) } else { Err(e) })
}

/// Writes it.
///
/// # Errors
/// As [`recall`].
pub fn remember(directory: &Path, name: &str, bytes: Vec<u8>) -> io::Result<()> {
    if is_url(directory) {
        return objects::remember(&Location::of(directory)?, name, bytes);
    }
    let temporary = directory.join(format!("{name}.{}", std::process::id()));
    std::fs::write(&temporary, bytes)?;
    std::fs::rename(&temporary, directory.join(name))
}

/// What [`note`] has written for a rank, if it has.
#[must_use]
pub fn noted(directory: &Path, mark: &Mark, step: u64, rank: u32) -> Option<ShardFile> {
    if is_url(directory) {
        objects::noted(&Location::of(directory).ok()?, mark, step, rank)
    } else {
        files::noted(directory, mark, step, rank)
    }
}

/// Publishes what all ranks have noted, and forgets the notes.
///
/// # Errors
/// As [`publish`]; `NotFound` when a rank's note is missing.
pub fn publish_noted(directory: &Path, mark: &Mark, step: u64, world_size: u32) -> io::Result<()> {
    let missing = |rank| io::Error::new(io::ErrorKind::NotFound, format!("step {step} was not written by rank {rank}"));
    let shards = (0..world_size).map(|rank| noted(directory, mark, step, rank).ok_or_else(|| missing(rank)));
    let shards = shards.collect::<io::Result<Vec<ShardFile>>>()?;
    for rank in 0..world_size {
        gone(if is_url(directory) {
            objects::forget(&Location::of(directory)?, mark, step, rank)
        } else {
            files::forget(directory, mark, step, rank)
        })?;
    }
    publish(directory, mark, step, &shards)
}

/// Whoever else deletes the same at this moment (the next step's publication, another agent) may be first.
fn gone(done: io::Result<()>) -> io::Result<()> {
    done.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
}
