//! Durable checkpoints: shards and their manifest, on a file system ([`files`]) or in an object store ([`crate::objects`]). A directory is a
//! path, or the URL of a prefix in a store. Readers trust manifests only, and the manifest comes last.

mod branch;
mod disk;
mod entries;
mod files;
mod identity;
mod ownership;
mod prepared;
mod prune;

pub use branch::{BRANCH_FILE, Record, begin, recorded};
#[cfg(feature = "faults")]
pub use disk::faults;
pub use entries::mark_in;
pub use identity::{RUN_FILE, known_run, run_id};
pub use ownership::{Claim, ClaimError, Claimant, still_owned};
pub use prepared::Prepared;

use crate::arena::Slot;
use crate::direct::Throttle;
use crate::format::manifest::{Manifest, VERSION};
use crate::format::mark::Mark;
use crate::lineage::{self, Lineage, OUTSIDE, Place};
use crate::objects::{self, Location, is_url};
use crate::retain::Policy;
use everstep_core::id::{Rank, RunId};
use everstep_core::message::ShardFile;
use everstep_wire::limits::NOTE_BYTES_MAX;
use rustix::fs::FileType;
use std::cmp::Reverse;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Whoever makes a directory for a step leaves its mark there within this time.
const MARK_WITHIN: Duration = Duration::from_secs(2);

/// A published checkpoint: its step, its directory, its manifest or what is wrong with it.
pub type Found = (u64, PathBuf, Result<Manifest, String>);

/// Where a checkpoint is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// As the next one of the running branch. Where the name is taken, beside what has it.
    Branch,
    /// Under this very name, in no branch: saved through `torch.distributed.checkpoint`. Only what was saved in the same way is replaced.
    Exactly,
}

/// An entry that everstep leaves alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// Its name.
    pub name: String,
    /// The step in its name, if there is one.
    pub step: Option<u64>,
    /// Why it is not everstep's, or cannot be told.
    pub why: String,
}

/// What a clean-up has deleted, or would delete.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Checkpoints: steps and names.
    pub gone: Vec<(u64, String)>,
    /// Half of a checkpoint, left by writers that died.
    pub leftovers: Vec<String>,
    /// What is left alone, whatever is to be kept.
    pub foreign: Vec<Foreign>,
}

/// Where a checkpoint stands among the others of a directory. What comes from another directory has no place in its branches, but may be
/// what they began with.
#[must_use]
pub fn place_of(manifest: &Manifest, run: Option<RunId>) -> Place {
    let own = manifest.writer.filter(|w| Some(w.run) == run);
    let lineage = match (own, &manifest.lineage) {
        (Some(_), Some(lineage)) => lineage.clone(),
        (Some(_), None) => Lineage { branch: OUTSIDE, ..Lineage::default() },
        (None, _) => Lineage::default(),
    };
    Place { step: manifest.step, lineage }
}

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

