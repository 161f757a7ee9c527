//! Classifies the entries of a directory of checkpoints: ours, foreign, or unknown. Names prove
//! nothing. An entry is ours if it has the mark of this directory's run, and only if it contains
//! nothing that everstep did not write.

use super::disk;
use super::opened::Opened;
use crate::format::manifest::{MANIFEST_FILE, Manifest};
use crate::format::mark::{MARK_FILE, Mark, turn_of};
use crate::lineage::Place;
use crate::storage::{Runs, Unreadable};
use crate::unique_id::unique_id;
use everstep_core::id::RunId;
use everstep_wire::limits::{MANIFEST_BYTES_MAX, NOTE_BYTES_MAX};
use rustix::fs::FileType;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum number of checkpoints of one step beside each other: of several branches, or automatic
/// and the user's.
pub(super) const SAME_STEP_MAX: u32 = 1000;

/// An entry whose name begins with `step-`.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// Name in the directory.
    pub name: String,
    /// Kind of the entry.
    pub what: What,
}

/// Kinds of entries.
#[derive(Clone, Debug)]
pub(super) enum What {
    /// A checkpoint that can be read.
    Checkpoint {
        /// Contents of its `manifest.json`.
        manifest: Box<Manifest>,
        /// Why it must not be deleted.
        kept: Option<NotOurs>,
    },
    /// An entry that was a checkpoint, or may be one, and cannot be read.
    Damaged {
        /// The step in its name.
        step: u64,
        /// Why it cannot be read.
        why: Unreadable,
    },
    /// Written by this run and not published, or not yet.
    Unpublished(Mark),
    /// A checkpoint whose deletion was not completed.
    Deleting(Box<Manifest>),
    /// An entry that everstep did not write, or of unknown origin.
    Foreign {
        /// The step in its name, if it has one.
        step: Option<u64>,
        /// Why it is left alone.
        why: String,
    },
}

/// Reason why a checkpoint is never deleted, whatever the retention policy.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum NotOurs {
    #[error("written by an earlier version of everstep")]
    Earlier,
    #[error("written for another directory")]
    OtherDirectory,
    #[error("saved through torch.distributed.checkpoint")]
    Exactly,
    #[error("its manifest names files that are not in it")]
    FilesElsewhere,
    #[error("it cannot be read: {0}")]
    Unreadable(Arc<io::Error>),
    #[error("{name} in it cannot be read: {source}")]
    UnreadableFile { name: String, source: Arc<io::Error> },
    #[error("it holds {0}, which everstep did not write")]
    Holds(String),
}

/// Returns the name of a checkpoint: `step-N` for the first one of a step, `step-N.2` for the
/// second.
#[must_use]
pub(super) fn name_of(step: u64, number: u32) -> String {
    if number < 2 { format!("step-{step}") } else { format!("step-{step}.{number}") }
}

/// Returns the step and the number in a name that [`name_of`] makes.
#[must_use]
pub(super) fn named(name: &str) -> Option<(u64, u32)> {
    let rest = name.strip_prefix("step-")?;
    let (step, number) = rest.split_once('.').unwrap_or((rest, "1"));
    let found = (step.parse().ok()?, number.parse().ok()?);
    // `step-07` and `step-+7` are not names that everstep gives.
    (name_of(found.0, found.1) == name).then_some(found)
}

/// Returns the name of a checkpoint while it is written.
#[must_use]
pub(super) fn unpublished_name(step: u64, mark: &Mark) -> String {
    format!("step-{step}.tmp-{}", mark.turn_text())
}

fn unpublished_named(name: &str) -> Option<(u64, (u64, u64))> {
    let (step, turn) = name.strip_prefix("step-")?.split_once(".tmp-")?;
    Some((step.parse().ok()?, turn_of(turn)?))
}

/// Returns the name of a checkpoint while it is deleted.
#[must_use]
pub(super) fn deleting_name(step: u64) -> String {
    format!("step-{step}.gone-{:016x}", unique_id())
}

fn deleting_named(name: &str) -> Option<u64> {
    let (step, unique) = name.strip_prefix("step-")?.split_once(".gone-")?;
    (unique.len() == 16).then(|| step.parse().ok()).flatten()
}

fn is_rank(text: &str) -> bool {
    text.parse::<u32>().is_ok()
}

/// Returns whether a name is that of a rank's shard.
#[must_use]
pub(super) fn is_shard(name: &str) -> bool {
    name.strip_prefix("rank-").and_then(|n| n.strip_suffix(".safetensors")).is_some_and(is_rank)
}

