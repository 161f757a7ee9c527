//! Durable checkpoints: shards and their manifest, on a file system ([`directory`]) or in an object
//! store ([`crate::objects`]). A directory is a path, or the URL of a prefix in a store. Readers
//! trust manifests only, and the manifest comes last.

mod branch;
mod directory;
mod disk;
mod entries;
mod files;
mod identity;
mod opened;
mod ownership;
mod owning_process;
mod prune;

pub use crate::sealed_shard::SealedShard;
pub use crate::storage::{Foreign, Found, Inherited, Pruned, Target, Unreadable};
pub use branch::{BRANCH_FILE, Origin, Record};
#[cfg(feature = "faults")]
pub use disk::faults;
pub use entries::mark_in;
pub use identity::RUN_FILE;
pub use ownership::{Claim, ClaimError, Claimant};
pub use prune::NotAllGone;

use crate::arena::Slot;
use crate::direct_io::Throttle;
use crate::format::manifest::{Manifest, VERSION};
use crate::format::mark::Mark;
use crate::lineage::{self, Lineage, Place};
use crate::objects::{Location, is_url};
use crate::retain::Policy;
use crate::storage::{CleanUp, Storage, Unchanged, gone};
use directory::Directory;
use everstep_core::id::{Rank, RunId};
use everstep_core::message::ShardFile;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// The one place that decides what a path stands for.
pub(crate) fn at(directory: &Path) -> io::Result<Box<dyn Storage>> {
    Ok(if is_url(directory) { Box::new(Location::of(directory)?) } else { Box::new(Directory::of(directory)) })
}

/// The directory's run id, drawn now if it has none. Of several that ask at the same time all get
/// the same.
///
/// # Errors
/// Those of the file system or store; `InvalidData` when the file with it is damaged.
pub fn run_id(directory: &Path) -> io::Result<RunId> {
    identity::run_id(&*at(directory)?)
}

/// The directory's run id; `None` when it has none.
///
/// # Errors
/// As [`run_id`].
pub fn known_run(directory: &Path) -> io::Result<Option<RunId>> {
    identity::known_run(&*at(directory)?)
}

/// Takes the directory, or joins those of the same job that have it. Waits where an owner may be
/// gone; `notice` gets a line then.
///
/// # Errors
/// [`ClaimError`].
pub fn claim(directory: &Path, who: &Claimant, notice: impl FnMut(String)) -> Result<Claim, ClaimError> {
    let named = directory.display().to_string();
    let storage = at(directory).map_err(|e| ClaimError::Io(named.clone(), e))?;
    Claim::take(storage.into(), named, who, notice)
}

/// Fails once somebody else has the directory, with a sentence that says who. Marks without an
/// epoch belong to no owner.
///
/// # Errors
/// `PermissionDenied` then; those of the file system or store.
pub fn still_owned(directory: &Path, mark: &Mark) -> io::Result<()> {
    ownership::still_owned(&*at(directory)?, mark)
}

/// The branch that ran last, by its own record. One of another directory (a copy) says nothing
/// here.
///
/// # Errors
/// Those of the file system or store; `InvalidData` for something else of this name.
pub fn recorded(directory: &Path, run: Option<RunId>) -> io::Result<Option<Record>> {
    branch::recorded(&*at(directory)?, run)
}

/// Training goes on from `from`: the branch that it is in, recorded for whoever publishes. `asked`:
/// the user named the step.
///
/// # Errors
/// Those of the file system or store; `PermissionDenied` when another job has taken the directory
/// over.
pub fn begin(directory: &Path, from: Origin<'_>, asked: bool, mark: &Mark) -> io::Result<Lineage> {
    branch::begin(&*at(directory)?, from, asked, mark)
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
    at(directory)?.write_shard(&SealedShard::of(slot, step, rank)?, mark, throttle)
}

