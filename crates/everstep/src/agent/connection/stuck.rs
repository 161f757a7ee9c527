//! Detects a stuck coordinator on this machine. A healthy one wakes up tens of times per second.
//! One that is stopped, frozen with its control group, or hung in the kernel does not.

use crate::coordinator::EndpointFile;
use std::path::Path;
use std::time::{Duration, Instant};

/// A coordinator that has not run for this long is stuck.
const LOOK: Duration = Duration::from_secs(1);

/// What the previous looks found.
#[derive(Default)]
pub struct Stuck {
    seen: Option<(u32, u64, Instant)>,
}

impl Stuck {
    /// Returns whether the coordinator of this store has not run since an earlier look, at
    /// least a second ago.
    pub fn look(&mut self, store: &Path) -> bool {
        let Some((pid, switches)) = wakeups(store) else {
            self.seen = None;
            return false;
        };
        match self.seen {
            Some((of, count, at)) if (of, count) == (pid, switches) => at.elapsed() >= LOOK,
            _ => {
                self.seen = Some((pid, switches, Instant::now()));
                false
            }
        }
    }
}

/// Returns the process id of the coordinator and its number of context switches.
fn wakeups(store: &Path) -> Option<(u32, u64)> {
    let pid = EndpointFile::read(store)?.pid;
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    // Another process may have this id by now.
    line.split(|b| *b == 0).nth(1).filter(|word| *word == b"coordinator")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let count = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)?.trim().parse::<u64>().ok());
    Some((pid, count("voluntary_ctxt_switches:")? + count("nonvoluntary_ctxt_switches:")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use everstep_core::id::Epoch;
    use everstep_wire::raw::Raw;
    use rustix::process::{Pid, Signal, kill_process};

    #[test]
    fn a_stopped_process_is_stuck_until_it_runs_again() {
        let dir = tempfile::tempdir().unwrap();
        let run = |name: &str| {
            std::fs::write(dir.path().join(name), "while :; do sleep 0.02; done").unwrap();
            std::process::Command::new("bash").arg(name).current_dir(dir.path()).spawn().unwrap()
        };
        let mut stuck = Stuck::default();
        let mut look = |child: &std::process::Child, seconds: u64| {
            let (endpoint, token_file) = (String::new(), Raw::default());
            let about = EndpointFile { endpoint, pid: child.id(), epoch: Epoch(1), token_file };
            about.write(dir.path()).unwrap();
            let end = Instant::now() + Duration::from_secs(seconds);
            while !stuck.look(dir.path()) {
                if Instant::now() >= end {
                    return false;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            true
        };
        let (mut child, mut other) = (run("coordinator"), run("something"));
        let signal = |child: &std::process::Child, signal| kill_process(Pid::from_child(child), signal).unwrap();
        assert!(!look(&child, 2), "it runs");
        signal(&child, Signal::STOP);
        assert!(look(&child, 60), "it is stopped");
        signal(&child, Signal::CONT);
        // It counts as stuck until the kernel has let it run.
        let end = Instant::now() + Duration::from_mins(1);
        while look(&child, 0) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!look(&child, 2), "it runs again");
        signal(&other, Signal::STOP);
        assert!(!look(&other, 2), "not a coordinator");
        for process in [&mut child, &mut other] {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }
}
