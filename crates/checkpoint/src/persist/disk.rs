//! The file system calls of publishing and deleting. None follows a link, none waits for a pipe,
//! and an error never means "absent". With the feature `faults`, any of them can be made to fail.

use crate::regular_file::read_regular_in;
use crate::unique_id::unique_id;
use rustix::fs::{AtFlags, CWD, FileType, RenameFlags, renameat, renameat_with, statat};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;

#[cfg(any(test, feature = "faults"))]
pub mod faults {
    //! Makes one call on this thread fail, or all calls from one on.

    use std::cell::Cell;
    use std::io;

    thread_local! {
        static PLAN: Cell<Option<(u64, i32, bool)>> = const { Cell::new(None) };
        static CALLS: Cell<u64> = const { Cell::new(0) };
    }

    /// Makes the call after `after` others fail with `errno`; with `ever`, so do all that follow,
    /// as if the process had died.
    pub fn plan(after: u64, errno: i32, ever: bool) {
        PLAN.set(Some((after, errno, ever)));
        CALLS.set(0);
    }

    /// Ends the plan, so that no call fails any more. Returns the number of calls since [`plan`].
    pub fn end() -> u64 {
        PLAN.set(None);
        CALLS.replace(0)
    }

    pub(in crate::persist) fn check() -> io::Result<()> {
        let n = CALLS.get();
        CALLS.set(n + 1);
        match PLAN.get() {
            Some((after, errno, ever)) if n == after || (ever && n > after) => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(()),
        }
    }
}

#[cfg(not(any(test, feature = "faults")))]
mod faults {
    #[inline]
    #[allow(clippy::unnecessary_wraps, reason = "it does fail with the feature")]
    pub(in crate::persist) fn check() -> std::io::Result<()> {
        Ok(())
    }
}

/// Counts a call that is about to be made elsewhere, and fails if the plan says so.
pub(super) fn before_call() -> io::Result<()> {
    faults::check()
}

/// Returns the type of the file at a path, without following a link; `None` if it certainly does
/// not exist.
pub(super) fn kind(path: &Path) -> io::Result<Option<FileType>> {
    kind_in(CWD, path)
}

/// Does what [`kind`] does, relative to a directory that is held open.
pub(super) fn kind_in(at: impl AsFd, path: &Path) -> io::Result<Option<FileType>> {
    faults::check()?;
    match statat(at, path, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Returns the length of a regular file in bytes; `None` if it certainly does not exist or is not
/// one.
pub(super) fn length(path: &Path) -> io::Result<Option<u64>> {
    faults::check()?;
    match statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {
            Ok(Some(u64::try_from(stat.st_size).unwrap_or_default()))
        }
        Ok(_) | Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Returns the names in a directory, sorted. A missing directory has none.
pub(super) fn names(directory: &Path) -> io::Result<Vec<std::ffi::OsString>> {
    faults::check()?;
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut names = Vec::new();
    for entry in entries {
        faults::check()?;
        names.push(entry?.file_name());
    }
    names.sort_unstable();
    Ok(names)
}

/// Reads a regular file of up to `limit` bytes.
pub(super) fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_in(CWD, path, limit)
}

/// Does what [`read`] does, relative to a directory that is held open.
pub(super) fn read_in(at: impl AsFd, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    faults::check()?;
    let bytes = read_regular_in(at, path, limit)?;
    faults::check()?;
    Ok(bytes)
}

/// Writes a small file and makes its bytes durable. It replaces an earlier file of this name.
pub(super) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{:016x}", unique_id()));
    let written = (|| {
        faults::check()?;
        let mut file = File::create_new(&temporary)?;
        faults::check()?;
        file.write_all(bytes)?;
        faults::check()?;
        file.sync_all()?;
        faults::check()?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        // Otherwise it would stay forever.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Makes a directory. Returns false when the name is taken.
pub(super) fn make(path: &Path) -> io::Result<bool> {
    faults::check()?;
    match fs::create_dir(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(e),
    }
}

/// Renames a file, but never over an existing one: fails with `AlreadyExists`.
pub(super) fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    rename_new_in(CWD, from, to)
}

/// Does what [`rename_new`] does, relative to a directory that is held open.
pub(super) fn rename_new_in(at: impl AsFd, from: &Path, to: &Path) -> io::Result<()> {
    faults::check()?;
    let at = at.as_fd();
    match renameat_with(at, from, at, to, RenameFlags::NOREPLACE) {
        // Some file systems, NFS among them, support no flags. The name is looked up right before:
        // only an empty directory that is created in between could be replaced.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) if kind_in(at, to)?.is_none() => {
            Ok(renameat(at, from, at, to)?)
        }
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Err(io::ErrorKind::AlreadyExists.into()),
        other => Ok(other?),
    }
}

/// Swaps two names atomically. Returns false if the file system cannot.
pub(super) fn exchange(one: &Path, other: &Path) -> io::Result<bool> {
    faults::check()?;
    match renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Makes the names in a directory durable.
pub(super) fn sync(directory: &Path) -> io::Result<()> {
    faults::check()?;
    File::open(directory)?.sync_all()
}
