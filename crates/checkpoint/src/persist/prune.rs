//! Deletion on a file system: checkpoints that the policy does not keep, and leftovers of writers
//! of this run that died.
//!
//! ```text
//!  step-N/          rename, fsync parent: from now on it does not exist
//!  step-N.gone-X/   the files that its manifest names, the mark, the manifest; then the directory, if nothing else is in it
//! ```
//!
//! An entry may have been replaced a moment after it was checked, if others may write there, too.
//! So each directory is opened once, checked again and emptied through its handle ([`Opened`]).

use super::entries::{self, Entry, What, deleting_name, is_shard, is_shard_or_note, mark_of, only_ours};
use super::opened::Opened;
use crate::format::manifest::{MANIFEST_FILE, Manifest};
use crate::format::mark::{MARK_FILE, Mark};
use crate::lineage;
use crate::retain::{Candidate, surplus};
use crate::storage::{CleanUp, Foreign, Pruned, Unchanged, absent, candidate};
use everstep_core::id::RunId;
use everstep_wire::limits::MANIFEST_BYTES_MAX;
use rustix::fs::FileType;
use std::io;
use std::path::Path;

/// Some entries could not be deleted. All others were.
#[derive(Debug, thiserror::Error)]
#[error("{}", in_words(failed))]
pub struct NotAllGone {
    /// The entries that were deleted.
    pub done: Pruned,
    /// Names of the entries that were not deleted, and the errors.
    pub failed: Vec<(String, io::Error)>,
}

/// Maximum number of entries in the message of [`NotAllGone`].
const NAMED_MAX: usize = 3;

fn in_words(failed: &[(String, io::Error)]) -> String {
    let named: Vec<String> = failed.iter().take(NAMED_MAX).map(|(name, why)| format!("{name}: {why}")).collect();
    let more = failed.len().saturating_sub(NAMED_MAX);
    named.join("; ") + &if more > 0 { format!("; and {more} more") } else { String::new() }
}

/// Deletes published checkpoints that `policy` does not keep, and unpublished files of turns before
/// that of `mark`, as long as the directory is `unchanged`. With `dry_run`, nothing is deleted.
///
/// # Errors
/// Those of the file system; [`NotAllGone`] if some entries could not be deleted. Entries that
/// could not be read are left alone.
pub(super) fn prune(directory: &Path, what: &CleanUp<'_>, unchanged: Unchanged<'_>) -> io::Result<Pruned> {
    let CleanUp { policy, run, before, record, dry_run } = *what;
    let all = entries::scan(directory, Some(run))?;
    let Some(at) = absent(Opened::chosen(directory))? else { return Ok(Pruned::default()) };
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
    let mut failed = Vec::new();
    let kept = |m: &Manifest| m.writer.is_some_and(|w| w.run == run) && m.lineage.is_some();
    let unread = all.iter().any(|e| match &e.what {
        What::Damaged { .. } => true,
        What::Checkpoint { manifest, kept: Some(_) } => kept(manifest),
        _ => false,
    });
    for (entry, manifest) in surplus(policy, &running, &candidates, unread).into_iter().filter_map(|i| own.get(i)) {
        if !dry_run {
            // During the deletions, training may have gone back to a checkpoint that comes next.
            if !unchanged()? {
                return all_gone(done, failed);
            }
            match delete(&at, &entry.name, manifest) {
                Ok(true) => {}
                Ok(false) => continue,
                // The next ones can still be deleted.
                Err(e) => {
                    failed.push((entry.name.clone(), e));
                    continue;
                }
            }
        }
        done.gone.push((manifest.step, entry.name.clone()));
    }
    for entry in &all {
        let going = match &entry.what {
            What::Unpublished(mark) if mark.turn() >= before => continue,
            What::Unpublished(_) | What::Deleting(_) if dry_run => Ok(true),
            What::Unpublished(mark) => discard(&at, &entry.name, mark).map(|()| true),
            What::Deleting(manifest) => finish(&at, &entry.name, manifest),
            _ => continue,
        };
        match going {
            Ok(true) => done.leftovers.push(entry.name.clone()),
            Ok(false) => {}
            Err(e) => failed.push((entry.name.clone(), e)),
        }
    }
    all_gone(done, failed)
}

fn all_gone(done: Pruned, failed: Vec<(String, io::Error)>) -> io::Result<Pruned> {
    match failed.first() {
        None => Ok(done),
        Some((_, first)) => Err(io::Error::new(first.kind(), NotAllGone { done, failed })),
    }
}

/// Completes a deletion that was begun. Returns false if another process has completed it.
fn finish(at: &Opened, name: &str, manifest: &Manifest) -> io::Result<bool> {
    let Some(inside) = absent(same(at, name, manifest))?.flatten() else { return Ok(false) };
    empty(at, name, &inside, manifest).map(|()| true)
}