/// Makes a checkpoint visible, if the directory is still its writer's, and says where. Doing it again changes nothing.
///
/// # Errors
/// Those of the file system or store; `PermissionDenied` when another job has taken the directory over; `AlreadyExists` where `target`
/// names what something else has.
pub fn publish(directory: &Path, mark: &Mark, step: u64, shards: &[ShardFile], target: Target) -> io::Result<PathBuf> {
    let lineage = match target {
        Target::Branch => Some(branch::running(directory, mark, step)?),
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
    if is_url(directory) {
        still_owned(directory, mark)?;
        return objects::publish(&Location::of(directory)?, mark, &manifest, target);
    }
    let to = files::publish(directory, mark, &manifest, target)?;
    // This process may have been stopped between the last look and the rename.
    let owned = still_owned(directory, mark);
    if owned.is_err() {
        files::withdraw(directory, &to, mark, step)?;
    }
    owned.map(|()| to)
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

/// Published checkpoints, newest first; damaged ones with the reason. Of several of one step, that of the branch that ran last comes first.
///
/// # Errors
/// Those of reading the directory; one that is missing holds none.
pub fn list(directory: &Path) -> io::Result<Vec<Found>> {
    let mut found = if is_url(directory) { objects::list(&Location::of(directory)?)? } else { files::list(directory)? };
    let order = |f: &Found| {
        let own = f.2.as_ref().ok().map(|m| (m.lineage.as_ref().map(|l| l.turn), m.purpose(), m.saved_at));
        (Reverse(f.0), Reverse(own), f.1.clone())
    };
    found.sort_by_cached_key(order);
    Ok(found)
}

/// Checkpoints that training goes on from when nobody asks for another: those of the branch that ran last, newest first, and damaged
/// ones, which may have been of it.
///
/// # Errors
/// As [`list`].
pub fn line(directory: &Path) -> io::Result<Vec<Found>> {
    let mut all = list(directory)?;
    let run = known_run(directory)?;
    let record = recorded(directory, run)?.map(|r| r.lineage);
    let places: Vec<Option<Place>> = all.iter().map(|(_, _, m)| m.as_ref().ok().map(|m| place_of(m, run))).collect();
    let known: Vec<Place> = places.iter().flatten().cloned().collect();
    let ran = lineage::last(record.as_ref(), &known).cloned().unwrap_or_default();
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

/// Deletes published checkpoints that `policy` does not keep, and what turns before that of `mark` left unpublished. Only what carries the
/// mark of this directory's run goes.
///
/// # Errors
/// Those of the file system or store.
pub fn prune(directory: &Path, policy: Policy, mark: &Mark) -> io::Result<Pruned> {
    still_owned(directory, mark)?;
    prune_of(directory, policy, mark.run, mark.turn(), false)
}

/// The same from outside of a job, which may be running: what it has not published yet is left alone. With `dry_run` only says what would
/// go.
///
/// # Errors
/// As [`prune()`].
pub fn prune_outside(directory: &Path, policy: Policy, dry_run: bool) -> io::Result<Pruned> {
    match known_run(directory)? {
        Some(run) => prune_of(directory, policy, run, (0, 0), dry_run),
        // Nothing here can carry its mark.
        None => Ok(Pruned { foreign: kept_without_run(directory)?, ..Pruned::default() }),
    }
}

fn prune_of(directory: &Path, policy: Policy, run: RunId, before: (u64, u64), dry_run: bool) -> io::Result<Pruned> {
    if is_url(directory) {
        objects::prune(&Location::of(directory)?, policy, run, before, dry_run)
    } else {
        prune::prune(directory, policy, run, before, dry_run)
    }
}

fn kept_without_run(directory: &Path) -> io::Result<Vec<Foreign>> {
    let earlier = |(step, path, m): Found| Foreign {
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        step: Some(step),
        why: m.err().unwrap_or_else(|| "written by an earlier version of everstep".into()),
    };
    let mut all: Vec<Foreign> = list(directory)?.into_iter().map(earlier).collect();
    all.extend(foreign(directory)?);
    Ok(all)
}

/// Entries named as checkpoints that everstep did not write, or that cannot be told.
///
/// # Errors
/// Those of reading the directory.
pub fn foreign(directory: &Path) -> io::Result<Vec<Foreign>> {
    if is_url(directory) { Ok(Vec::new()) } else { prune::foreign_in(directory, known_run(directory)?) }
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
        disk::read(&directory.join(name), NOTE_BYTES_MAX)
    };
    found.map(Some).or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(None) } else { Err(e) })
}

/// Writes it: a JSON object with the key `everstep`, by which it is known again. Something else of this name is not replaced.
///
/// # Errors
/// As [`recall`]; `AlreadyExists` for something else.
pub fn remember(directory: &Path, name: &str, bytes: Vec<u8>) -> io::Result<()> {
    let ours =
        |there: &[u8]| serde_json::from_slice::<serde_json::Value>(there).is_ok_and(|v| v.get("everstep").is_some());
    let not_ours = || {
        let what = format!("{name} is there and is not everstep's; move it away");
        Err(io::Error::new(io::ErrorKind::AlreadyExists, what))
    };
    if is_url(directory) {
        let at = Location::of(directory)?;
        return match recall(directory, name)? {
            Some(there) if !ours(&there) => not_ours(),
            _ => objects::remember(&at, name, bytes),
        };
    }
    let path = directory.join(name);
    match disk::kind(&path)? {
        None => {}
        Some(FileType::RegularFile) if ours(&disk::read(&path, NOTE_BYTES_MAX)?) => {}
        Some(_) => return not_ours(),
    }
    disk::write(&path, &bytes)?;
    disk::sync(directory)
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
pub fn publish_noted(directory: &Path, mark: &Mark, step: u64, world_size: u32, target: Target) -> io::Result<PathBuf> {
    let missing = |rank| io::Error::new(io::ErrorKind::NotFound, format!("step {step} was not written by rank {rank}"));
    let shards = (0..world_size).map(|rank| noted(directory, mark, step, rank).ok_or_else(|| missing(rank)));
    let shards = shards.collect::<io::Result<Vec<ShardFile>>>()?;
    // On a file system they go with the publication.
    for rank in (0..world_size).filter(|_| is_url(directory)) {
        gone(objects::forget(&Location::of(directory)?, mark, step, rank))?;
    }
    publish(directory, mark, step, &shards, target)
}

/// Whoever else deletes the same at this moment (the next step's publication, another agent) may be first.
fn gone(done: io::Result<()>) -> io::Result<()> {
    done.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
}
