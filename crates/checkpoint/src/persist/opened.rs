//! A directory that is held open while something in it is deleted. Another process that may write
//! there can put a link in its place at any moment; accesses through the handle stay in the
//! directory that was checked.

use super::disk;
use crate::storage::gone;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, fsync, openat, unlinkat};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

/// A directory that is held open.
#[derive(Debug)]
pub(super) struct Opened {
    at: OwnedFd,
}

/// Opens a directory; fails with `NotADirectory` for anything else, and for a link with `NOFOLLOW`.
fn open(at: impl AsFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    match openat(at, path, flags | OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::LOOP | Errno::NOTDIR) => Err(io::ErrorKind::NotADirectory.into()),
        opened => Ok(opened?),
    }
}

impl Opened {
    /// Opens a directory of checkpoints. The user has chosen it, so it may be a link.
    ///
    /// # Errors
    /// Those of the file system; `NotADirectory`.
    pub fn chosen(path: &Path) -> io::Result<Self> {
        disk::before_call()?;
        open(CWD, path, OFlags::empty()).map(|at| Opened { at })
    }

    /// Opens the directory of a checkpoint, which must not be a link.
    ///
    /// # Errors
    /// The same as for [`Opened::chosen`].
    pub fn checkpoint(path: &Path) -> io::Result<Self> {
        disk::before_call()?;
        open(CWD, path, OFlags::NOFOLLOW).map(|at| Opened { at })
    }

    /// Opens the directory of a checkpoint by its name in this directory.
    ///
    /// # Errors
    /// The same as for [`Opened::chosen`].
    pub fn below(&self, name: &str) -> io::Result<Self> {
        disk::before_call()?;
        open(&self.at, Path::new(name), OFlags::NOFOLLOW).map(|at| Opened { at })
    }

    /// Returns the names in the directory, sorted.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        disk::before_call()?;
        let entries = match Dir::read_from(&self.at) {
            // The directory was removed meanwhile.
            Err(Errno::NOENT) => return Ok(Vec::new()),
            other => other?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = OsString::from_vec(entry?.file_name().to_bytes().to_vec());
            if name != "." && name != ".." {
                disk::before_call()?;
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Returns the type of a file in the directory; see [`disk::kind`].
    ///
    /// # Errors
    /// Those of the file system.
    pub fn kind(&self, name: &OsStr) -> io::Result<Option<FileType>> {
        disk::kind_in(&self.at, Path::new(name))
    }

    /// Reads a file in the directory; see [`disk::read`].
    ///
    /// # Errors
    /// Those of the file system; `InvalidInput` for anything but a regular file, `InvalidData` for
    /// one that is longer than `limit`.
    pub fn read(&self, name: &str, limit: u64) -> io::Result<Vec<u8>> {
        disk::read_in(&self.at, Path::new(name), limit)
    }

    /// Renames a file in the directory; see [`disk::rename_new`].
    ///
    /// # Errors
    /// Those of the file system; `AlreadyExists`.
    pub fn rename_new(&self, from: &str, to: &str) -> io::Result<()> {
        disk::rename_new_in(&self.at, Path::new(from), Path::new(to))
    }

    /// Removes a file. A file that does not exist any more is not an error.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn remove(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        disk::before_call()?;
        gone(unlinkat(&self.at, name.as_ref(), AtFlags::empty()).map_err(io::Error::from))
    }

    /// Removes a directory if it is empty. Returns false if it is not, or is no longer a directory.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn remove_empty(&self, name: &str) -> io::Result<bool> {
        disk::before_call()?;
        match unlinkat(&self.at, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(true),
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Makes the names in the directory durable.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn sync(&self) -> io::Result<()> {
        disk::before_call()?;
        Ok(fsync(&self.at)?)
    }
}

/// Removes a file from the directory of a checkpoint after a failed call, if possible. Faults are
/// not injected here.
pub(super) fn forget(checkpoint: &Path, file: &OsStr) {
    if let Ok(at) = open(CWD, checkpoint, OFlags::NOFOLLOW) {
        let _ = unlinkat(&at, file, AtFlags::empty());
    }
}
