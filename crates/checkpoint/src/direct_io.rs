//! Large files that bypass the page cache: aligned memory straight to the device (`O_DIRECT`),
//! several writers, space reserved first. Buffered writes of new data reach a third to a sixth of
//! that, and evict the pages of other processes.

use crate::regular_file::open_regular;
use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, fcntl_getfl, fcntl_setfl, ftruncate, open};
use rustix::io::{Errno, pread, pwrite};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Addresses, offsets and lengths are multiples of this number of bytes.
pub const ALIGN: usize = 4096;
/// Bytes per request.
const REQUEST_BYTES: usize = 8 << 20;
/// Number of requests in flight at once.
const WRITERS: usize = 4;

/// A limit on bandwidth, shared by all writers.
#[derive(Debug)]
pub struct Throttle {
    bytes_per_second: u64,
    next: Mutex<Instant>,
}

impl Throttle {
    /// Limits the bandwidth to `bytes_per_second`; 0 means no limit.
    #[must_use]
    pub fn new(bytes_per_second: u64) -> Self {
        Throttle { bytes_per_second, next: Mutex::new(Instant::now()) }
    }

    /// Returns how long to wait before `bytes` bytes may be written.
    pub fn delay(&self, bytes: usize) -> Duration {
        if self.bytes_per_second == 0 {
            return Duration::ZERO;
        }
        let Ok(mut next) = self.next.lock() else { return Duration::ZERO };
        let now = Instant::now();
        let start = (*next).max(now);
        *next = start + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        start.saturating_duration_since(now)
    }
}

/// Writes a new file from two pieces of page-aligned memory and makes it durable (to sync its
/// directory is up to the caller). The head is a multiple of [`ALIGN`] long; the body is written up
/// to the next multiple and cut to `body_bytes`.
///
/// # Errors
/// Those of the file system; `InvalidInput` when something is not aligned.
pub fn write_file(path: &Path, head: &[u8], body: &[u8], body_bytes: usize, throttle: &Throttle) -> io::Result<()> {
    let aligned = |b: &[u8]| b.is_empty() || (b.as_ptr() as usize).is_multiple_of(ALIGN);
    if !head.len().is_multiple_of(ALIGN) || !body.len().is_multiple_of(ALIGN) || !aligned(head) || !aligned(body) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "memory for a direct write is not aligned"));
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o644);
    let file = match open(path, flags | OFlags::DIRECT, mode) {
        // tmpfs before Linux 6.6, some network file systems.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => open(path, flags, mode)?,
        other => other?,
    };
    let total = head.len() + body_bytes;
    match fallocate(&file, FallocateFlags::empty(), 0, total as u64) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {}
        Err(e) => return Err(e.into()),
    }
    write_all(&file, head, 0, throttle)?;
    let next = AtomicUsize::new(0);
    let work = || -> io::Result<()> {
        loop {
            let at = next.fetch_add(REQUEST_BYTES, Ordering::Relaxed);
            let Some(piece) = body.get(at..(at + REQUEST_BYTES).min(body.len())).filter(|p| !p.is_empty()) else {
                return Ok(());
            };
            write_all(&file, piece, (head.len() + at) as u64, throttle)?;
        }
    };
    std::thread::scope(|scope| {
        let others = WRITERS.min(body.len().div_ceil(REQUEST_BYTES)).saturating_sub(1);
        // If a thread cannot be created, fewer of them do the work.
        let thread = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
        let helpers: Vec<_> = (0..others).filter_map(thread).collect();
        let mut done = work();
        for helper in helpers {
            done = done.and(helper.join().unwrap_or_else(|_| Err(io::Error::other("a writer panicked"))));
        }
        done
    })?;
    ftruncate(&file, total as u64)?;
    rustix::fs::fdatasync(&file)?;
    Ok(())
}

fn write_all(file: &OwnedFd, mut bytes: &[u8], mut at: u64, throttle: &Throttle) -> io::Result<()> {
    std::thread::sleep(throttle.delay(bytes.len()));
    while !bytes.is_empty() {
        match pwrite(file, bytes, at) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                bytes = bytes.get(n..).unwrap_or_default();
                at += n as u64;
            }
            Err(Errno::INTR) => {}
            // A device with larger blocks, or a short write before this one: the rest goes through
            // the page cache.
            Err(Errno::INVAL) if fcntl_getfl(file)?.contains(OFlags::DIRECT) => {
                fcntl_setfl(file, fcntl_getfl(file)? - OFlags::DIRECT)?;
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// A file opened for reading that bypasses the page cache if the file system supports it.
#[derive(Debug)]
pub struct Source {
    file: OwnedFd,
}

impl Source {
    /// Opens a file.
    ///
    /// # Errors
    /// Those of the file system; `InvalidInput` when it is not a regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let unsupported = |e: &io::Error| {
            let codes = [Errno::INVAL.raw_os_error(), Errno::OPNOTSUPP.raw_os_error()];
            e.raw_os_error().is_some_and(|code| codes.contains(&code))
        };
        let file = match open_regular(path, OFlags::RDONLY | OFlags::DIRECT) {
            Err(e) if unsupported(&e) => open_regular(path, OFlags::RDONLY)?,
            other => other?,
        };
        Ok(Source { file })
    }

    /// Returns the length of the file in bytes.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn bytes(&self) -> io::Result<u64> {
        u64::try_from(rustix::fs::fstat(&self.file)?.st_size).map_err(io::Error::other)
    }

    /// Fills `into` (aligned, as is `at`) up to the end of the file; returns the number of bytes
    /// read.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn read(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < into.len() {
            match pread(&self.file, into.get_mut(done..).unwrap_or_default(), at + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(Errno::INVAL) if fcntl_getfl(&self.file)?.contains(OFlags::DIRECT) => {
                    fcntl_setfl(&self.file, fcntl_getfl(&self.file)? - OFlags::DIRECT)?;
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(done)
    }
}
