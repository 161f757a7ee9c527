//! Mapped files: memory that several processes share.

use crate::memory::Memory;
use everstep_wire::private;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

/// Number of bytes that are made present at a time; a multiple of the page size.
const POPULATE_BYTES: usize = 2 << 20;

/// A file mapped for reading and writing, shared with other processes.
///
/// Only this crate makes mappings, so that no other code changes bytes while they are read in
/// place. Other processes of this user could open the files, too: as with every mapped file, it
/// cannot be checked that they follow the protocol.
#[derive(Debug)]
pub struct Mapping {
    map: MmapRaw,
}

// SAFETY: a mapping is aligned to a page, and neither its address nor its length changes until it
// is dropped. `MmapRaw` gives out raw pointers only.
unsafe impl Memory for Mapping {
    fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    fn len(&self) -> usize {
        self.map.len()
    }
}

impl Mapping {
    /// Creates (or re-opens) a file of at least `bytes` with its space reserved, and maps it.
    ///
    /// # Errors
    /// Those of the file system; `StorageFull` when there is not enough space (now, not as a SIGBUS
    /// later).
    pub(crate) fn create(path: &Path, bytes: u64) -> io::Result<Self> {
        let file = private::open(path, OFlags::RDWR | OFlags::CREATE)?;
        let reserved = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes);
        if let Err(e) = reserved {
            if matches!(e, rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) {
                file.set_len(bytes)?;
            } else {
                return Err(e.into());
            }
        }
        Self::of(&file)
    }

    /// Maps an existing file.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = private::open(path, OFlags::RDWR)?;
        Self::of(&file)
    }

    /// Maps a file that another process of this user has open, by its path in `/proc`, which is a
    /// link.
    ///
    /// # Errors
    /// Those of the file system; `InvalidInput` when it is not a regular file (a file in memory is
    /// one).
    pub(crate) fn open_shared(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        Self::of(&file)
    }

    fn of(file: &File) -> io::Result<Self> {
        Ok(Mapping { map: MmapOptions::new().map_raw(file)? })
    }

    /// Makes every page present, so that the first copy does not cause page faults.
    ///
    /// # Errors
    /// Those of `madvise`; an old kernel without `MADV_POPULATE_WRITE` is not an error.
    pub(crate) fn populate(&self) -> io::Result<()> {
        // Piece by piece: the kernel holds the lock of the address space during a whole call, and
        // an agent that cannot map anything for seconds is considered dead.
        for start in (0..self.map.len()).step_by(POPULATE_BYTES) {
            let bytes = POPULATE_BYTES.min(self.map.len() - start);
            // SAFETY: the range lies within this mapping; populating does not change its contents.
            let done = unsafe {
                let from = self.map.as_mut_ptr().add(start);
                rustix::mm::madvise(from.cast(), bytes, rustix::mm::Advice::LinuxPopulateWrite)
            };
            match done {
                Ok(()) => {}
                Err(rustix::io::Errno::INVAL) => return Ok(()),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}
