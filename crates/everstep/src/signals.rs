//! Signals that ask a process to end, or announce that it will be. A scheduler sends them to all
//! processes of a job at once (`systemctl stop`, `scancel`), but only the agent acts on them: it
//! lets the workers save, and what serves it ends after it.

use rustix::process::Signal;

/// Lets this process go on when it gets such a signal. Programs that it starts do not inherit that.
pub fn outlive() {
    for signal in [Signal::HUP, Signal::INT, Signal::QUIT, Signal::USR1, Signal::USR2, Signal::TERM] {
        // SAFETY: the handler does nothing, which is async-signal-safe.
        let _ = unsafe { signal_hook_registry::register(signal.as_raw(), || {}) };
    }
}
