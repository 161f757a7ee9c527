//! The calls to the file system that publishing and deleting make. None follows a link, none waits
//! for a pipe, and an error never means "absent". With the feature `faults`, any of them can be
//! made to fail.

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
    //! Makes one call fail, or all from one on, on this thread.

    use std::cell::Cell;
    use std::io;

    thread_local! {
        static PLAN: Cell<Option<(u64, i32, bool)>> = const { Cell::new(None) };
        static CALLS: Cell<u64> = const { Cell::new(0) };
    }

    /// The call after `after` others fails with `errno`; with `ever`, so do all that follow, as if
    /// the process had died.
    pub fn plan(after: u64, errno: i32, ever: bool) {
        PLAN.set(Some((after, errno, ever)));
        CALLS.set(0);
    }

    /// Nothing fails any more. Returns the number of calls since [`plan`].
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

/// A call that is made elsewhere is about to be made.
pub(super) fn before_call() -> io::Result<()> {
    faults::check()
}

/// What there is under a name, itself and not what it links to; `None` where there is certainly
/// nothing.
pub(super) fn kind(path: &Path) -> io::Result<Option<FileType>> {
    kind_in(CWD, path)
}

/// The same from a directory that is held open.
pub(super) fn kind_in(at: impl AsFd, path: &Path) -> io::Result<Option<FileType>> {
    faults::check()?;
    match statat(at, path, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Bytes of a regular file; `None` where there is certainly none.
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

/// Names in a directory, sorted. A directory that is missing has none.
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

/// The same from a directory that is held open.
pub(super) fn read_in(at: impl AsFd, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    faults::check()?;
    let bytes = read_regular_in(at, path, limit)?;
    faults::check()?;
    Ok(bytes)
}

/// Writes a small file and makes its bytes durable, in place of an earlier one of this name, if
/// there is one.
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
        // Otherwise it would be left for ever.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Makes a directory. False when there is something of this name.
pub(super) fn make(path: &Path) -> io::Result<bool> {
    faults::check()?;
    match fs::create_dir(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(e),
    }
}

/// Renames, but never onto anything: `AlreadyExists`.
pub(super) fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    rename_new_in(CWD, from, to)
}

/// The same in a directory that is held open.
pub(super) fn rename_new_in(at: impl AsFd, from: &Path, to: &Path) -> io::Result<()> {
    faults::check()?;
    let at = at.as_fd();
    match renameat_with(at, from, at, to, RenameFlags::NOREPLACE) {
        // File systems, NFS among them, that know no flags. The name is looked up right before:
        // what could come in between and be replaced is an empty directory.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) if kind_in(at, to)?.is_none() => {
            Ok(renameat(at, from, at, to)?)
        }
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Err(io::ErrorKind::AlreadyExists.into()),
        other => Ok(other?),
    }
}

/// Swaps two names at once. False where the file system cannot.
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
