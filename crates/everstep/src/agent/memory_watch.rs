//! The node's directory in shared memory may be removed while its job runs: systemd-logind does that when its user logs out
//! (RemoveIPC), people do it by hand. Workers keep what they have mapped, which nobody else can open any more.
//!
//! The agent creates the directory and its socket again. Workers find their slots gone at the next step, reserve new ones
//! and capture at once (`tiers.py`). Boards stay what they are: both sides have them mapped, and the next generation gets new ones.

use super::{Driver, listen};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What the directory was when it was last known to be good.
#[derive(Default)]
pub(super) struct MemoryWatch {
    identity: Option<(u64, u64)>,
    /// It was found missing at the last look: whoever removes it may not be done.
    missed: bool,
    /// Why it could not be created again, so that it is said once.
    trouble: Option<String>,
}

fn identity(directory: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(directory).ok().map(|m| (m.dev(), m.ino()))
}

impl MemoryWatch {
    pub fn of(directory: &Path) -> Self {
        MemoryWatch { identity: identity(directory), missed: false, trouble: None }
    }
}

impl Driver {
    /// Two system calls, ten times a second.
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
                self.memory = MemoryWatch::of(&self.template.memory);
                crate::say!(
                    "{directory} was removed while the job runs (systemd-logind does that at logout, see RemoveIPC in \
                     logind.conf); it is created again, and workers capture their next step there"
                );
            }
            Err(e) => {
                let why = e.to_string();
                if self.memory.trouble.as_ref() != Some(&why) {
                    crate::say!(
                        "{directory} was removed while the job runs and cannot be created again: {why}; checkpoints go to disk"
                    );
                    self.memory.trouble = Some(why);
                }
            }
        }
    }
}
