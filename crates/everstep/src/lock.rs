//! Locks between processes of this user: 0600 files that no other user can reach. Waiting for them
//! is limited, and the owner can be named.

use everstep_wire::private::Directory;
use rustix::fs::{FlockOperation, OFlags, flock, fstat, major, minor};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How often to retry a lock that is held.
const RETRY: Duration = Duration::from_millis(20);

/// The process that holds a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pid: Option<u32>,
    name: Option<String>,
    uid: Option<u32>,
}

impl Owner {
    /// Returns true if the process runs a program of this name.
    pub fn is(&self, program: &str) -> bool {
        self.name.as_deref() == Some(program)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pid, &self.name) {
            (Some(pid), Some(name)) => write!(f, "process {pid} ({name})"),
            (Some(pid), None) => write!(f, "a child of process {pid}"),
            (None, _) => f.write_str("a process in another container or on another host"),
        }
    }
}

/// Finds the owner in `/proc/locks`. The process that took the lock may be gone while a child keeps
/// it.
fn owner(file: impl AsFd) -> Owner {
    let unknown = Owner { pid: None, name: None, uid: None };
    let (Ok(about), Ok(locks)) = (fstat(&file), std::fs::read_to_string("/proc/locks")) else { return unknown };
    let place = format!("{:02x}:{:02x}:{}", major(about.st_dev), minor(about.st_dev), about.st_ino);
    let of_line = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let held = fields.get(1) == Some(&"FLOCK") && fields.get(5) == Some(&place.as_str());
        held.then(|| fields.get(4)?.parse::<u32>().ok().filter(|pid| *pid > 0)).flatten()
    };
    let Some(pid) = locks.lines().find_map(of_line) else { return unknown };
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|n| n.trim().to_owned());
    let uid = std::fs::metadata(format!("/proc/{pid}")).ok().map(|m| std::os::unix::fs::MetadataExt::uid(&m));
    Owner { pid: Some(pid), name, uid }
}

/// Takes the lock `name` in `directory`, waiting for `wait` at most. The inner `Err` is the owner.
///
/// # Errors
/// Those of the file system.
pub fn take(directory: &Directory, name: &str, wait: Duration) -> io::Result<Result<File, Owner>> {
    let start = Instant::now();
    loop {
        let file = directory.file(name, OFlags::RDWR | OFlags::CREATE)?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // Another process may have put a new file under this name in the meantime.
            let now = directory.file(name, OFlags::RDWR | OFlags::CREATE)?;
            let same = |a: &File, b: &File| Ok::<_, io::Error>(fstat(a)?.st_ino == fstat(b)?.st_ino);
            if same(&file, &now)? {
                return Ok(Ok(file));
            }
            continue;
        }
        let by = owner(&file);
        if by.uid.is_some_and(|uid| uid != 0 && uid != rustix::process::geteuid().as_raw()) {
            // Another user opened it while an earlier version left it readable by all. A new file
            // replaces it as the lock.
            directory.remove(name)?;
            continue;
        }
        if start.elapsed() >= wait {
            return Ok(Err(by));
        }
        std::thread::sleep(RETRY);
    }
}

/// Takes the lock on a directory itself, which whoever uses the directory holds. Returns false if
/// another process holds it.
///
/// # Errors
/// Those of the file system.
pub fn take_directory(directory: &Directory) -> io::Result<bool> {
    held_or(flock(directory.handle(), FlockOperation::NonBlockingLockExclusive))
}

/// Returns who holds the lock on a directory itself.
pub fn owner_of(directory: &Directory) -> Owner {
    owner(directory.handle())
}

/// Takes the lock `name` in `directory`, which must be there. Returns `None` if another process
/// holds it.
///
/// # Errors
/// Those of the file system; `NotFound` if there is no such lock.
pub fn take_existing(directory: &Directory, name: &str) -> io::Result<Option<File>> {
    // NFS grants exclusive locks only on files that are open for writing.
    let file = directory.file(name, OFlags::RDWR)?;
    Ok(held_or(flock(&file, FlockOperation::NonBlockingLockExclusive))?.then_some(file))
}

fn held_or(taken: rustix::io::Result<()>) -> io::Result<bool> {
    match taken {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Returns true if no process holds the lock, or if there is no such lock. Several may look at the
/// same time.
pub fn is_free(directory: &Directory, name: &str) -> bool {
    let file = directory.file(name, OFlags::RDONLY);
    file.map_or(true, |f| flock(&f, FlockOperation::NonBlockingLockShared).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use everstep_wire::private::Root;

    #[test]
    fn a_lock_that_is_held_names_its_owner_and_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let at = Directory::root(dir.path(), Root::Named).unwrap();
        assert!(is_free(&at, "lock"));
        let held = take(&at, "lock", Duration::ZERO).unwrap().unwrap();
        let owner = take(&at, "lock", Duration::ZERO).unwrap().unwrap_err();
        assert_eq!(owner.pid, Some(std::process::id()), "{owner}");
        assert!(!is_free(&at, "lock"));
        drop(held);
        assert!(take(&at, "lock", Duration::ZERO).unwrap().is_ok());
    }
}
