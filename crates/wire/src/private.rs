//! Files and directories that no other user of the machine can reach, plant, or replace.
//!
//! Names like `/dev/shm/everstep-1000` are predictable, and anyone may create them first. So
//! nothing is opened by its path alone. A path is walked from `/`, one handle at a time: entries of
//! world-writable directories must belong to this user or to root, and so must every link on the
//! way. Below a private directory ([`Directory`]), everything is reached through its handle, links
//! are never followed, and anything but regular files and directories of this user is rejected.

mod directory;

pub use directory::{Directory, Root};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{self, AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::{Component, Path, PathBuf};

/// Most links on one path, as in the kernel.
const LINKS_MAX: usize = 40;
const SHARED: u32 = 0o077;
const ALL_WRITE: u32 = 0o002;

fn denied(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn kind(about: &Stat) -> FileType {
    FileType::from_raw_mode(about.st_mode)
}

/// Returns whether a user is trusted: root, this user, or the owner of `/`, which is how root
/// appears in a user namespace.
fn trusted(uid: u32) -> bool {
    uid == 0 || uid == own_uid() || fs::stat("/").is_ok_and(|root| root.st_uid == uid)
}

fn belongs_to_another(path: &Path, uid: u32) -> io::Error {
    denied(format!("{} belongs to user {uid}, not to user {}", path.display(), own_uid()))
}

/// Walks to `path`, creating missing directories if `make` is set. Rejects anything that another
/// user could have planted.
fn walk(path: &Path, make: bool) -> io::Result<OwnedFd> {
    let path = std::path::absolute(path)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut at = fs::openat(CWD, "/", flags | OFlags::DIRECTORY, Mode::empty())?;
    let mut left: VecDeque<OsString> = names(&path);
    let (mut walked, mut links) = (PathBuf::from("/"), 0);
    while let Some(name) = left.pop_front() {
        let shared = fs::fstat(&at)?.st_mode & ALL_WRITE != 0;
        let next = match fs::openat(&at, &name, flags, Mode::empty()) {
            Err(Errno::NOENT) if make => {
                match fs::mkdirat(&at, &name, Mode::RWXU) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(e) => return Err(e.into()),
                }
                fs::openat(&at, &name, flags, Mode::empty())?
            }
            opened => opened?,
        };
        let (about, shown) = (fs::fstat(&next)?, walked.join(&name));
        let planted = shared && name != ".." || kind(&about) == FileType::Symlink;
        if planted && !trusted(about.st_uid) {
            return Err(belongs_to_another(&shown, about.st_uid));
        }
        if kind(&about) != FileType::Symlink {
            (at, walked) = (next, shown);
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(Errno::LOOP.into());
        }
        let target = PathBuf::from(OsString::from_vec(fs::readlinkat(&next, "", Vec::new())?.into_bytes()));
        if target.is_absolute() {
            at = fs::openat(CWD, "/", flags | OFlags::DIRECTORY, Mode::empty())?;
            walked = PathBuf::from("/");
        }
        for part in names(&target).into_iter().rev() {
            left.push_front(part);
        }
    }
    Ok(at)
}

fn names(path: &Path) -> VecDeque<OsString> {
    let named = |c: Component<'_>| match c {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    };
    path.components().filter_map(named).collect()
}

/// Checks that `name` is a single name and not a path.
fn plain(name: &OsStr) -> io::Result<()> {
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(only)), None) if only == name => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} is not a name", name.display()))),
    }
}

