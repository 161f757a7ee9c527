//! Shards and their manifest on a file system, so that a crash at any point leaves the previous
//! checkpoint whole.
//!
//! ```text
//!  step-N.tmp-E.G/everstep-mark.json   the first rank: the writer (E: epoch of the directory's owner, G: its generation)
//!  step-N.tmp-E.G/rank-R.safetensors   each rank: write, fsync
//!  step-N.tmp-E.G/manifest.json        the leader, when all shards are there: write, fsync, fsync directory
//!  step-N/                             rename, fsync parent: from now on it exists
//!  step-N.2/                           the same where `step-N` is taken, by whatever it may be
//! ```

use super::entries::{
    self, SAME_STEP_MAX, What, free_name, is_shard_or_note, mark_in, mark_of, name_of, only_ours_in, unpublished_name,
};
use super::opened::{Opened, forget};
use super::{disk, prune};
use crate::direct_io::{Throttle, write_file};
use crate::format::manifest::{MANIFEST_FILE, Manifest};
use crate::format::mark::{MARK_FILE, Mark};
use crate::sealed_shard::SealedShard;
use crate::storage::{Found, StillOwned, Target, Unreadable};
use everstep_core::id::RunId;
use everstep_core::message::ShardFile;
use everstep_wire::limits::NOTE_BYTES_MAX;
use rustix::fs::FileType;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The process that makes the directory of a step writes its mark there within this time.
const MARK_WITHIN: Duration = Duration::from_secs(2);

fn unpublished(directory: &Path, step: u64, mark: &Mark) -> PathBuf {
    directory.join(unpublished_name(step, mark))
}

fn taken(path: &Path, why: &str) -> io::Error {
    let what = format!("{} already exists and is not replaced: {why}; move it away", path.display());
    io::Error::new(io::ErrorKind::AlreadyExists, what)
}

/// Makes the directory that a step is written to, with its mark first. A directory that exists
/// already must have the same mark.
fn prepare(directory: &Path, step: u64, mark: &Mark) -> io::Result<PathBuf> {
    let target = unpublished(directory, step, mark);
    // Ranks of several hosts may do this at the same time: the one that made the directory writes
    // the mark, and the others wait for it.
    if disk::make(&target)? {
        let marked = serde_json::to_vec(mark).map_err(io::Error::from);
        let marked = marked.and_then(|m| disk::write(&target.join(MARK_FILE), &m)).and_then(|()| disk::sync(&target));
        if marked.is_err() {
            // Without a mark, its origin would be unknown.
            forget(&target, MARK_FILE.as_ref());
            let _ = fs::remove_dir(&target);
        }
        return marked.map(|()| target);
    }
    if disk::kind(&target)? != Some(FileType::Directory) {
        return Err(taken(&target, "it is not a directory"));
    }
    let since = std::time::Instant::now();
    loop {
        match mark_in(&target)? {
            Some(there) if there.run == mark.run && there.turn() == mark.turn() => return Ok(target),
            Some(_) => return Err(taken(&target, "another job wrote it")),
            None if since.elapsed() < MARK_WITHIN => std::thread::sleep(MARK_WITHIN / 100),
            None => return Err(taken(&target, "everstep did not write it")),
        }
    }
}

/// Writes a prepared shard, bypassing the page cache.
///
/// # Errors
/// Those of the file system; `InvalidData` when the slot does not contain the step any more.
pub(super) fn write_shard(
    directory: &Path,
    of: &SealedShard,
    mark: &Mark,
    throttle: &Throttle,
) -> io::Result<ShardFile> {
    fs::create_dir_all(directory)?;
    let within = prepare(directory, of.label.step, mark)?;
    let target = within.join(&of.name);
    if disk::kind(&target)?.is_some_and(|k| k != FileType::RegularFile) {
        return Err(taken(&target, "it is not a file"));
    }
    disk::before_call()?;
    // Whole pages are written and the last one cut.
    write_file(&target, &of.header, of.body()?, of.region, throttle).inspect_err(|_| discard(&within, &target))?;
    disk::before_call()?;
    of.written(of.name.clone())
}

