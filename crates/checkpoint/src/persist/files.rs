//! Shards and their manifest on a file system, so that a crash at any point leaves the previous checkpoint whole.
//!
//! ```text
//!  step-N.tmp-E.G/everstep-mark.json   whoever is first: who writes here (E: epoch of the directory's owner, G: its generation)
//!  step-N.tmp-E.G/rank-R.safetensors   each rank: write, fsync
//!  step-N.tmp-E.G/manifest.json        the leader, when all shards are there: write, fsync, fsync directory
//!  step-N/                             rename, fsync parent: from now on it exists
//! ```

use super::prepared::Prepared;
use super::{Found, gone, step_directory, still_owned};
use crate::direct::{Throttle, write_file};
use crate::format::manifest::{MANIFEST_FILE, Manifest};
use crate::format::mark::{MARK_FILE, Mark, turn_of};
use crate::objects::unique;
use crate::regular::read_regular;
use crate::retain::{Candidate, Policy, surplus};
use everstep_core::message::ShardFile;
use everstep_wire::limits::{MANIFEST_BYTES_MAX, NOTE_BYTES_MAX};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

fn unpublished(directory: &Path, step: u64, mark: &Mark) -> PathBuf {
    directory.join(format!("step-{step}.tmp-{}", mark.turn_text()))
}

/// Step and turn of a directory that is not published yet, by its name.
fn unpublished_of(name: &str) -> Option<(u64, (u64, u64))> {
    let (step, turn) = name.strip_prefix("step-")?.split_once(".tmp-")?;
    Some((step.parse().ok()?, turn_of(turn)?))
}

/// Says whose a directory is, before anything else is in it. All ranks write the same.
fn leave_mark(target: &Path, mark: &Mark) -> io::Result<()> {
    let path = target.join(MARK_FILE);
    if path.exists() {
        return Ok(());
    }
    // Ranks of several hosts may do this at the same time.
    let temporary = target.join(format!(".{MARK_FILE}.{:016x}", unique()));
    fs::write(&temporary, serde_json::to_vec(mark)?)?;
    fs::rename(&temporary, &path)
}

/// The mark in a checkpoint's directory, published or not; `None` where there is none.
///
/// # Errors
/// Those of the file system; `InvalidData` for a mark that cannot be read.
pub fn mark_in(directory: &Path) -> io::Result<Option<Mark>> {
    match read_regular(&directory.join(MARK_FILE), NOTE_BYTES_MAX) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Writes a prepared shard past the page cache.
///
/// # Errors
/// Those of the file system; `InvalidData` when the slot does not hold the step any more.
pub fn write_shard(directory: &Path, of: &Prepared<'_>, mark: &Mark, throttle: &Throttle) -> io::Result<ShardFile> {
    let target = unpublished(directory, of.label.step, mark);
    fs::create_dir_all(&target)?;
    leave_mark(&target, mark)?;
    // Whole pages are written and the last one cut.
    write_file(&target.join(&of.name), &of.header, of.body()?, of.region, throttle)?;
    of.written(of.name.clone())
}

/// Makes a checkpoint visible. Doing it again changes nothing.
///
/// # Errors
/// Those of the file system.
pub fn publish(directory: &Path, mark: &Mark, manifest: &Manifest) -> io::Result<()> {
    let step = manifest.step;
    let (from, to) = (unpublished(directory, step, mark), step_directory(directory, step));
    if !from.exists() && read_manifest(&to).is_ok_and(|m| m.step == step && m.shards == manifest.shards) {
        return Ok(());
    }
    let mut file = File::create(from.join(MANIFEST_FILE))?;
    file.write_all(&manifest.to_bytes().map_err(io::Error::other)?)?;
    file.sync_all()?;
    sync_directory(&from)?;
    // As late as possible: between this look and the rename is a moment, and `persist::publish` looks once more after it.
    still_owned(directory, mark)?;
    let newer = |m: &Manifest| m.writer.is_some_and(|w| w.run == mark.run && w.turn() > mark.turn());
    if read_manifest(&to).is_ok_and(|m| newer(&m)) {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "a later owner of the directory has published this step",
        ));
    }
    if to.exists() {
        // The same step once more, after a rollback: swap, so that there is never none.
        renameat_with(CWD, &from, CWD, &to, RenameFlags::EXCHANGE)?;
        sync_directory(directory)?;
        fs::remove_dir_all(&from)?;
    } else {
        fs::rename(&from, &to)?;
    }
    sync_directory(directory)
}

