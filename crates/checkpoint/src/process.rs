//! Identifies processes of this machine, although their numbers are reused.

use std::fs;
use std::os::unix::fs::MetadataExt;

/// Returns when a process was started, in clock ticks since the machine booted; `None` if it does
/// not exist, or if it has ended and has not been waited for yet.
pub(crate) fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain any characters.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let ended = matches!(fields.next()?, "Z" | "X");
    fields.nth(18)?.parse().ok().filter(|_| !ended)
}

/// Returns whether no process has this number.
pub(crate) fn is_gone(pid: i32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid);
    pid.is_none_or(|pid| rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH))
}

/// Returns whether the process that was started at `then` has certainly ended. With `hidepid`,
/// `/proc` does not show those of other users.
pub(crate) fn has_ended(pid: u32, then: u64) -> bool {
    match started(pid) {
        Some(now) => now != then,
        None => fs::metadata(format!("/proc/{pid}/stat")).is_ok() || i32::try_from(pid).map_or(true, is_gone),
    }
}

fn identity(pid: u32, started: u64) -> u64 {
    (started << 32) | u64::from(pid)
}

/// Returns the identity of this process as one word: its start time and its number.
pub(crate) fn this() -> u64 {
    let pid = std::process::id();
    identity(pid, started(pid).unwrap_or(0))
}

/// Returns the number of the process.
pub(crate) fn number(process: u64) -> u32 {
    (process & u64::from(u32::MAX)) as u32
}

/// Returns whether the word has both the number of a process and its start time.
pub(crate) fn is_complete(process: u64) -> bool {
    number(process) != 0 && process >> 32 != 0
}

/// Returns the pid namespace of this process, in which its number is valid; 0 if it is not known.
pub(crate) fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

/// Returns whether a process that [`this`] has described has not ended.
pub(crate) fn lives(process: u64) -> bool {
    let pid = number(process);
    started(pid).is_some_and(|started| identity(pid, started) == process)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_lives_until_it_ends() {
        assert!(lives(this()) && number(this()) == std::process::id());
        assert!(!lives(identity(std::process::id(), 1)), "another process had this number");
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let known = identity(child.id(), started(child.id()).unwrap());
        assert!(lives(known));
        child.kill().unwrap();
        while started(child.id()).is_some() {
            std::thread::yield_now();
        }
        assert!(!lives(known), "it has not been waited for");
        child.wait().unwrap();
        assert!(!lives(known));
    }
}
