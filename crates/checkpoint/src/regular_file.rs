//! Files of checkpoints: regular ones only, whatever else has their names. A link may lead
//! anywhere, a device never ends, and opening a FIFO blocks.

use rustix::fs::{CWD, FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, fstat, openat};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// Opens a regular file without following a link in its last component, and without waiting.
/// Directories above it may be links: where checkpoints are kept is the user's choice.
///
/// # Errors
/// Those of the file system; `InvalidInput` for anything but a regular file.
pub fn open_regular(path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    open_in(CWD, path, flags)
}

fn open_in(at: impl AsFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let other = || io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match openat(at, path, flags, Mode::from_raw_mode(0o600)) {
        // A link; a FIFO without a reader, or a socket.
        Err(Errno::LOOP | Errno::NXIO) => return Err(other()),
        opened => opened?,
    };
    if FileType::from_raw_mode(fstat(&file)?.st_mode) != FileType::RegularFile {
        return Err(other());
    }
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

/// Reads a small regular file whole.
///
/// # Errors
/// The same as for [`open_regular`]; `InvalidData` for one that is longer than `limit`.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_regular_in(CWD, path, limit)
}

/// Does what [`read_regular`] does, for a path relative to a directory that is held open.
///
/// # Errors
/// The same as for [`read_regular`].
pub fn read_regular_in(at: impl AsFd, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = File::from(open_in(at, path, OFlags::RDONLY)?);
    let long = || io::Error::new(io::ErrorKind::InvalidData, format!("it is longer than the limit of {limit} bytes"));
    let length = file.metadata()?.len();
    if length > limit {
        return Err(long());
    }
    // It may grow meanwhile.
    let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit { Err(long()) } else { Ok(bytes) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_regular_files_are_opened_and_nothing_waits() {
        let at = tempfile::tempdir().unwrap();
        let (file, link, fifo) = (at.path().join("file"), at.path().join("link"), at.path().join("fifo"));
        std::fs::write(&file, b"abc").unwrap();
        symlink(&file, &link).unwrap();
        symlink("/dev/zero", at.path().join("zero")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        assert_eq!(read_regular(&file, 3).unwrap(), b"abc");
        assert_eq!(read_regular(&file, 2).unwrap_err().kind(), io::ErrorKind::InvalidData);
        for bad in [&link, &fifo, &at.path().join("zero"), &at.path().to_path_buf(), &"/dev/zero".into()] {
            assert_eq!(
                read_regular(bad, 1 << 20).unwrap_err().kind(),
                io::ErrorKind::InvalidInput,
                "{}",
                bad.display()
            );
            assert!(open_regular(bad, OFlags::RDWR).is_err());
        }
        // Above the file, a link is the user's choice.
        symlink(at.path(), at.path().join("here")).unwrap();
        assert_eq!(read_regular(&at.path().join("here/file"), 3).unwrap(), b"abc");
    }
}
