//! Finds all descendants of this process in /proc. Parents lead here, and the sub-reaper is the
//! parent of orphans.

use rustix::process::{Pid, Signal};
use std::collections::BTreeMap;

/// Returns the process ids of all living descendants (without zombies), except the process `spared`
/// and its descendants.
pub fn descendants(spared: Option<u32>) -> Vec<i32> {
    let mut children: BTreeMap<i32, Vec<(i32, bool)>> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // The command's name is in parentheses and may contain more: parse from the last one.
        let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
        let mut fields = rest.split(' ');
        let zombie = fields.next() == Some("Z");
        if let Some(parent) = fields.next().and_then(|p| p.parse().ok()) {
            children.entry(parent).or_default().push((pid, zombie));
        }
    }
    let mut found = Vec::new();
    let mut open = vec![std::process::id() as i32];
    while let Some(pid) = open.pop() {
        for (child, zombie) in children.remove(&pid).unwrap_or_default() {
            // What the spared process forks for itself is spared, too. A worker that it forks is
            // the guard's child before it begins.
            if spared.is_some_and(|s| s as i32 == child) {
                continue;
            }
            open.push(child);
            if !zombie {
                found.push(child);
            }
        }
    }
    found
}

/// Sends KILL to all descendants, except the process `spared` and its descendants.
pub fn kill_all(spared: Option<u32>) {
    for pid in descendants(spared) {
        if let Some(pid) = Pid::from_raw(pid) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}
