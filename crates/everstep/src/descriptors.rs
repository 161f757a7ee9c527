//! Open files: this program may use as many as the system allows; what it starts gets the limit that
//! the user has set, as under torchrun.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;

/// More than any job needs; some systems allow a thousand million.
const MOST: u64 = 1 << 20;

static USERS: OnceLock<Rlimit> = OnceLock::new();

/// Raises the soft limit as far as it goes.
pub fn raise() {
    let users = *USERS.get_or_init(|| getrlimit(Resource::Nofile));
    let most = users.maximum.unwrap_or(MOST).min(MOST);
    if users.current.is_some_and(|now| now < most) {
        // Where this is forbidden the limit stays what it was.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: users.maximum });
    }
}

/// The user's soft limit; `None`: there is none.
pub fn users() -> Option<u64> {
    USERS.get_or_init(|| getrlimit(Resource::Nofile)).current
}

/// As [`users`] says it in the process that has started this one.
pub fn inherit(soft: Option<u64>) {
    let now = getrlimit(Resource::Nofile);
    let _ = USERS.set(Rlimit { current: soft.or(now.current), maximum: now.maximum });
}

/// `command` gets the user's limit.
pub fn restore(command: &mut Command) -> &mut Command {
    let users = *USERS.get_or_init(|| getrlimit(Resource::Nofile));
    // SAFETY: one system call between fork and exec.
    unsafe { command.pre_exec(move || setrlimit(Resource::Nofile, users).map_err(Into::into)) }
}