/// Opens a regular file of this user in `at`. Never follows a link, and never blocks on a FIFO.
fn file_in(at: BorrowedFd<'_>, name: &OsStr, flags: OFlags, shown: &Path) -> io::Result<File> {
    let always = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = fs::openat(at, name, flags | always, Mode::RUSR | Mode::WUSR);
    let file = File::from(opened.map_err(|e| match e {
        Errno::LOOP => denied(format!("{} is a link", shown.display())),
        Errno::NXIO => denied(format!("{} is not a regular file", shown.display())),
        e => e.into(),
    })?);
    let about = fs::fstat(&file)?;
    if kind(&about) != FileType::RegularFile {
        return Err(denied(format!("{} is not a regular file", shown.display())));
    }
    if about.st_uid != own_uid() {
        return Err(belongs_to_another(shown, about.st_uid));
    }
    if about.st_mode & SHARED != 0 {
        fs::fchmod(&file, Mode::from_raw_mode(about.st_mode & 0o700))?;
    }
    Ok(file)
}

/// Opens a regular file of this user and makes it inaccessible to others. It is created with mode
/// 0600 if `flags` include creation.
///
/// # Errors
/// File system errors; `PermissionDenied` if the file is not this user's, is not a regular file, or
/// is behind another user's link.
pub fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let (parent, name) = split(path)?;
    file_in(walk(&parent, false)?.as_fd(), &name, flags, path)
}

fn split(path: &Path) -> io::Result<(PathBuf, OsString)> {
    let path = std::path::absolute(path)?;
    let parts = path.parent().zip(path.file_name());
    let parts = parts.map(|(parent, name)| (parent.to_owned(), name.to_owned()));
    parts.ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("{} is not the name of a file", path.display()))
    })
}

/// Opens a file that the user named, for reading. It must be a regular file of this user or of
/// root; its mode stays unchanged. Links are followed unless another user made them.
///
/// # Errors
/// See [`open`].
pub fn open_given(path: &Path) -> io::Result<File> {
    let found = walk(path, false)?;
    let about = fs::fstat(&found)?;
    if kind(&about) != FileType::RegularFile {
        return Err(denied(format!("{} is not a regular file", path.display())));
    }
    if !trusted(about.st_uid) {
        return Err(belongs_to_another(path, about.st_uid));
    }
    File::open(through(found.as_fd(), OsStr::new("")))
}

/// Removes a file, a socket, or a link (never its target), unless another user planted the
/// directory. A missing file is not an error.
///
/// # Errors
/// File system errors.
pub fn remove(path: &Path) -> io::Result<()> {
    let (parent, name) = split(path)?;
    let parent = match walk(&parent, false) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    match fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Connects to a socket of this user or of root.
///
/// # Errors
/// Errors of the operating system; `PermissionDenied` if another user listens there.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path)?;
    let uid = rustix::net::sockopt::socket_peercred(&stream)?.uid.as_raw();
    if uid == own_uid() || uid == 0 { Ok(stream) } else { Err(belongs_to_another(path, uid)) }
}

/// Returns a path that leads through an open directory, for calls that accept only paths.
fn through(at: BorrowedFd<'_>, name: &OsStr) -> PathBuf {
    let own = PathBuf::from(format!("/proc/self/fd/{}", at.as_raw_fd()));
    if name.is_empty() { own } else { own.join(name) }
}