/// Makes a checkpoint visible, if the directory is still its writer's, and says where. Doing it
/// again changes nothing.
///
/// # Errors
/// Those of the file system or store; `PermissionDenied` when another job has taken the directory
/// over; `AlreadyExists` where `target` names what something else has; `InvalidInput` when the
/// shards are not one of each rank.
pub fn publish(directory: &Path, mark: &Mark, step: u64, shards: &[ShardFile], target: Target) -> io::Result<PathBuf> {
    let storage = at(directory)?;
    let lineage = match target {
        Target::Branch => Some(branch::running(&*storage, mark, step)?),
        Target::Exactly => None,
    };
    let manifest = Manifest {
        version: VERSION,
        step,
        world_size: u32::try_from(shards.len()).map_err(io::Error::other)?,
        saved_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        writer: Some(*mark),
        lineage,
        shards: shards.to_vec(),
    };
    // What no reader would accept must not take the place of what it can read.
    let refused = |what: &str| {
        let ranks: Vec<u32> = shards.iter().map(|s| s.rank.0).collect();
        io::Error::new(io::ErrorKind::InvalidInput, format!("{what} (step {step}, shards of the ranks {ranks:?})"))
    };
    manifest.check().map_err(refused)?;
    storage.publish(mark, &manifest, target, &|| ownership::still_owned(&*storage, mark))
}

/// Reads the manifest of a published checkpoint.
///
/// # Errors
/// [`Unreadable`].
pub fn read_manifest(checkpoint: &Path) -> Result<Manifest, Unreadable> {
    at(checkpoint).map_err(|e| Unreadable::Address(Arc::new(e)))?.manifest()
}

/// Whether checkpoints can be kept there at all: a store answers within seconds. Says nothing of
/// directories.
///
/// # Errors
/// Those of the store; `TimedOut`.
pub fn reach(directory: &Path) -> io::Result<()> {
    at(directory)?.reach()
}

/// Published checkpoints, newest first; damaged ones with the reason. Of several of one step, that
/// of the branch that ran last comes first.
///
/// # Errors
/// Those of reading the directory; one that is missing holds none.
pub fn list(directory: &Path) -> io::Result<Vec<Found>> {
    branch::newest_first(&*at(directory)?)
}

/// Checkpoints that training goes on from when nobody asks for another: those of the branch that
/// ran last, newest first, and damaged ones, which may have been of it. A copy of a directory has
/// the same ones as the directory. Where several directories were copied into one, nothing says
/// which branch ran last, and none can be read this way.
///
/// # Errors
/// As [`list`].
pub fn line(directory: &Path) -> io::Result<Vec<Found>> {
    let storage = at(directory)?;
    let mut all = branch::newest_first(&*storage)?;
    let run = identity::known_run(&*storage)?;
    let seen = branch::Seen::of(&*storage, run, &all)?;
    if seen.mixed {
        let unknown = |path: &Path| Err(Unreadable::Mixed(path.display().to_string()));
        return Ok(all.into_iter().map(|(step, path, _)| (step, path.clone(), unknown(&path))).collect());
    }
    let places: Vec<Option<Place>> = all.iter().map(|(_, _, m)| Some(seen.runs.place_of(m.as_ref().ok()?))).collect();
    let known: Vec<Place> = places.iter().flatten().cloned().collect();
    let ran = lineage::last(seen.lineage(), &known).cloned().unwrap_or_default();
    let mut places = places.iter();
    all.retain(|_| places.next().is_some_and(|p| p.as_ref().is_none_or(|p| ran.includes(p))));
    Ok(all)
}

/// Where the checkpoint of a step is: of several, that of the branch that ran last.
///
/// # Errors
/// As [`list`].
pub fn path_of(directory: &Path, step: u64) -> io::Result<Option<PathBuf>> {
    let good = |all: Vec<Found>| all.into_iter().find(|(s, _, m)| *s == step && m.is_ok()).map(|(_, path, _)| path);
    match good(line(directory)?) {
        Some(path) => Ok(Some(path)),
        None => Ok(good(list(directory)?)),
    }
}

/// Deletes published checkpoints that `policy` does not keep, and what turns before that of `mark`
/// left unpublished. Only what carries the mark of this directory's run goes.
///
/// # Errors
/// Those of the file system or store.
pub fn prune(directory: &Path, policy: Policy, mark: &Mark) -> io::Result<Pruned> {
    let storage = at(directory)?;
    ownership::still_owned(&*storage, mark)?;
    let owned = || match ownership::still_owned(&*storage, mark) {
        Err(e) if ownership::is_lost(&e) => Ok(false),
        other => other.map(|()| true),
    };
    prune_of(&*storage, policy, mark.run, mark.turn(), false, &owned)
}