/// Takes back what was published by a writer that did not own the directory any more, so that its owner deletes it with what past owners
/// left.
///
/// # Errors
/// Those of the file system.
pub fn withdraw(directory: &Path, mark: &Mark, step: u64) -> io::Result<()> {
    let to = step_directory(directory, step);
    if mark_in(&to)?.is_some_and(|found| found == *mark) {
        fs::rename(&to, unpublished(directory, step, mark))?;
        sync_directory(directory)?;
    }
    Ok(())
}

/// Reads the manifest of a published checkpoint.
///
/// # Errors
/// A sentence with the path.
pub fn read_manifest(checkpoint: &Path) -> Result<Manifest, String> {
    let path = checkpoint.join(MANIFEST_FILE);
    let bytes = read_regular(&path, MANIFEST_BYTES_MAX);
    let bytes = bytes.map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    Manifest::from_bytes(&bytes).map_err(|e| format!("{}: {e}", path.display()))
}

/// Published checkpoints, newest first; damaged ones with the reason.
///
/// # Errors
/// Those of reading the directory; a missing directory holds none.
pub fn list(directory: &Path) -> io::Result<Vec<Found>> {
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let step = name.to_str().and_then(|n| n.strip_prefix("step-")).and_then(|n| n.parse::<u64>().ok());
        if let Some(step) = step {
            let manifest = read_manifest(&entry.path()).and_then(|m| {
                if m.step == step { Ok(m) } else { Err(format!("{} holds step {}", entry.path().display(), m.step)) }
            });
            found.push((step, entry.path(), manifest));
        }
    }
    found.sort_by_key(|f: &Found| std::cmp::Reverse(f.0));
    Ok(found)
}

/// Deletes published checkpoints that `policy` does not keep, and what turns before that of
/// `mark` left unpublished. The manifest goes first, so that half a deletion never looks like a checkpoint.
/// Returns the steps that went.
///
/// # Errors
/// Those of the file system.
pub fn prune(directory: &Path, policy: Policy, mark: &Mark) -> io::Result<Vec<u64>> {
    let good: Vec<(Candidate, PathBuf)> = list(directory)?
        .into_iter()
        .filter_map(|(step, path, m)| {
            let m = m.ok()?;
            Some((Candidate { step, saved_at: m.saved_at, purpose: m.purpose() }, path))
        })
        .collect();
    let go = surplus(policy, &good.iter().map(|(c, _)| *c).collect::<Vec<_>>());
    for (_, path) in good.iter().filter(|(c, _)| go.contains(&c.step)) {
        gone(fs::remove_file(path.join(MANIFEST_FILE)))?;
        // What follows may be lost half-way, the missing manifest may not.
        gone(sync_directory(path))?;
        gone(fs::remove_dir_all(path))?;
    }
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|n| n.strip_prefix("step-")) else { continue };
        let turn = name.to_str().and_then(unpublished_of).map(|(_, turn)| turn);
        // A deletion that a crash cut short leaves shards without a manifest.
        let emptied = rest.parse::<u64>().is_ok() && !entry.path().join(MANIFEST_FILE).exists();
        if emptied || turn.is_some_and(|t| t < mark.turn()) {
            gone(fs::remove_dir_all(entry.path()))?;
        }
    }
    Ok(go)
}

fn note_of(directory: &Path, mark: &Mark, step: u64, rank: u32) -> PathBuf {
    unpublished(directory, step, mark).join(format!(".rank-{rank}.json"))
}

/// Writes down a shard beside it, for whoever publishes.
///
/// # Errors
/// Those of the file system.
pub fn note(directory: &Path, mark: &Mark, step: u64, shard: &ShardFile) -> io::Result<()> {
    let path = note_of(directory, mark, step, shard.rank.0);
    let temporary = path.with_extension("new");
    fs::write(&temporary, serde_json::to_vec(shard)?)?;
    fs::rename(&temporary, &path)
}

/// What [`note`] has written for a rank.
#[must_use]
pub fn noted(directory: &Path, mark: &Mark, step: u64, rank: u32) -> Option<ShardFile> {
    serde_json::from_slice(&read_regular(&note_of(directory, mark, step, rank), NOTE_BYTES_MAX).ok()?).ok()
}

/// Removes a note.
///
/// # Errors
/// Those of the file system; `NotFound`.
pub fn forget(directory: &Path, mark: &Mark, step: u64, rank: u32) -> io::Result<()> {
    fs::remove_file(note_of(directory, mark, step, rank))
}
