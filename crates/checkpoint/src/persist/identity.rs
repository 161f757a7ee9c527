//! The run that a directory belongs to: an id that is drawn when the directory is first used, and
//! kept in it. Deleting the directory deletes the id; other edits and renames do not. A copy of the
//! directory is another run, because the steps in memory belong to the original.

use crate::storage::{Home, Storage};
use everstep_core::id::RunId;
use serde::{Deserialize, Serialize};
use std::io;

/// The file with the run id.
pub const RUN_FILE: &str = "everstep-run.json";
const VERSION: u32 = 1;
/// Without hard links, the process that creates the file fills it within this time.
const HALF_WRITTEN: std::time::Duration = std::time::Duration::from_secs(2);

#[derive(Serialize, Deserialize)]
struct Identity {
    version: u32,
    run: RunId,
    /// Where the directory is; missing in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    home: Option<Home>,
}

impl Identity {
    fn bytes(&self) -> io::Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec(self)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Returns the identity of a directory at `here`, according to this file. All processes that
    /// read it get the same result.
    fn seen_from(self, here: &Home) -> Self {
        let copied = self.home.as_ref().is_some_and(|recorded| here.is_copy_of(recorded));
        let name = || format!("copied to {} ({:?}) at {}", here.path, here.inode, here.written);
        Identity { run: if copied { self.run.kind(&name()) } else { self.run }, home: Some(here.clone()), ..self }
    }
}

/// Returns the directory's run id, and draws one if there is none. Processes that ask at the same
/// time get the same id.
///
/// # Errors
/// Those of the file system or store; `InvalidData` when the file with it is damaged.
pub(super) fn run_id(storage: &dyn Storage) -> io::Result<RunId> {
    if recorded(storage)?.is_none() {
        create(storage, drawn()?)?;
    }
    // In this order: if the file is replaced in between, it records that the directory is here.
    let here = storage.home(RUN_FILE)?;
    let found = recorded(storage)?;
    let found = found
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{RUN_FILE} disappeared while it was read")))?;
    let told = found.home.as_ref().is_some_and(|home| here.is_as_recorded(home));
    let now = found.seen_from(&here);
    if !told {
        // From now on, a copy of this directory can be distinguished from it. A directory that
        // cannot be written cannot be used for checkpoints either.
        let _ = storage.replace_durably(RUN_FILE, now.bytes()?);
    }
    Ok(now.run)
}

/// Gives the directory this id, unless it has one. Returns whether it did.
///
/// # Errors
/// Those of the file system or store; `NotFound` when the directory does not exist.
pub(super) fn create(storage: &dyn Storage, run: RunId) -> io::Result<bool> {
    // The location is recorded later: an overlay may give a directory another inode with the first
    // file in it.
    storage.create_new(RUN_FILE, Identity { version: VERSION, run, home: None }.bytes()?)
}

/// Returns a random number that is unique, even among forks of this process.
pub(super) fn drawn() -> io::Result<RunId> {
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    if filled < bytes.len() {
        return Err(io::Error::other("the kernel gave too few random bytes"));
    }
    Ok(RunId(u128::from_le_bytes(bytes)))
}

/// Returns the directory's run id; `None` when it has none.
///
/// # Errors
/// The same as for [`run_id`].
pub(super) fn known_run(storage: &dyn Storage) -> io::Result<Option<RunId>> {
    let here = storage.home(RUN_FILE);
    let Some(recorded) = recorded(storage)? else { return Ok(None) };
    Ok(Some(recorded.seen_from(&here?).run))
}

