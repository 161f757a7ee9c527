//! Which run a directory belongs to: an id that is drawn when the directory is first used, and kept in it. Deleting the directory deletes
//! the id; whatever else is edited or renamed does not.

use crate::storage::Storage;
use everstep_core::id::RunId;
use serde::{Deserialize, Serialize};
use std::io;

/// The file with the run id.
pub const RUN_FILE: &str = "everstep-run.json";
const VERSION: u32 = 1;
/// Whoever creates the file where hard links are missing has this long to fill it.
const HALF_WRITTEN: std::time::Duration = std::time::Duration::from_secs(2);

#[derive(Serialize, Deserialize)]
struct Identity {
    version: u32,
    run: RunId,
}

/// The directory's run id, drawn now if it has none. Of several that ask at the same time all get the same.
///
/// # Errors
/// Those of the file system or store; `InvalidData` when the file with it is damaged.
pub(super) fn run_id(storage: &dyn Storage) -> io::Result<RunId> {
    if let Some(known) = known_run(storage)? {
        return Ok(known);
    }
    let run = drawn()?;
    let mut bytes = serde_json::to_vec(&Identity { version: VERSION, run })?;
    bytes.push(b'\n');
    if storage.create_new(RUN_FILE, bytes)? {
        return Ok(run);
    }
    known_run(storage)?.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{RUN_FILE} comes and goes")))
}

/// A number that nobody else has, forks of this process included.
pub(super) fn drawn() -> io::Result<RunId> {
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    if filled < bytes.len() {
        return Err(io::Error::other("the kernel gave too few random bytes"));
    }
    Ok(RunId(u128::from_le_bytes(bytes)))
}

/// The directory's run id; `None` when it has none.
///
/// # Errors
/// As [`run_id`].
pub(super) fn known_run(storage: &dyn Storage) -> io::Result<Option<RunId>> {
    let since = std::time::Instant::now();
    loop {
        let Some(bytes) = storage.recall(RUN_FILE)? else { return Ok(None) };
        match serde_json::from_slice::<Identity>(&bytes) {
            Ok(found) if found.version == VERSION => return Ok(Some(found.run)),
            // Somebody is writing it at this moment.
            Err(_) if bytes.is_empty() && since.elapsed() < HALF_WRITTEN => {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            _ => {
                let what = format!(
                    "{RUN_FILE} is damaged or of another version; restore it, or delete it to let what is in memory go and continue from here"
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

    #[test]
    fn a_damaged_id_is_refused() {
        let a = tempfile::tempdir().unwrap();
        fs::write(a.path().join(RUN_FILE), "{}").unwrap();
        assert_eq!(run_id(&Directory::of(a.path())).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
