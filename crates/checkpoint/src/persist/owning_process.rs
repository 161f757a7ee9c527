//! The process that renews an owner's record, in a form that other machines and later starts can
//! check.

use crate::process::{self, started};
use everstep_core::ownership::ProcessId;
use std::fs;

/// Returns the scope of this machine's process ids: the kernel's boot id and the PID namespace.
/// Empty if unknown.
fn place() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = fs::read_link("/proc/self/ns/pid").map(|p| p.display().to_string()).unwrap_or_default();
    if boot.is_empty() || space.is_empty() { String::new() } else { format!("{} {space}", boot.trim()) }
}

/// Describes this process.
pub(super) fn this_process() -> ProcessId {
    let pid = std::process::id();
    ProcessId { place: place(), pid, started: started(pid).unwrap_or(0) }
}

/// Returns whether the process ran on this machine and has certainly ended.
pub(super) fn has_ended(process: &ProcessId) -> bool {
    let here = !process.place.is_empty() && process.place == place();
    here && process::has_ended(process.pid, process.started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_from_a_later_one_with_its_number() {
        let me = this_process();
        assert!(!has_ended(&me));
        assert!(has_ended(&ProcessId { started: me.started + 1, ..me.clone() }));
        assert!(!has_ended(&ProcessId { place: "another machine".into(), ..me }));
    }
}
