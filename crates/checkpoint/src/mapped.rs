//! Slots that stay mapped: a fresh mapping costs a page fault per page, which is as slow as
//! copying.

use crate::arena::Slot;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Mappings of slot files, by path.
#[derive(Debug, Default)]
pub struct Mapped {
    /// With the inode of the file: another file under the same name is another slot.
    slots: Mutex<BTreeMap<PathBuf, (u64, Arc<Slot>)>>,
}

impl Mapped {
    /// Returns the slot at `path`, and opens it if it is not open yet.
    ///
    /// # Errors
    /// The same as for [`Slot::open`].
    pub fn open(&self, path: &Path) -> io::Result<Arc<Slot>> {
        let about = match std::fs::symlink_metadata(path) {
            Ok(about) => about,
            Err(e) => {
                self.forget(path);
                return Err(e);
            }
        };
        let mut slots = self.slots.lock().map_err(|e| io::Error::other(e.to_string()))?;
        if let Some((inode, slot)) = slots.get(path)
            && *inode == about.ino()
            && slot.bytes() as u64 == about.len()
        {
            return Ok(Arc::clone(slot));
        }
        let slot = Arc::new(Slot::open(path)?);
        slots.insert(path.into(), (about.ino(), Arc::clone(&slot)));
        Ok(slot)
    }

    /// Drops the mapping of a file that is no longer a slot.
    pub fn forget(&self, path: &Path) {
        if let Ok(mut slots) = self.slots.lock() {
            slots.remove(path);
        }
    }
}
