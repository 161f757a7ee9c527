//! Mapped files: the only home of `unsafe` for shared memory.

use crate::fused::Running;
use everstep_wire::private;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Pages are made present so much at a time; a multiple of the page size.
const POPULATE_BYTES: usize = 2 << 20;

/// A file mapped for reading and writing, shared with other processes.
#[derive(Debug)]
pub struct Mapping {
    map: MmapRaw,
}

// SAFETY: the mapping is plain memory; whoever writes through it obeys the slot protocol (one writer per slot).
unsafe impl Sync for Mapping {}
// SAFETY: as above; the mapping is not tied to a thread.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Creates (or re-opens) a file of at least `bytes` with its space reserved, and maps it.
    ///
    /// # Errors
    /// Those of the file system; `StorageFull` when the space is not there (now, not as a SIGBUS later).
    pub fn create(path: &Path, bytes: u64) -> io::Result<Self> {
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
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = private::open(path, OFlags::RDWR)?;
        Self::of(&file)
    }

    /// Maps what another process of this user has open, by its path in `/proc`, which is a link.
    ///
    /// # Errors
    /// Those of the file system; `InvalidInput` when it is not a regular file (as one in memory is).
    pub fn open_shared(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        Self::of(&file)
    }

    fn of(file: &File) -> io::Result<Self> {
        Ok(Mapping { map: MmapOptions::new().map_raw(file)? })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// True for an empty file.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.map.len() == 0
    }

    /// Makes every page present, so that the first copy does not pay for it.
    ///
    /// # Errors
    /// Those of `madvise`; an old kernel without `MADV_POPULATE_WRITE` is not one.
    pub fn populate(&self) -> io::Result<()> {
        // Piece by piece: the kernel holds the lock of the address space for the whole of a call, and an agent that cannot
        // map anything for seconds is taken for dead.
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

    /// The 64-bit word at `offset` (a multiple of 8), shared with other processes.
    ///
    /// # Panics
    /// When `offset` lies outside the mapping or is not aligned: offsets are constants of the format.
    #[must_use]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len(), "word outside the mapping");
        // SAFETY: in bounds and aligned (checked above; mappings are page-aligned); atomics may be shared.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(offset).cast()) }
    }

    /// The lower half of the 64-bit word at `offset` (little endian: the first four bytes).
    ///
    /// # Panics
    /// As [`Mapping::word`].
    #[must_use]
    pub fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len(), "word outside the mapping");
        // SAFETY: in bounds and aligned (checked above); atomics may be shared.
        unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().add(offset).cast()) }
    }

    /// Copies bytes out.
    #[must_use]
    pub fn read(&self, offset: usize, len: usize) -> Option<Vec<u8>> {
        self.bytes(offset, len).map(<[u8]>::to_vec)
    }

    /// Looks at bytes. Who looks must know that nobody writes them now (slot protocol).
    #[must_use]
    pub fn bytes(&self, offset: usize, len: usize) -> Option<&[u8]> {
        let end = offset.checked_add(len)?;
        // SAFETY: in bounds (checked); plain bytes have no invalid values.
        (end <= self.len()).then(|| unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(offset), len) })
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        // SAFETY: a slice is readable for its whole length.
        unsafe { self.write_from(offset, bytes.as_ptr(), bytes.len()) }
    }

    /// As [`Mapping::write_from`], with a checksum over what is copied, in one pass. Other threads may not see it before this
    /// one has called [`crate::fused::fence`].
    ///
    /// # Safety
    /// As [`Mapping::write_from`]; nobody else writes there meanwhile.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit.
    pub unsafe fn sum_from(&self, offset: usize, source: *const u8, len: usize, sum: &mut Running) -> io::Result<()> {
        self.check(offset, len)?;
        // SAFETY: the target is in bounds (checked), the rest is the caller's promise.
        unsafe { sum.copy_piece(self.map.as_mut_ptr().add(offset), source, len) };
        Ok(())
    }

    /// The address of `len` bytes that a system call is to fill.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit.
    pub fn target(&self, offset: usize, len: usize) -> io::Result<*mut u8> {
        self.check(offset, len)?;
        Ok(self.map.as_mut_ptr().wrapping_add(offset))
    }

    fn check(&self, offset: usize, len: usize) -> io::Result<()> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len());
        fits.then_some(()).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "does not fit into the mapping"))
    }

    /// Copies `len` bytes from `source`.
    ///
    /// # Safety
    /// `source` must be readable for `len` bytes and not overlap this mapping.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit.
    pub unsafe fn write_from(&self, offset: usize, source: *const u8, len: usize) -> io::Result<()> {
        self.check(offset, len)?;
        // SAFETY: the target is in bounds (checked), the source is the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(source, self.map.as_mut_ptr().add(offset), len) };
        Ok(())
    }
}
