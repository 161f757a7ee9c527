//! Restores the node's directory in shared memory if it is removed while the job runs.
//! systemd-logind removes it when its user logs out (RemoveIPC), and people remove it by hand.
//! Workers keep what they have mapped, but no other process can open it any more.
//!
//! The agent creates the directory and its socket again. At the next step, workers find their slots
//! gone, reserve new ones and capture at once (`agent_tier.py`). Boards are unaffected: both sides
//! have them mapped, and the next generation gets new ones.

use super::{Driver, listen};
use crate::lock;
use everstep_wire::private::{Directory, Root};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The directory's identity when it was last intact.
#[derive(Default)]
pub(super) struct MemoryWatch {
    identity: Option<(u64, u64)>,
    /// The directory was missing at the previous look. Whoever removes it may not be done yet, so
    /// it is restored at the next one.
    missed: bool,
    /// The directory that was created again, locked as the first one was (`cli/run`).
    _lock: Option<Directory>,
    /// Why the directory could not be created again, so that it is reported only once.
    trouble: Option<String>,
}

fn identity(directory: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(directory).ok().map(|m| (m.dev(), m.ino()))
}

impl MemoryWatch {
    pub fn of(directory: &Path) -> Self {
        MemoryWatch { identity: identity(directory), ..MemoryWatch::default() }
    }

    /// The same for a directory that was created again.
    fn of_new(directory: &Path) -> Self {
        let lock = Directory::existing(directory, Root::Named).ok();
        let lock = lock.filter(|of| lock::take_directory(of).unwrap_or(false));
        MemoryWatch { _lock: lock, ..MemoryWatch::of(directory) }
    }
}

impl Driver {
    /// Checks the directory. Called ten times a second, it costs two system calls.
    pub(super) fn watch_memory(&mut self) {
        let found = identity(&self.template.memory);
        if found.is_some() && found == self.memory.identity && self.template.socket.exists() {
            self.memory.missed = false;
            return;
        }
        if !std::mem::replace(&mut self.memory.missed, true) {
            return;
        }
        let directory = self.template.memory.display();
        match listen::to_workers(&self.template, &self.inbox) {
            Ok(()) => {
                self.memory = MemoryWatch::of_new(&self.template.memory);
                crate::say_warning!(
                    "{directory} was removed while the job was running (systemd-logind does that at logout, see \
                     RemoveIPC in logind.conf); it was re-created, and workers snapshot their next step there"
                );
            }
            Err(e) => {
                let why = e.to_string();
                if self.memory.trouble.as_ref() != Some(&why) {
                    crate::say_warning!(
                        "{directory} was removed while the job was running and cannot be re-created: {why}; \
                         checkpoints go to disk"
                    );
                    self.memory.trouble = Some(why);
                }
            }
        }
    }
}
