//! Text files that the user names in an option. They may be anything that can be opened, so what is
//! read is limited.

use everstep_wire::limits::USER_FILE_BYTES_MAX;
use rustix::fs::{CWD, FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, fstat, openat};
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Reads a file whole. A pipe is read to its end, as from `<(command)`.
///
/// # Errors
/// Those of the file system; `InvalidInput` for a device, or a FIFO that nobody writes to;
/// `InvalidData` for a text that is too long or not UTF-8.
pub fn read(path: &Path) -> io::Result<String> {
    let invalid = |what: &str| io::Error::new(ErrorKind::InvalidInput, what);
    // Opening a FIFO would wait for a writer.
    let mut file = File::from(openat(CWD, path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?);
    let mut start = [0];
    let mut bytes = match FileType::from_raw_mode(fstat(&file)?.st_mode) {
        FileType::RegularFile | FileType::Directory => Vec::new(),
        FileType::Fifo => match file.read(&mut start) {
            Ok(0) => return Err(invalid("it is a FIFO that nobody writes to")),
            Ok(_) => start.to_vec(),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Vec::new(),
            Err(e) => return Err(e),
        },
        _ => return Err(invalid("it is neither a regular file nor a pipe")),
    };
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    file.take(USER_FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > USER_FILE_BYTES_MAX {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            format!("it is longer than the limit of {USER_FILE_BYTES_MAX} bytes"),
        ));
    }
    String::from_utf8(bytes).map_err(|_| io::Error::new(ErrorKind::InvalidData, "it is not UTF-8 text"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn devices_and_idle_pipes_are_refused_and_a_pipe_is_read_to_its_end() {
        let at = tempfile::tempdir().unwrap();
        let (file, fifo) = (at.path().join("file"), at.path().join("fifo"));
        std::fs::write(&file, "abc").unwrap();
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        assert_eq!(read(&file).unwrap(), "abc");
        assert_eq!(read(Path::new("/dev/zero")).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert!(read(&fifo).unwrap_err().to_string().contains("nobody writes"));
        assert!(read(at.path()).is_err());
        let (reader, mut writer) = io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
        writer.write_all(b"abc").unwrap();
        let writing = std::thread::spawn(move || writer.write_all(b"def").unwrap());
        assert_eq!(read(Path::new(&path)).unwrap(), "abcdef");
        writing.join().unwrap();
    }
}
