//! Children that end are waited for here. Where whoever started this program ignores SIGCHLD, the kernel would forget them unseen.

use rustix::process::Signal;
use std::ffi::c_int;

const DEFAULT: usize = 0;

unsafe extern "C" {
    fn signal(number: c_int, handler: usize) -> usize;
}

/// From now on the kernel keeps how a child ended until it is asked. Programs started from here inherit that.
pub fn keep() {
    // SAFETY: no handler of this program is replaced: it has none yet.
    unsafe { signal(Signal::CHILD.as_raw(), DEFAULT) };
}