/// Returns the entries that are never deleted, with the reasons.
fn foreign(all: &[Entry]) -> Vec<Foreign> {
    let why = |e: &Entry| match &e.what {
        What::Foreign { step, why } => Some((*step, why.clone())),
        What::Damaged { step, why } => Some((Some(*step), why.to_string())),
        What::Checkpoint { manifest, kept: Some(why), .. } => Some((Some(manifest.step), why.to_string())),
        _ => None,
    };
    all.iter().filter_map(|e| why(e).map(|(step, why)| Foreign { name: e.name.clone(), step, why })).collect()
}

/// Returns the entries that everstep did not write, or of unknown origin.
///
/// # Errors
/// Those of reading the directory.
pub(super) fn foreign_in(directory: &Path, run: Option<RunId>) -> io::Result<Vec<Foreign>> {
    let all = entries::scan(directory, run)?;
    let unknown: Vec<Entry> = all.into_iter().filter(|e| matches!(e.what, What::Foreign { .. })).collect();
    Ok(foreign(&unknown))
}

/// Opens the entry of this name, if it is a checkpoint with this manifest.
///
/// # Errors
/// Those of the file system; `NotFound` if the entry, or its manifest, does not exist.
fn same(at: &Opened, name: &str, manifest: &Manifest) -> io::Result<Option<Opened>> {
    let read = |inside: Opened| Ok((inside.read(MANIFEST_FILE, MANIFEST_BYTES_MAX)?, inside));
    match at.below(name).and_then(read) {
        Ok((bytes, inside)) => Ok(Manifest::from_bytes(&bytes).is_ok_and(|m| m == *manifest).then_some(inside)),
        Err(e) => match e.kind() {
            io::ErrorKind::NotADirectory | io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => Ok(None),
            _ => Err(e),
        },
    }
}

/// Deletes a checkpoint of this run: it is renamed first, so that it does not exist any more, and
/// then its files are deleted. Returns false if the entry was replaced, or something was put into
/// it: it is then left alone.
pub(super) fn delete(at: &Opened, name: &str, manifest: &Manifest) -> io::Result<bool> {
    let Ok(Some(inside)) = same(at, name, manifest) else { return Ok(false) };
    if only_ours(&inside, manifest).is_err() {
        return Ok(false);
    }
    let going = deleting_name(manifest.step);
    match at.rename_new(name, &going) {
        // Another process that deletes the same entry was first.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
        other => other?,
    }
    at.sync()?;
    match absent(same(at, &going, manifest))? {
        Some(Some(inside)) => empty(at, &going, &inside, manifest).map(|()| true),
        // The entry was replaced right before the rename.
        Some(None) => at.rename_new(&going, name).map(|()| false),
        None => Ok(true),
    }
}

/// Completes a deletion. The manifest, which identifies the owner, is deleted last.
fn empty(at: &Opened, name: &str, inside: &Opened, manifest: &Manifest) -> io::Result<()> {
    // A manifest does not prove that everstep wrote the files.
    for shard in manifest.shards.iter().filter(|s| is_shard(&s.file)) {
        inside.remove(&shard.file)?;
    }
    inside.remove(MARK_FILE)?;
    inside.sync()?;
    inside.remove(MANIFEST_FILE)?;
    at.remove_empty(name).map(drop)
}