fn recorded(storage: &dyn Storage) -> io::Result<Option<Identity>> {
    let since = std::time::Instant::now();
    loop {
        let Some(bytes) = storage.recall(RUN_FILE)? else { return Ok(None) };
        match serde_json::from_slice::<Identity>(&bytes) {
            Ok(found) if found.version == VERSION => return Ok(Some(found)),
            // Another process is writing it at this moment.
            Err(_) if bytes.is_empty() && since.elapsed() < HALF_WRITTEN => {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            _ => {
                let what = format!(
                    "{RUN_FILE} is damaged or from another version; restore it, or delete it to discard the steps in memory and continue from the checkpoints in this directory"
                );
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::persist::directory::Directory;
    use crate::persist::disk::faults;
    use std::fs;

    #[test]
    fn a_directory_keeps_its_id_and_another_has_another() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert_eq!(known_run(&Directory::of(a.path())).unwrap(), None);
        let ids: Vec<RunId> = std::thread::scope(|s| {
            let all: Vec<_> = (0..8).map(|_| s.spawn(|| run_id(&Directory::of(a.path())).unwrap())).collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
        assert_eq!(known_run(&Directory::of(a.path())).unwrap(), Some(ids[0]));
        assert_ne!(run_id(&Directory::of(b.path())).unwrap(), ids[0]);
        assert_eq!(fs::read_dir(a.path()).unwrap().count(), 1, "nothing else is left");
    }

    fn copied(from: &std::path::Path, to: &std::path::Path) {
        fs::create_dir(to).unwrap();
        fs::copy(from.join(RUN_FILE), to.join(RUN_FILE)).unwrap();
    }

    fn id(path: &std::path::Path) -> RunId {
        let known = known_run(&Directory::of(path)).unwrap();
        let id = run_id(&Directory::of(path)).unwrap();
        assert!(known.is_none_or(|known| known == id), "whoever only reads sees the same");
        id
    }

    #[test]
    fn a_copy_is_of_another_run_and_what_was_moved_of_the_same() {
        let scratch = tempfile::tempdir().unwrap();
        let [a, b, moved] = ["a", "b", "moved"].map(|name| scratch.path().join(name));
        fs::create_dir(&a).unwrap();
        let original = id(&a);
        copied(&a, &b);
        let copy = id(&b);
        assert_ne!(copy, original);
        assert_eq!((id(&b), id(&a)), (copy, original), "it stays");
        // Another copy under the same name, perhaps with the same inode.
        fs::remove_dir_all(&b).unwrap();
        copied(&a, &b);
        assert_ne!(id(&b), copy);
        fs::rename(&a, &moved).unwrap();
        assert_eq!(id(&moved), original);
        copied(&moved, &a);
        assert_ne!(id(&a), original, "a copy in the place of the original");
        assert_eq!(id(&moved), original);
        let late = scratch.path().join("late");
        fs::create_dir(&late).unwrap();
        let early = id(&late);
        let backup = scratch.path().join("backup");
        fs::rename(&late, &backup).unwrap();
        copied(&backup, &late);
        assert_ne!(id(&late), early, "nobody has looked at the original since it was moved");
        assert_eq!(id(&backup), early);
        std::os::unix::fs::symlink(&moved, scratch.path().join("link")).unwrap();
        assert_eq!(id(&scratch.path().join("link")), original);
    }

    #[test]
    fn the_record_is_replaced_only_by_one_whose_bytes_are_durable() {
        let mut kept = 0;
        for n in 0..20 {
            let a = tempfile::tempdir().unwrap();
            let directory = Directory::of(a.path());
            assert!(create(&directory, RunId(7)).unwrap());
            let record = || fs::read(a.path().join(RUN_FILE)).unwrap();
            let before = record();
            faults::plan(n, rustix::io::Errno::IO.raw_os_error(), false);
            let found = run_id(&directory);
            faults::end();
            kept += u32::from(found.is_ok() && record() == before);
            assert_eq!(run_id(&directory).unwrap(), RunId(7), "call {n}");
        }
        assert!(kept > 0, "it was replaced without a call that makes it durable");
    }

    #[test]
    fn all_who_look_at_a_copy_see_the_same() {
        let scratch = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| scratch.path().join(name));
        fs::create_dir(&a).unwrap();
        let original = id(&a);
        copied(&a, &b);
        let ids: Vec<RunId> = std::thread::scope(|s| {
            let all: Vec<_> = (0..8).map(|_| s.spawn(|| run_id(&Directory::of(&b)).unwrap())).collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0] && *id != original), "{ids:?}");
    }

    #[test]
    fn a_damaged_id_is_refused() {
        let a = tempfile::tempdir().unwrap();
        fs::write(a.path().join(RUN_FILE), "{}").unwrap();
        assert_eq!(run_id(&Directory::of(a.path())).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
