//! The limit on the size of files (`ulimit -f`): a write beyond it is an error, which is said, and not the end of the process.

use rustix::process::Signal;
use std::ffi::c_int;

const DEFAULT: usize = 0;

unsafe extern "C" {
    fn signal(number: c_int, handler: usize) -> usize;
}

extern "C" fn nothing(_: c_int) {}

/// From now on writes beyond the limit fail with `EFBIG`. Programs started from here have the signal as this one found it.
pub fn report() {
    // SAFETY: the handler does nothing. A handler, unlike a signal that is ignored, is not inherited over exec.
    unsafe {
        let before = signal(Signal::XFSZ.as_raw(), nothing as *const () as usize);
        if before != DEFAULT {
            signal(Signal::XFSZ.as_raw(), before);
        }
    }
}