/// The same from outside of a job, which may be running: what it has not published yet is left
/// alone. With `dry_run` only says what would go.
///
/// # Errors
/// As [`prune()`].
pub fn prune_outside(directory: &Path, policy: Policy, dry_run: bool) -> io::Result<Pruned> {
    let storage = at(directory)?;
    match identity::known_run(&*storage)? {
        Some(run) => prune_of(&*storage, policy, run, (0, 0), dry_run, &|| Ok(true)),
        // Nothing here can carry its mark.
        None => Ok(Pruned { foreign: kept_without_run(&*storage)?, ..Pruned::default() }),
    }
}

fn prune_of(
    storage: &dyn Storage,
    policy: Policy,
    run: RunId,
    before: (u64, u64),
    dry_run: bool,
    owned: Unchanged<'_>,
) -> io::Result<Pruned> {
    let running = || Ok::<_, io::Error>(branch::recorded(storage, Some(run))?.map(|r| r.lineage));
    let record = running()?;
    let unchanged = || Ok(owned()? && running()? == record);
    storage.prune(&CleanUp { policy, run, before, record: record.as_ref(), dry_run }, &unchanged)
}

fn kept_without_run(storage: &dyn Storage) -> io::Result<Vec<Foreign>> {
    let earlier = |(step, path, m): Found| Foreign {
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        step: Some(step),
        why: m.err().map_or_else(|| "written by an earlier version of everstep".into(), |why| why.to_string()),
    };
    let mut all: Vec<Foreign> = branch::newest_first(storage)?.into_iter().map(earlier).collect();
    all.extend(storage.foreign(None)?);
    Ok(all)
}

/// Entries named as checkpoints that everstep did not write, or that cannot be told.
///
/// # Errors
/// Those of reading the directory.
pub fn foreign(directory: &Path) -> io::Result<Vec<Foreign>> {
    let storage = at(directory)?;
    storage.foreign(identity::known_run(&*storage)?)
}

/// Writes down a shard that was written without anybody who collects what is: at the end of a job,
/// and without an agent.
///
/// # Errors
/// Those of the file system or store.
pub fn note(directory: &Path, mark: &Mark, step: u64, shard: &ShardFile) -> io::Result<()> {
    at(directory)?.note(mark, step, shard)
}

/// A small file beside the checkpoints, such as what was measured of them: as it was written last;
/// `None` when there is none.
///
/// # Errors
/// Those of the file system or store.
pub fn recall(directory: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
    at(directory)?.recall(name)
}

/// Writes it: a JSON object with the key `everstep`, by which it is known again. Something else of
/// this name is not replaced.
///
/// # Errors
/// As [`recall`]; `AlreadyExists` for something else.
pub fn remember(directory: &Path, name: &str, bytes: Vec<u8>) -> io::Result<()> {
    at(directory)?.remember(name, bytes)
}

/// What [`note`] has written for a rank, if it has.
#[must_use]
pub fn noted(directory: &Path, mark: &Mark, step: u64, rank: u32) -> Option<ShardFile> {
    at(directory).ok()?.noted(mark, step, rank)
}

/// Publishes what all ranks have noted, and forgets the notes.
///
/// # Errors
/// As [`publish`]; `NotFound` when a rank's note is missing.
pub fn publish_noted(directory: &Path, mark: &Mark, step: u64, world_size: u32, target: Target) -> io::Result<PathBuf> {
    let missing = |rank| io::Error::new(io::ErrorKind::NotFound, format!("step {step} was not written by rank {rank}"));
    let storage = at(directory)?;
    let shards = (0..world_size).map(|rank| storage.noted(mark, step, rank).ok_or_else(|| missing(rank)));
    let shards = shards.collect::<io::Result<Vec<ShardFile>>>()?;
    for rank in 0..world_size {
        gone(storage.forget(mark, step, rank))?;
    }
    publish(directory, mark, step, &shards, target)
}
