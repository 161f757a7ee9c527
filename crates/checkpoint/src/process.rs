//! Processes of this machine, told apart although their numbers are used again.

use std::fs;

/// State and start time of a process, in clock ticks since the machine was started; `None` if there is none.
pub(crate) fn stat(pid: u32) -> Option<(char, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

fn identity(pid: u32, started: u64) -> u64 {
    (started << 32) | u64::from(pid)
}

/// This process as one word.
pub(crate) fn this() -> u64 {
    let pid = std::process::id();
    identity(pid, stat(pid).map_or(0, |(_, started)| started))
}

/// The number of the process.
pub(crate) fn number(process: u64) -> u32 {
    (process & u64::from(u32::MAX)) as u32
}

/// Whether a process that [`this`] has described has not ended.
pub(crate) fn lives(process: u64) -> bool {
    let pid = number(process);
    stat(pid).is_some_and(|(state, started)| !matches!(state, 'Z' | 'X') && identity(pid, started) == process)
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
        let known = identity(child.id(), stat(child.id()).unwrap().1);
        assert!(lives(known));
        child.kill().unwrap();
        while stat(child.id()).is_some_and(|(state, _)| state != 'Z') {
            std::thread::yield_now();
        }
        assert!(!lives(known), "it has not been waited for");
        child.wait().unwrap();
        assert!(!lives(known));
    }
}