/// Deletes a directory that was never published. The mark is deleted last.
fn discard(at: &Opened, name: &str, mark: &Mark) -> io::Result<()> {
    let inside = match at.below(name) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(()),
        other => other?,
    };
    if mark_of(&inside)?.as_ref() != Some(mark) {
        return Ok(());
    }
    for file in inside.names()? {
        let known = file.to_str().is_some_and(|n| is_shard_or_note(n) || n == MANIFEST_FILE);
        if known && inside.kind(&file)? == Some(FileType::RegularFile) {
            inside.remove(&file)?;
        }
    }
    if inside.names()?.iter().all(|n| *n == *MARK_FILE) {
        inside.remove(MARK_FILE)?;
        at.remove_empty(name)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::format::manifest::VERSION;
    use crate::lineage::Lineage;
    use crate::retain::Policy;
    use everstep_core::id::Rank;
    use everstep_core::message::{Purpose, ShardFile};
    use std::collections::BTreeSet;
    use std::fs;
    use std::os::unix::fs::symlink;

    const RUN: RunId = RunId(7);
    const MARK: Mark = Mark { run: RUN, epoch: 1, generation: 1, attempt: 0 };

    /// Makes a directory with this manifest, and the files that it names.
    fn planted(path: &Path, step: u64, files: &[&str]) {
        fs::create_dir(path).unwrap();
        let shard = |(file, rank): (&&str, u32)| {
            fs::write(path.join(file), b"x").unwrap();
            ShardFile {
                rank: Rank(rank),
                file: (*file).into(),
                bytes: 1,
                crc: String::new(),
                purpose: Purpose::Recovery,
                objects: BTreeSet::new(),
            }
        };
        let shards: Vec<ShardFile> = files.iter().zip(0..).map(shard).collect();
        let world_size = u32::try_from(shards.len()).unwrap();
        let (writer, lineage) = (Some(MARK), Some(Lineage::default()));
        let manifest = Manifest { version: VERSION, step, world_size, saved_at: 1, writer, lineage, shards };
        fs::write(path.join(MANIFEST_FILE), manifest.to_bytes().unwrap()).unwrap();
    }

    fn tried(directory: &Path, unchanged: Unchanged<'_>) -> io::Result<Pruned> {
        let policy = Policy { last: 1, every: None, epochs: false, abandoned: false };
        let what = CleanUp { policy, run: RUN, before: (2, 0), record: None, dry_run: false };
        prune(directory, &what, unchanged)
    }

    fn pruned(directory: &Path, unchanged: Unchanged<'_>) -> Pruned {
        tried(directory, unchanged).unwrap()
    }

    #[test]
    fn a_link_that_takes_the_place_of_a_directory_leads_nobody_elsewhere() {
        let scratch = tempfile::tempdir().unwrap();
        let [out, keys, other] = ["out", "keys", "other"].map(|n| scratch.path().join(n));
        let names = ["step-1", "step-5.gone-0123456789abcdef", "step-9.tmp-1.1"].map(|n| out.join(n));
        let mark = serde_json::to_vec(&MARK).unwrap();
        fs::create_dir(&out).unwrap();
        planted(&names[0], 1, &["rank-0.safetensors"]);
        planted(&out.join("step-2"), 2, &["rank-0.safetensors"]);
        planted(&out.join("step-3"), 3, &["rank-0.safetensors"]);
        planted(&names[1], 5, &["id_ed25519", "rank-1.safetensors"]);
        planted(&names[2], 9, &["rank-0.safetensors"]);
        fs::write(names[2].join(MARK_FILE), &mark).unwrap();
        fs::create_dir(&keys).unwrap();
        fs::write(keys.join("id_ed25519"), b"key").unwrap();
        fs::write(keys.join("rank-1.safetensors"), b"x").unwrap();
        planted(&other, 1, &["rank-0.safetensors"]);
        fs::write(other.join(MARK_FILE), &mark).unwrap();
        // Each entry passes the check; then it is swapped.
        let swap = || {
            for (name, to) in names.iter().zip([&other, &keys, &other]).filter(|(name, _)| !name.is_symlink()) {
                fs::rename(name, scratch.path().join(name.file_name().unwrap())).unwrap();
                symlink(to, name).unwrap();
            }
            Ok(true)
        };
        pruned(&out, &swap);
        for file in [keys.join("id_ed25519"), keys.join("rank-1.safetensors")] {
            assert!(file.exists(), "{} is gone", file.display());
        }
        for file in ["rank-0.safetensors", MARK_FILE, MANIFEST_FILE] {
            assert!(other.join(file).exists(), "{file} is gone");
        }
        assert!(names.iter().all(|n| n.is_symlink()), "each is left as it was put there");
    }

    #[test]
    fn an_entry_that_cannot_be_deleted_is_named_and_the_others_go() {
        let out = tempfile::tempdir().unwrap();
        for step in 1..6 {
            planted(&out.path().join(format!("step-{step}")), step, &["rank-0.safetensors"]);
        }
        // A directory with the name of a shard: it cannot be unlinked.
        for step in [1, 2] {
            let half = out.path().join(format!("step-{}.gone-0123456789abcde{step}", 10 + step));
            planted(&half, 10 + step, &["rank-0.safetensors"]);
            fs::remove_file(half.join("rank-0.safetensors")).unwrap();
            fs::create_dir_all(half.join("rank-0.safetensors/mine")).unwrap();
        }
        let error = tried(out.path(), &|| Ok(true)).unwrap_err();
        let NotAllGone { done, failed } = error.get_ref().unwrap().downcast_ref().unwrap();
        assert_eq!(failed.len(), 2, "{failed:?}");
        assert!(error.to_string().contains("step-11.gone-0123456789abcde1: "), "{error}");
        assert_eq!(done.gone.len(), 3, "{done:?}");
    }

    #[test]
    fn only_names_that_a_checkpoint_has_are_deleted() {
        let out = tempfile::tempdir().unwrap();
        let (half, whole) = (out.path().join("step-5.gone-0123456789abcdef"), out.path().join("step-1"));
        planted(&half, 5, &["id_ed25519", "rank-1.safetensors"]);
        planted(&whole, 1, &["id_ed25519"]);
        for step in 2..5 {
            planted(&out.path().join(format!("step-{step}")), step, &["rank-0.safetensors"]);
        }
        let done = pruned(out.path(), &|| Ok(true));
        assert_eq!(done.gone, [(2, "step-2".into())]);
        assert!(half.join("id_ed25519").exists() && !half.join("rank-1.safetensors").exists());
        assert!(whole.join("id_ed25519").exists() && !out.path().join("step-2").exists());
        assert!(done.foreign.iter().any(|f| f.name == "step-1" && f.why.contains("id_ed25519")), "{:?}", done.foreign);
    }
}