/// Creates a directory and its missing parents with mode 0700. Never follows another user's link.
///
/// # Errors
/// File system errors; `PermissionDenied` if another user planted something on the way.
pub fn make_directories(path: &Path) -> io::Result<()> {
    let at = walk(path, true)?;
    match kind(&fs::fstat(&at)?) {
        FileType::Directory => Ok(()),
        _ => Err(Errno::NOTDIR.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn directories_and_files_are_the_owners_alone() {
        let dir = tempfile::tempdir().unwrap();
        let root = Directory::root(&dir.path().join("a/b"), Root::Named).unwrap();
        root.make("c/d").unwrap().write_whole("note", b"x").unwrap();
        for (path, expected) in [("a", 0o700), ("a/b/c/d", 0o700), ("a/b/c/d/note", 0o600)] {
            assert_eq!(mode(&dir.path().join(path)), expected, "{path}");
        }
        // Left over from an earlier version.
        std::fs::set_permissions(dir.path().join("a/b"), std::fs::Permissions::from_mode(0o755)).unwrap();
        Directory::root(&dir.path().join("a/b"), Root::Named).unwrap();
        assert_eq!(mode(&dir.path().join("a/b")), 0o700);
        // The mode of the user's own directory stays, unless others can write to it.
        std::fs::set_permissions(dir.path().join("a/b"), std::fs::Permissions::from_mode(0o755)).unwrap();
        Directory::root(&dir.path().join("a/b"), Root::Chosen).unwrap();
        assert_eq!(mode(&dir.path().join("a/b")), 0o755);
        std::fs::set_permissions(dir.path().join("a/b"), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Directory::root(&dir.path().join("a/b"), Root::Chosen).unwrap_err().to_string().contains("chmod go-w"));
    }

    #[test]
    fn links_and_fifos_are_refused_and_never_followed() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("keep"), b"mine").unwrap();
        let root = Directory::root(&dir.path().join("root"), Root::Named).unwrap();
        symlink(&outside, root.path().join("link")).unwrap();
        symlink(outside.join("keep"), root.path().join("file")).unwrap();
        rustix::fs::mkfifoat(root.handle(), "fifo", Mode::RUSR | Mode::WUSR).unwrap();
        for name in ["file", "fifo"] {
            let refused = root.file(name, OFlags::RDONLY).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "{refused}");
            assert!(open(&root.path().join(name), OFlags::WRONLY).is_err());
        }
        assert!(root.below("link").is_err() && root.make("link/x").is_err());
        assert!(root.below("..").is_err() && root.file("../outside", OFlags::RDONLY).is_err());
        assert!(Directory::root(&root.path().join("link"), Root::Named).is_err());
        root.make("tree/deep").unwrap();
        symlink(&outside, root.path().join("tree/deep/link")).unwrap();
        for name in ["tree", "link", "file", "fifo", "missing"] {
            root.remove_tree(name).unwrap();
        }
        assert_eq!(root.names().unwrap(), []);
        assert_eq!(std::fs::read(outside.join("keep")).unwrap(), b"mine");
    }

    /// Needs root, to act as another user.
    #[test]
    fn what_another_user_has_planted_is_refused() {
        let shared = tempfile::tempdir().unwrap();
        std::fs::set_permissions(shared.path(), std::fs::Permissions::from_mode(0o1777)).unwrap();
        let planted = shared.path().join("everstep-0");
        std::fs::create_dir(&planted).unwrap();
        if std::os::unix::fs::chown(&planted, Some(65534), None).is_err() {
            return;
        }
        let refused = Directory::root(&planted, Root::Named).unwrap_err().to_string();
        assert!(refused.contains("belongs to user 65534"), "{refused}");
        // Neither entries below it nor another user's link are accepted.
        std::fs::create_dir(planted.join("job")).unwrap();
        assert!(open(&planted.join("job/slot"), OFlags::RDWR | OFlags::CREATE).is_err());
        assert!(!planted.join("job/slot").exists());
        let (own, link) = (tempfile::tempdir().unwrap(), shared.path().join("link"));
        symlink(own.path(), &link).unwrap();
        std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
        assert!(open(&link.join("slot"), OFlags::RDWR | OFlags::CREATE).is_err());
        assert!(Directory::root(&link, Root::Chosen).is_err() && make_directories(&link.join("x")).is_err());
        assert!(std::fs::read_dir(own.path()).unwrap().next().is_none());
        // Another user's directory stays in place.
        let root = Directory::root(&shared.path().join("ours"), Root::Named).unwrap();
        std::fs::create_dir(root.path().join("theirs")).unwrap();
        std::os::unix::fs::chown(root.path().join("theirs"), Some(65534), None).unwrap();
        assert!(root.remove_tree("theirs").is_err() && root.path().join("theirs").is_dir());
    }
}
