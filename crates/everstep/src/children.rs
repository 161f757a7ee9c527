//! Exit statuses of children. If the parent of this program ignores SIGCHLD, the kernel would
//! discard them.

use rustix::process::Signal;
use std::ffi::c_int;

const DEFAULT: usize = 0;

// SAFETY: the C library of every Linux target defines `signal` with this signature. A handler is
// the address of a function, or a small constant such as `SIG_DFL`. Both fit into a `usize`.
unsafe extern "C" {
    fn signal(number: c_int, handler: usize) -> usize;
}

/// Makes the kernel keep exit statuses until they are collected. Programs started later inherit
/// this.
pub fn keep() {
    // SAFETY: no handler of this program is replaced: it has none yet.
    unsafe { signal(Signal::CHILD.as_raw(), DEFAULT) };
}