/// Deletes a shard that could not be written. Its step will not be published, and a full disk needs
/// the space at once. The directory is deleted with the last of its shards.
fn discard(within: &Path, shard: &Path) {
    forget(within, shard.file_name().unwrap_or_default());
    if disk::names(within).is_ok_and(|names| names.iter().all(|n| n == MARK_FILE)) {
        forget(within, MARK_FILE.as_ref());
        let _ = fs::remove_dir(within);
    }
}

/// A published checkpoint: its path, and whether it has replaced an earlier one of the same step.
pub(super) struct Published {
    pub at: PathBuf,
    pub replaced: bool,
}

/// Makes a checkpoint visible, under the first free name for its step. A second call changes
/// nothing.
///
/// # Errors
/// Those of the file system; `AlreadyExists` if the name was given by the user and is taken by
/// something that may not be replaced; `NotFound` if a shard is missing.
pub(super) fn publish(
    directory: &Path,
    mark: &Mark,
    manifest: &Manifest,
    target: Target,
    still_owned: StillOwned<'_>,
) -> io::Result<Published> {
    let from = unpublished(directory, manifest.step, mark);
    match disk::kind(&from)? {
        Some(FileType::Directory) => {}
        Some(_) => return Err(taken(&from, "it is not a directory")),
        None => return published_before(directory, mark, manifest).map(|at| Published { at, replaced: true }),
    }
    let inside = Opened::checkpoint(&from)?;
    match mark_of(&inside)? {
        Some(there) if there.run == mark.run && there.turn() == mark.turn() => {}
        _ => return Err(taken(&from, "this job did not write it")),
    }
    // Files that an earlier life of the job has left under the same name.
    for name in inside.names()? {
        let stray = name.to_str().is_some_and(|n| is_shard_or_note(n) && !manifest.shards.iter().any(|s| s.file == n));
        if stray {
            inside.remove(name)?;
        }
    }
    for shard in &manifest.shards {
        if disk::length(&from.join(&shard.file))? != Some(shard.bytes) {
            let what = format!("{} in {} is missing or was changed", shard.file, from.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, what));
        }
    }
    disk::write(&from.join(MANIFEST_FILE), &manifest.to_bytes().map_err(io::Error::other)?)?;
    disk::sync(&from)?;
    // As late as possible: there is a moment between this check and the rename, so the caller
    // checks again after the rename.
    still_owned()?;
    let newer = |m: &Manifest| m.writer.is_some_and(|w| w.run == mark.run && w.turn() > mark.turn());
    if read_manifest(&directory.join(name_of(manifest.step, 1))).is_ok_and(|m| newer(&m)) {
        let what = "a later owner of the directory has published this step";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    let published = match target {
        Target::Branch => in_branch(directory, &from, manifest, mark.run)?,
        Target::Exactly => exactly(directory, &from, manifest, mark.run)?,
    };
    disk::sync(directory)?;
    Ok(published)
}

/// Withdraws a checkpoint that was published by a writer that did not own the directory any more,
/// so that its owner deletes it with the leftovers of past owners.
///
/// # Errors
/// Those of the file system.
pub(super) fn withdraw(directory: &Path, to: &Path, mark: &Mark, step: u64) -> io::Result<()> {
    if mark_in(to)?.is_some_and(|found| found == *mark) {
        disk::rename_new(to, &unpublished(directory, step, mark))?;
        disk::sync(directory)?;
    }
    Ok(())
}

fn published_before(directory: &Path, mark: &Mark, manifest: &Manifest) -> io::Result<PathBuf> {
    let same = |m: &Manifest| m.writer.is_some_and(|w| w.run == mark.run) && m.shards == manifest.shards;
    for number in 1..=SAME_STEP_MAX {
        let path = directory.join(name_of(manifest.step, number));
        if disk::kind(&path)?.is_none() {
            break;
        }
        if read_manifest(&path).is_ok_and(|m| same(&m)) {
            return Ok(path);
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "its shards are not there; they were moved or deleted"))
}

