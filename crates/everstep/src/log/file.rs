//! A log file of bounded size. `file-rotate` panics if the directory is gone, and
//! `tracing-appender` bounds the number of files only, but a job must not end, and a disk must not
//! fill up, because of a log.

use everstep_wire::private;
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Bytes after which a file is put aside. There are two files at most.
const BYTES_MAX: u64 = 4 << 20;

/// The file that is written to, `NAME`, and the one before it, `NAME.1`.
pub struct Rotating {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl Rotating {
    /// Opens or creates the file. Only this user can read it.
    ///
    /// # Errors
    /// Those of the file system, and if it is not a regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = private::open(path, OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE)?;
        let bytes = file.metadata()?.len();
        Ok(Rotating { path: path.to_owned(), file, bytes })
    }

    /// Appends a line. If that fails, the line is lost.
    pub fn write(&mut self, line: &str) {
        if self.bytes > BYTES_MAX {
            self.rotate().unwrap_or_else(|_| self.begin_again());
        }
        let line = format!("{line}\n");
        if self.file.write_all(line.as_bytes()).is_ok() {
            self.bytes += line.len() as u64;
        }
    }

    /// Empties the file, which cannot be put aside: its directory may be gone.
    fn begin_again(&mut self) {
        let _ = self.file.set_len(0);
        self.bytes = 0;
    }

    fn rotate(&mut self) -> io::Result<()> {
        std::fs::rename(&self.path, before(&self.path))?;
        *self = Rotating::open(&self.path)?;
        Ok(())
    }
}

/// Returns the name of the file before this one.
pub fn before(path: &Path) -> PathBuf {
    path.with_added_extension("1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_files_of_bounded_size_are_kept_and_a_directory_that_is_gone_does_not_matter() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.log");
        let mut log = Rotating::open(&path).unwrap();
        let line = "x".repeat(1 << 20);
        (0..18).for_each(|_| log.write(&line));
        let sizes = [&path, &before(&path)].map(|p| std::fs::metadata(p).unwrap().len());
        assert!(sizes.iter().all(|s| *s > 0 && *s <= BYTES_MAX + (2 << 20)), "{sizes:?}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
        // What was there before is continued.
        let mut again = Rotating::open(&path).unwrap();
        again.write("last");
        assert!(std::fs::read_to_string(&path).unwrap().ends_with("x\nlast\n"));
        directory.close().unwrap();
        (0..20).for_each(|_| log.write(&line));
        assert!(log.file.metadata().unwrap().len() <= BYTES_MAX + (2 << 20));
    }
}
