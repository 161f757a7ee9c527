//! Reads small files of the kernel in as few reads as possible, one per page. For some of them, the
//! kernel recomputes the whole content at each read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The kernel fills a page with as many whole lines as fit (seq_file): a shorter read is the last.
const LAST: usize = 2048;

/// Reads the whole file into `bytes`, which grows as needed. Returns its length.
fn fill(file: &File, bytes: &mut Vec<u8>) -> std::io::Result<usize> {
    let mut held = 0;
    loop {
        if bytes.len() < held + 4096 {
            bytes.resize(held * 2 + 4096, 0);
        }
        let new = file.read_at(bytes.get_mut(held..).unwrap_or_default(), held as u64)?;
        held += new;
        if new < LAST {
            return Ok(held);
        }
    }
}

/// Returns the content of a file.
pub fn read(path: impl AsRef<Path>) -> Option<String> {
    let mut bytes = vec![0; 16 << 10];
    let held = fill(&File::open(path).ok()?, &mut bytes).ok()?;
    bytes.truncate(held);
    String::from_utf8(bytes).ok()
}

/// Returns the content of a file that is kept open, in a buffer that is kept, too. Returns an empty
/// string if it cannot be read.
pub fn again<'b>(file: &File, bytes: &'b mut Vec<u8>) -> &'b str {
    let held = fill(file, bytes).unwrap_or(0);
    std::str::from_utf8(bytes.get(..held).unwrap_or_default()).unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_any_length_are_read_whole() {
        let at = tempfile::NamedTempFile::new().unwrap();
        for length in [0, 1, 2047, 2048, 16383, 16384, 100_000] {
            let text = "x".repeat(length);
            std::fs::write(at.path(), &text).unwrap();
            assert_eq!(read(at.path()).unwrap(), text);
            assert_eq!(again(&File::open(at.path()).unwrap(), &mut Vec::new()), text);
        }
        let many = read("/proc/self/smaps").unwrap();
        assert!(many.len() > 4096 && many.trim_end().lines().last().unwrap().starts_with("VmFlags"), "{many}");
        assert_eq!(read("/nowhere"), None);
    }
}