fn in_branch(directory: &Path, from: &Path, manifest: &Manifest, run: RunId) -> io::Result<Published> {
    let step = manifest.step;
    let first = directory.join(name_of(step, 1));
    if let What::Checkpoint { manifest: old, kept: None } = entries::look(&first, &name_of(step, 1), Some(run))
        && manifest.stands_for(&old, run, false)
    {
        return replace(directory, from, first, &old);
    }
    let mut number = 1;
    loop {
        let to = match number {
            1 => first.clone(),
            _ => free_name(directory, step, number)?,
        };
        match disk::rename_new(from, &to) {
            Ok(()) => return Ok(Published { at: to, replaced: false }),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && number < SAME_STEP_MAX => number += 1,
            Err(e) => return Err(e),
        }
    }
}

fn exactly(directory: &Path, from: &Path, manifest: &Manifest, run: RunId) -> io::Result<Published> {
    let to = directory.join(name_of(manifest.step, 1));
    if disk::kind(&to)?.is_none() {
        return disk::rename_new(from, &to).map(|()| Published { at: to, replaced: false });
    }
    // Saving under a name again replaces what was saved under it in the same way, and nothing else.
    let What::Checkpoint { manifest: old, .. } = entries::look(&to, &name_of(manifest.step, 1), Some(run)) else {
        return Err(taken(&to, "everstep did not write it, or cannot read it"));
    };
    if !manifest.stands_for(&old, run, true) {
        return Err(taken(&to, "everstep.dcp.Writer did not save it there"));
    }
    only_ours_in(&to, &old).map_err(|why| taken(&to, &why.to_string()))?;
    replace(directory, from, to, &old)
}

/// Replaces a checkpoint by one that stands for it. At any moment, one of them can be read.
fn replace(directory: &Path, from: &Path, to: PathBuf, old: &Manifest) -> io::Result<Published> {
    let aside = if disk::exchange(from, &to)? {
        from.to_owned()
    } else {
        let aside = free_name(directory, old.step, 2)?;
        disk::rename_new(&to, &aside)?;
        if let Err(e) = disk::rename_new(from, &to) {
            disk::rename_new(&aside, &to)?;
            return Err(e);
        }
        aside
    };
    disk::sync(directory)?;
    // If it cannot be deleted now, it is found later by its mark of an earlier turn.
    let name = aside.file_name().unwrap_or_default().to_string_lossy();
    let _ = Opened::chosen(directory).and_then(|at| prune::delete(&at, &name, old));
    Ok(Published { at: to, replaced: true })
}

/// Reads the manifest of a published checkpoint.
///
/// # Errors
/// [`Unreadable`].
pub(super) fn read_manifest(checkpoint: &Path) -> Result<Manifest, Unreadable> {
    entries::manifest_in(checkpoint)
}

/// Returns the published checkpoints; damaged ones with the reason.
///
/// # Errors
/// Those of reading the directory; a missing directory has no checkpoints.
pub(super) fn list(directory: &Path) -> io::Result<Vec<Found>> {
    let mut found: Vec<Found> = Vec::new();
    for entry in entries::scan(directory, None)? {
        let path = directory.join(&entry.name);
        match entry.what {
            What::Checkpoint { manifest, .. } => found.push((manifest.step, path, Ok(*manifest))),
            What::Damaged { step, why } => found.push((step, path, Err(why))),
            _ => {}
        }
    }
    Ok(found)
}

fn note_of(directory: &Path, mark: &Mark, step: u64, rank: u32) -> PathBuf {
    unpublished(directory, step, mark).join(format!(".rank-{rank}.json"))
}

/// Writes a note of a shard beside it, for the process that publishes.
///
/// # Errors
/// Those of the file system.
pub(super) fn note(directory: &Path, mark: &Mark, step: u64, shard: &ShardFile) -> io::Result<()> {
    disk::write(&note_of(directory, mark, step, shard.rank.0), &serde_json::to_vec(shard)?)
}

/// Returns the shard that [`note`] has written for a rank.
#[must_use]
pub(super) fn noted(directory: &Path, mark: &Mark, step: u64, rank: u32) -> Option<ShardFile> {
    serde_json::from_slice(&disk::read(&note_of(directory, mark, step, rank), NOTE_BYTES_MAX).ok()?).ok()
}
