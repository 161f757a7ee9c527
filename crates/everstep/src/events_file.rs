//! `events.jsonl`, in the directory of a coordinator's store: what was recorded about its jobs.

use everstep_checkpoint::regular_file::read_regular;
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Returns the file with the facts about all jobs of a store.
pub fn path(directory: &Path) -> PathBuf {
    directory.join("events.jsonl")
}

/// Returns the recorded lines of a store. Of a damaged one, readers skip what is no JSON.
///
/// # Errors
/// Those of the file system, except that there is none yet; `InvalidInput` for anything but a
/// regular file.
pub fn read(file: &Path) -> std::io::Result<String> {
    match read_regular(file, u64::MAX) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(e) => Err(e),
    }
}

/// Opens the event log for appending. Ends a line that an earlier coordinator left unfinished, so
/// that it does not spoil the next one.
pub fn open(path: &Path) -> std::io::Result<File> {
    let mut file = everstep_wire::private::open(path, OFlags::RDWR | OFlags::CREATE | OFlags::APPEND)?;
    let mut last = [b'\n'];
    if file.seek(SeekFrom::End(-1)).is_ok() {
        file.read_exact(&mut last)?;
    }
    if last != [b'\n'] {
        file.write_all(b"\n")?;
    }
    Ok(file)
}
