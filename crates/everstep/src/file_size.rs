//! The limit on file sizes (`ulimit -f`): a write beyond it fails with an error that can be
//! reported, instead of ending the process.

use rustix::process::Signal;
use std::ffi::c_int;

const DEFAULT: usize = 0;

// SAFETY: the C library of every Linux target defines `signal` with this signature. A handler is
// the address of a function, or a small constant such as `SIG_DFL`. Both fit into a `usize`.
unsafe extern "C" {
    fn signal(number: c_int, handler: usize) -> usize;
}

extern "C" fn nothing(_: c_int) {}

/// Makes writes beyond the limit fail with `EFBIG` from now on. Programs started later get the
/// signal as this one found it.
pub fn report() {
    // SAFETY: the handler does nothing. Unlike an ignored signal, a handler is not inherited over
    // exec.
    unsafe {
        let before = signal(Signal::XFSZ.as_raw(), nothing as *const () as usize);
        if before != DEFAULT {
            signal(Signal::XFSZ.as_raw(), before);
        }
    }
}
