//! Limits on open files. This program uses as many as the system allows; the programs it starts get
//! the user's own limit, as under torchrun.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;

/// More than any job needs; some systems allow a billion.
const MOST: u64 = 1 << 20;

static USERS: OnceLock<Rlimit> = OnceLock::new();

/// Raises the soft limit as far as possible.
pub fn raise() {
    let users = *USERS.get_or_init(|| getrlimit(Resource::Nofile));
    let most = users.maximum.unwrap_or(MOST).min(MOST);
    if users.current.is_some_and(|now| now < most) {
        // If this is forbidden, the limit stays as it was.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: users.maximum });
    }
}

/// Returns the user's soft limit; `None` if there is none.
pub fn users() -> Option<u64> {
    USERS.get_or_init(|| getrlimit(Resource::Nofile)).current
}

/// Sets the user's soft limit, as returned by [`users`] in the process that started this one.
pub fn inherit(soft: Option<u64>) {
    let now = getrlimit(Resource::Nofile);
    let _ = USERS.set(Rlimit { current: soft.or(now.current), maximum: now.maximum });
}

/// Gives `command` the user's limit.
pub fn restore(command: &mut Command) -> &mut Command {
    let users = *USERS.get_or_init(|| getrlimit(Resource::Nofile));
    // SAFETY: only one system call between fork and exec.
    unsafe { command.pre_exec(move || setrlimit(Resource::Nofile, users).map_err(Into::into)) }
}