/// Returns whether a file can be in a checkpoint's directory before it is published.
#[must_use]
pub(super) fn is_shard_or_note(name: &str) -> bool {
    let note = name.strip_prefix(".rank-").and_then(|n| n.split_once('.')).is_some_and(|(n, _)| is_rank(n));
    // Temporary files that are renamed to the names of the mark and the manifest.
    let side = [MARK_FILE, MANIFEST_FILE].iter().any(|f| name.strip_prefix('.').is_some_and(|n| n.starts_with(f)));
    is_shard(name) || note || side
}

/// Returns whether the file that a manifest names is in the manifest's own directory.
#[must_use]
fn is_plain(file: &str) -> bool {
    !file.is_empty() && !file.contains(['/', '\0']) && file != "." && file != ".."
}

/// Returns the mark in a checkpoint's directory, published or not; `None` if there is none.
///
/// # Errors
/// Those of the file system; `InvalidData` for a mark that cannot be read.
pub fn mark_in(directory: &Path) -> io::Result<Option<Mark>> {
    mark_read(disk::read(&directory.join(MARK_FILE), NOTE_BYTES_MAX))
}

/// Returns the mark in a checkpoint's directory that is held open; `None` if there is none.
///
/// # Errors
/// The same as for [`mark_in`].
pub(super) fn mark_of(inside: &Opened) -> io::Result<Option<Mark>> {
    mark_read(inside.read(MARK_FILE, NOTE_BYTES_MAX))
}

