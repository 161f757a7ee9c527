//! A limit on the memory that one input may take. libFuzzer's own limit is on resident memory, and
//! misses a large allocation that is not touched.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Most bytes that an input may take, unless its target needs more. Inputs have a few KiB.
pub const LIMIT: usize = 256 << 20;

/// Bytes allocated now.
static HELD: AtomicUsize = AtomicUsize::new(0);
/// The value of [`HELD`] at which the process aborts.
static CEILING: AtomicUsize = AtomicUsize::new(usize::MAX);

#[global_allocator]
static HEAP: Counting = Counting;

/// The system's allocator, counted.
struct Counting;

/// Counts an allocation. Aborts above the ceiling: an allocator must not unwind.
fn grow(bytes: usize) {
    if HELD.fetch_add(bytes, Relaxed).saturating_add(bytes) > CEILING.load(Relaxed) {
        CEILING.store(usize::MAX, Relaxed);
        eprintln!("an input takes too much memory, {bytes} bytes at once\n{}", Backtrace::force_capture());
        std::process::abort();
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        grow(bytes);
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, bytes) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Calls `check`, and aborts the process if it takes more than `limit` bytes.
pub fn limited(limit: usize, check: impl FnOnce()) {
    CEILING.store(HELD.load(Relaxed).saturating_add(limit), Relaxed);
    check();
    CEILING.store(usize::MAX, Relaxed);
}
