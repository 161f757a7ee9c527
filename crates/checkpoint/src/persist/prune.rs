//! Deleting on a file system: what retention lets go, and what writers of this run left that died
//! half-way.
//!
//! ```text
//!  step-N/          rename, fsync parent: from now on it does not exist
//!  step-N.gone-X/   the files that its manifest names, the mark, the manifest; then the directory, if nothing else is in it
//! ```

use super::disk;
use super::entries::{self, Entry, What, deleting_name, is_plain, is_shard_or_note, only_ours};
use crate::format::manifest::{MANIFEST_FILE, Manifest};
use crate::format::mark::{MARK_FILE, Mark};
use crate::lineage;
use crate::retain::{Candidate, surplus};
use crate::storage::{CleanUp, Foreign, Pruned, Unchanged, candidate};
use everstep_core::id::RunId;
use rustix::fs::FileType;
use std::io;
use std::path::Path;

/// Deletes published checkpoints that `policy` does not keep, and what turns before that of `mark`
/// left unpublished, as long as the directory is `unchanged`. With `dry_run` only says so.
///
/// # Errors
/// Those of the file system. What could not be read is left alone.
pub(super) fn prune(directory: &Path, what: &CleanUp<'_>, unchanged: Unchanged<'_>) -> io::Result<Pruned> {
    let CleanUp { policy, run, before, record, dry_run } = *what;
    let all = entries::scan(directory, Some(run))?;
    let places = entries::places(&all, Some(run));
    let running = lineage::last(record, &places).cloned().unwrap_or_default();
    let own: Vec<(&Entry, &Manifest)> = all
        .iter()
        .filter_map(|e| match &e.what {
            What::Checkpoint { manifest, kept: None, .. } => Some((e, &**manifest)),
            _ => None,
        })
        .collect();
    let candidates: Vec<Candidate> = own.iter().map(|(_, m)| candidate(m, run)).collect();
    let mut done = Pruned { foreign: foreign(&all), ..Pruned::default() };
    let kept = |m: &Manifest| m.writer.is_some_and(|w| w.run == run) && m.lineage.is_some();
    let unread = all.iter().any(|e| match &e.what {
        What::Damaged { .. } => true,
        What::Checkpoint { manifest, kept: Some(_) } => kept(manifest),
        _ => false,
    });
    for (entry, manifest) in surplus(policy, &running, &candidates, unread).into_iter().filter_map(|i| own.get(i)) {
        if !dry_run {
            let path = directory.join(&entry.name);
            // During the deletions, training may have gone back to a checkpoint that comes next.
            if !unchanged()? {
                return Ok(done);
            }
            // Somebody may have put something into it meanwhile, or something else in its place.
            let same = entries::manifest_in(&path).is_ok_and(|there| there == **manifest);
            if !same || only_ours(&path, manifest).is_err() {
                continue;
            }
            delete(directory, &path, manifest)?;
        }
        done.gone.push((manifest.step, entry.name.clone()));
    }
    for entry in &all {
        let path = directory.join(&entry.name);
        match &entry.what {
            What::Unpublished(mark) if mark.turn() < before => {
                if !dry_run {
                    discard(&path, mark)?;
                }
            }
            What::Deleting(manifest) => {
                if !dry_run {
                    empty(&path, manifest)?;
                }
            }
            _ => continue,
        }
        done.leftovers.push(entry.name.clone());
    }
    Ok(done)
}

/// What is left alone for good, with the reason.
fn foreign(all: &[Entry]) -> Vec<Foreign> {
    let why = |e: &Entry| match &e.what {
        What::Foreign { step, why } => Some((*step, why.clone())),
        What::Damaged { step, why } => Some((Some(*step), why.to_string())),
        What::Checkpoint { manifest, kept: Some(why), .. } => Some((Some(manifest.step), why.to_string())),
        _ => None,
    };
    all.iter().filter_map(|e| why(e).map(|(step, why)| Foreign { name: e.name.clone(), step, why })).collect()
}

/// Entries that everstep did not write, or cannot tell.
///
/// # Errors
/// Those of reading the directory.
pub(super) fn foreign_in(directory: &Path, run: Option<RunId>) -> io::Result<Vec<Foreign>> {
    let all = entries::scan(directory, run)?;
    let unknown: Vec<Entry> = all.into_iter().filter(|e| matches!(e.what, What::Foreign { .. })).collect();
    Ok(foreign(&unknown))
}

/// Deletes a checkpoint of this run: first it does not exist any more, then its files go.
pub(super) fn delete(directory: &Path, path: &Path, manifest: &Manifest) -> io::Result<()> {
    let going = directory.join(deleting_name(manifest.step));
    match disk::rename_new(path, &going) {
        // Whoever else deletes the same at this moment was first.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    }
    disk::sync(directory)?;
    empty(&going, manifest)
}

/// The rest of a deletion. The manifest, which shows whose it is, goes last.
fn empty(path: &Path, manifest: &Manifest) -> io::Result<()> {
    for shard in manifest.shards.iter().filter(|s| is_plain(&s.file)) {
        disk::remove(&path.join(&shard.file))?;
    }
    disk::remove(&path.join(MARK_FILE))?;
    disk::sync(path)?;
    disk::remove(&path.join(MANIFEST_FILE))?;
    disk::remove_empty(path).map(drop)
}

/// Deletes what was never published. The mark goes last.
fn discard(path: &Path, mark: &Mark) -> io::Result<()> {
    if entries::mark_in(path)?.as_ref() != Some(mark) {
        return Ok(());
    }
    for name in disk::names(path)? {
        let file = path.join(&name);
        let known = name.to_str().is_some_and(|n| is_shard_or_note(n) || n == MANIFEST_FILE);
        if known && disk::kind(&file)? == Some(FileType::RegularFile) {
            disk::remove(&file)?;
        }
    }
    if disk::names(path)?.iter().all(|n| *n == *MARK_FILE) {
        disk::remove(&path.join(MARK_FILE))?;
        disk::remove_empty(path)?;
    }
    Ok(())
}