fn mark_read(file: io::Result<Vec<u8>>) -> io::Result<Option<Mark>> {
    match file {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Reads the manifest in a checkpoint's directory.
///
/// # Errors
/// [`Unreadable`].
pub(super) fn manifest_in(checkpoint: &Path) -> Result<Manifest, Unreadable> {
    let path = checkpoint.join(MANIFEST_FILE);
    let bytes = disk::read(&path, MANIFEST_BYTES_MAX).map_err(|e| Unreadable::io(path.display(), e))?;
    let invalid = |source| Unreadable::Invalid { at: path.display().to_string(), source };
    Manifest::from_bytes(&bytes).map_err(invalid)
}

/// Returns all entries that may be checkpoints, by name. Entries with other names are ignored.
///
/// # Errors
/// Those of reading the directory; an entry that cannot be read is not an error.
pub(super) fn scan(directory: &Path, run: Option<RunId>) -> io::Result<Vec<Entry>> {
    let names = disk::names(directory)?.into_iter();
    let steps = names.filter(|n| n.as_encoded_bytes().starts_with(b"step-"));
    Ok(steps
        .map(|name| {
            let path = directory.join(&name);
            let name = name.to_string_lossy().into_owned();
            let what = look(&path, &name, run);
            Entry { name, what }
        })
        .collect())
}

/// Classifies one entry.
pub(super) fn look(path: &Path, name: &str, run: Option<RunId>) -> What {
    let step_named = named(name).map(|(step, _)| step);
    let foreign = |why: String| What::Foreign { step: step_named, why };
    match disk::kind(path) {
        Ok(Some(FileType::Directory)) => {}
        Ok(Some(FileType::Symlink)) => return foreign("a link".into()),
        Ok(Some(_)) => return foreign("not a directory".into()),
        Ok(None) => return foreign("deleted in the meantime".into()),
        Err(e) => {
            let why = Unreadable::io(path.display(), e);
            return match step_named {
                Some(step) => What::Damaged { step, why },
                None => foreign(why.to_string()),
            };
        }
    }
    if let Some(step) = step_named {
        return published(path, step, run);
    }
    if let Some((_, turn)) = unpublished_named(name) {
        return match mark_in(path) {
            Ok(Some(mark)) if Some(mark.run) == run && mark.turn() == turn => What::Unpublished(mark),
            // A checkpoint of an earlier turn that was replaced, and was still to be deleted.
            Ok(Some(mark)) if Some(mark.run) == run && mark.turn() < turn && is_of(path, run) => {
                What::Unpublished(mark)
            }
            Ok(Some(mark)) if Some(mark.run) == run => foreign(format!("its {MARK_FILE} does not match its name")),
            Ok(Some(_)) => foreign("written for another directory".into()),
            Ok(None) => foreign(format!("it has no {MARK_FILE}")),
            Err(e) => foreign(format!("its {MARK_FILE} cannot be read: {e}")),
        };
    }
    if let Some(step) = deleting_named(name) {
        return match manifest_in(path) {
            Ok(m) if m.step == step && run.is_some() && m.writer.map(|w| w.run) == run => What::Deleting(Box::new(m)),
            Ok(_) => foreign("it belongs to another directory".into()),
            Err(why) => foreign(why.to_string()),
        };
    }
    foreign("not a name that everstep uses".into())
}

/// Returns whether the manifest in a directory is of this run.
fn is_of(path: &Path, run: Option<RunId>) -> bool {
    run.is_some() && manifest_in(path).is_ok_and(|m| m.writer.map(|w| w.run) == run)
}

fn published(path: &Path, step: u64, run: Option<RunId>) -> What {
    let foreign = |why: String| What::Foreign { step: Some(step), why };
    match manifest_in(path) {
        Ok(m) if m.step != step => {
            What::Damaged { step, why: Unreadable::OtherStep { at: path.display().to_string(), step: m.step } }
        }
        Ok(m) => {
            let kept = not_ours(path, &m, run);
            What::Checkpoint { manifest: Box::new(m), kept }
        }
        Err(why) if why.is_missing() => match disk::names(path) {
            Err(e) => What::Damaged { step, why: Unreadable::io(path.display(), e) },
            Ok(files) if files.iter().any(|f| f.to_str().is_some_and(is_shard_or_note) || *f == *MARK_FILE) => {
                What::Damaged { step, why }
            }
            Ok(_) => foreign("not an everstep checkpoint".into()),
        },
        Err(why) => What::Damaged { step, why },
    }
}

/// Returns why a checkpoint is never deleted; `None` if it may be deleted.
fn not_ours(path: &Path, manifest: &Manifest, run: Option<RunId>) -> Option<NotOurs> {
    match manifest.writer {
        None => return Some(NotOurs::Earlier),
        Some(writer) if Some(writer.run) != run => return Some(NotOurs::OtherDirectory),
        Some(_) => {}
    }
    if manifest.lineage.is_none() {
        return Some(NotOurs::Exactly);
    }
    only_ours_in(path, manifest).err()
}

/// Opens the checkpoint's directory, then does what [`only_ours`] does.
pub(super) fn only_ours_in(path: &Path, manifest: &Manifest) -> Result<(), NotOurs> {
    only_ours(&Opened::checkpoint(path).map_err(|e| NotOurs::Unreadable(Arc::new(e)))?, manifest)
}

/// Checks that a checkpoint's directory contains only the regular files that its manifest names,
/// and that everstep gives such names.
pub(super) fn only_ours(inside: &Opened, manifest: &Manifest) -> Result<(), NotOurs> {
    if !manifest.shards.iter().all(|s| is_plain(&s.file)) {
        return Err(NotOurs::FilesElsewhere);
    }
    let shard = |f: &OsStr| manifest.shards.iter().any(|s| *f == *s.file.as_str() && is_shard(&s.file));
    let named = |f: &OsStr| *f == *MARK_FILE || *f == *MANIFEST_FILE || shard(f);
    for file in inside.names().map_err(|e| NotOurs::Unreadable(Arc::new(e)))? {
        let name = || file.to_string_lossy().into_owned();
        let unreadable = |e| NotOurs::UnreadableFile { name: name(), source: Arc::new(e) };
        let kind = inside.kind(&file).map_err(unreadable)?;
        if !named(&file) || kind.is_some_and(|k| k != FileType::RegularFile) {
            return Err(NotOurs::Holds(name()));
        }
    }
    Ok(())
}

/// Returns the first free name of `step-N`, `step-N.2`, `step-N.3` …, counting from `from`.
pub(super) fn free_name(directory: &Path, step: u64, from: u32) -> io::Result<PathBuf> {
    for number in from..=SAME_STEP_MAX {
        let path = directory.join(name_of(step, number));
        // A name whose status is unknown counts as taken.
        if matches!(disk::kind(&path), Ok(None)) {
            return Ok(path);
        }
    }
    Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("every name for step {step} is taken")))
}

/// Returns the places of the checkpoints among the entries.
pub(super) fn places(entries: &[Entry], run: Option<RunId>) -> Vec<Place> {
    let manifests = entries.iter().filter_map(|e| match &e.what {
        What::Checkpoint { manifest, .. } => Some(manifest),
        _ => None,
    });
    let runs = Runs::only(run);
    manifests.map(|m| runs.place_of(m)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_everstep_gives_are_read() {
        assert_eq!([named("step-7"), named("step-7.2"), named("step-0")], [Some((7, 1)), Some((7, 2)), Some((0, 1))]);
        for name in ["step-07", "step-+7", "step-7.1", "step-7.02", "step-", "step-7.tmp-1", "step-7.", "Step-7"] {
            assert_eq!(named(name), None, "{name}");
        }
        assert_eq!(unpublished_named("step-7.tmp-1.2"), Some((7, (1, 2))));
        assert_eq!(deleting_named(&deleting_name(7)), Some(7));
    }
}
