//! A directory of this user, and operations through its handle.

use super::{SHARED, belongs_to_another, denied, file_in, kind, own_uid, plain, split, through, walk};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

/// Most levels below a directory that is removed.
const DEPTH_MAX: usize = 64;
const SHARED_WRITE: u32 = 0o022;

/// Who chose the name of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Root {
    /// everstep: the mode is set to 0700.
    Named,
    /// The user: the mode stays, and others must not have write access.
    Chosen,
}

/// A directory of this user, held open.
#[derive(Debug)]
pub struct Directory {
    at: OwnedFd,
    path: PathBuf,
}

impl Directory {
    /// Opens a directory of this user, creating it if necessary.
    ///
    /// # Errors
    /// File system errors; `PermissionDenied` if it is not exclusively this user's.
    pub fn root(path: &Path, root: Root) -> io::Result<Self> {
        if let Some(parent) = std::path::absolute(path)?.parent() {
            walk(parent, true)?;
        }
        match Self::existing(path, root) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            found => return found,
        }
        let (parent, name) = split(path)?;
        match fs::mkdirat(walk(&parent, false)?, &name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => Self::existing(path, root),
            Err(e) => Err(e.into()),
        }
    }

    /// Creates a directory that must not exist yet.
    ///
    /// # Errors
    /// `AlreadyExists` if the name is taken, by any user; otherwise as for [`Directory::root`].
    pub fn fresh(path: &Path) -> io::Result<Self> {
        let (parent, name) = split(path)?;
        fs::mkdirat(walk(&parent, false)?, &name, Mode::RWXU)?;
        Self::existing(path, Root::Named)
    }

    /// Opens a directory of this user. A directory named by everstep must not be a link; one chosen
    /// by the user may be the user's own link.
    ///
    /// # Errors
    /// See [`Directory::root`]; `NotFound` if it does not exist.
    pub fn existing(path: &Path, root: Root) -> io::Result<Self> {
        if root == Root::Named
            && let Ok((parent, name)) = split(path)
        {
            return Self::checked(walk(&parent, false)?.as_fd(), &name, path.to_owned(), root);
        }
        let found = walk(path, false)?;
        Self::checked(found.as_fd(), OsStr::new("."), path.to_owned(), root)
    }

    fn checked(at: BorrowedFd<'_>, name: &OsStr, path: PathBuf, root: Root) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = fs::openat(at, name, flags, Mode::empty());
        let at = opened.map_err(|e| match e {
            Errno::LOOP | Errno::NOTDIR => denied(format!("{} is not a directory", path.display())),
            e => e.into(),
        })?;
        let about = fs::fstat(&at)?;
        if about.st_uid != own_uid() {
            return Err(belongs_to_another(&path, about.st_uid));
        }
        match root {
            Root::Named if about.st_mode & SHARED != 0 => fs::fchmod(&at, Mode::RWXU)?,
            Root::Chosen if about.st_mode & SHARED_WRITE != 0 => {
                return Err(denied(format!("{0} can be written by others; run: chmod go-w {0}", path.display())));
            }
            _ => {}
        }
        Ok(Directory { at, path })
    }

    /// Returns the path by which the directory was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a directory below this one. Every component must belong to this user.
    ///
    /// # Errors
    /// File system errors; `PermissionDenied` for links and for other users' directories.
    pub fn below(&self, path: impl AsRef<Path>) -> io::Result<Self> {
        self.descend(path.as_ref(), false)
    }

    /// Does what [`Directory::below`] does, but creates missing directories.
    ///
    /// # Errors
    /// See [`Directory::below`].
    pub fn make(&self, path: impl AsRef<Path>) -> io::Result<Self> {
        self.descend(path.as_ref(), true)
    }

    fn descend(&self, path: &Path, make: bool) -> io::Result<Self> {
        let mut now = Directory { at: self.at.try_clone()?, path: self.path.clone() };
        for part in path.components() {
            let Component::Normal(name) = part else {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("{} points outside the directory", path.display()),
                ));
            };
            if make
                && let Err(e) = fs::mkdirat(&now.at, name, Mode::RWXU)
                && e != Errno::EXIST
            {
                return Err(e.into());
            }
            now = Self::checked(now.at.as_fd(), name, now.path.join(name), Root::Named)?;
        }
        Ok(now)
    }

    /// Opens a regular file directly in this directory. It is created with mode 0600 if `flags`
    /// include creation.
    ///
    /// # Errors
    /// See [`open`](super::open).
    pub fn file(&self, name: impl AsRef<OsStr>, flags: OFlags) -> io::Result<File> {
        let name = name.as_ref();
        plain(name)?;
        file_in(self.at.as_fd(), name, flags, &self.path.join(name))
    }

    /// Reads a small file completely.
    ///
    /// # Errors
    /// See [`open`](super::open); `InvalidData` if the file is longer than `bytes_max`.
    pub fn read(&self, name: impl AsRef<OsStr>, bytes_max: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.file(name, OFlags::RDONLY)?.take(bytes_max + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > bytes_max {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("longer than {bytes_max} bytes")));
        }
        Ok(bytes)
    }

    /// Replaces a small file atomically: readers see either the old or the new content.
    ///
    /// # Errors
    /// File system errors.
    pub fn write_whole(&self, name: impl AsRef<OsStr>, bytes: &[u8]) -> io::Result<()> {
        let name = name.as_ref();
        plain(name)?;
        let mut temporary = name.to_owned();
        temporary.push(format!(".tmp-{}", std::process::id()));
        let mut file = self.file(&temporary, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
        file.write_all(bytes)?;
        fs::renameat(&self.at, &temporary, &self.at, name)?;
        Ok(())
    }

    /// Returns the names in this directory with their types, sorted. Links are not followed.
    ///
    /// # Errors
    /// File system errors.
    pub fn names(&self) -> io::Result<Vec<(OsString, FileType)>> {
        let mut found = Vec::new();
        for entry in Dir::read_from(&self.at)? {
            let entry = entry?;
            let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
            if name == "." || name == ".." {
                continue;
            }
            // Another process may have removed it in the meantime.
            if let Ok(about) = fs::statat(&self.at, &name, AtFlags::SYMLINK_NOFOLLOW) {
                found.push((name, kind(&about)));
            }
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    /// Removes a file, a socket, or a link (never its target). A missing name is not an error.
    ///
    /// # Errors
    /// File system errors.
    pub fn remove(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        let name = name.as_ref();
        plain(name)?;
        match fs::unlinkat(&self.at, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Removes a directory if it is empty.
    pub fn remove_if_empty(&self, name: impl AsRef<OsStr>) {
        if plain(name.as_ref()).is_ok() {
            let _ = fs::unlinkat(&self.at, name.as_ref(), AtFlags::REMOVEDIR);
        }
    }

    /// Removes a name and everything below it. Links are removed, never followed; another file
    /// system or another user's directory stays. A missing name is not an error.
    ///
    /// # Errors
    /// File system errors; `PermissionDenied` if something stays.
    pub fn remove_tree(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        let name = name.as_ref();
        plain(name)?;
        let device = fs::fstat(&self.at)?.st_dev;
        remove_below(self.at.as_fd(), name, &self.path.join(name), device, DEPTH_MAX)
    }

    /// Returns the total size of all files below, in bytes. Links are not followed.
    #[must_use]
    pub fn bytes_below(&self) -> u64 {
        let of = |(name, kind): (OsString, FileType)| match kind {
            FileType::Directory => self.below(&name).map_or(0, |d| d.bytes_below()),
            _ => fs::statat(&self.at, &name, AtFlags::SYMLINK_NOFOLLOW)
                .map_or(0, |a| u64::try_from(a.st_size).unwrap_or(0)),
        };
        self.names().unwrap_or_default().into_iter().map(of).sum()
    }

    /// Returns whether both are the same directory, whatever their paths.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn is_same(&self, other: &Self) -> io::Result<bool> {
        let (one, two) = (fs::fstat(&self.at)?, fs::fstat(&other.at)?);
        Ok((one.st_dev, one.st_ino) == (two.st_dev, two.st_ino))
    }

    /// Returns the open handle.
    #[must_use]
    pub fn handle(&self) -> BorrowedFd<'_> {
        self.at.as_fd()
    }

    /// Returns a path to a name in this directory through its handle, for calls that accept only
    /// paths (`bind`). It is valid in this process, as long as the directory is open.
    ///
    /// # Errors
    /// `InvalidInput` if `name` is not a single name.
    pub fn through(&self, name: impl AsRef<OsStr>) -> io::Result<PathBuf> {
        plain(name.as_ref())?;
        Ok(through(self.at.as_fd(), name.as_ref()))
    }
}

fn remove_below(at: BorrowedFd<'_>, name: &OsStr, shown: &Path, device: u64, depth: usize) -> io::Result<()> {
    let about = match fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(about) => about,
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(e.into()),
    };
    if about.st_uid != own_uid() {
        return Err(belongs_to_another(shown, about.st_uid));
    }
    if kind(&about) != FileType::Directory {
        fs::unlinkat(at, name, AtFlags::empty())?;
        return Ok(());
    }
    if about.st_dev != device {
        return Err(denied(format!("{} is another file system", shown.display())));
    }
    if depth == 0 {
        return Err(denied(format!("{} is too deep", shown.display())));
    }
    let inside = Directory::checked(at, name, shown.to_owned(), Root::Named)?;
    for (entry, _) in inside.names()? {
        remove_below(inside.handle(), &entry, &shown.join(&entry), device, depth - 1)?;
    }
    fs::unlinkat(at, name, AtFlags::REMOVEDIR)?;
    Ok(())
}
