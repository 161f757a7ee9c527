//! What a coordinator finds when it starts: its life, the jobs of earlier ones, the file of what has happened.

use crate::store::{Store, redb::RedbStore};
use everstep_core::coordinator::command::Precondition;
use everstep_core::coordinator::event::{StoreFailure, Version};
use everstep_core::coordinator::state::JobRecord;
use everstep_core::id::Epoch;
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

/// For lines at its end. One that a coordinator could not finish does not spoil the next one.
pub fn open_events(path: &Path) -> std::io::Result<File> {
    let mut file = everstep_wire::private::open(path, OFlags::RDWR | OFlags::CREATE | OFlags::APPEND)?;
    let mut last = [b'\n'];
    if file.seek(SeekFrom::End(-1)).is_ok() {
        file.read_exact(&mut last)?;
    }
    if last != [b'\n'] {
        file.write_all(b"\n")?;
    }
    Ok(file)
}

/// A later life than all before it.
pub fn take_epoch(store: &RedbStore) -> Result<Epoch, StoreFailure> {
    let version = store.get("epoch")?.map(|(_, v)| v);
    store.put("epoch", b"", version.map_or(Precondition::Absent, Precondition::Version)).map(Epoch)
}

/// The jobs that the store knows.
pub fn load(store: &RedbStore) -> Result<Vec<(JobRecord, Version)>, StoreFailure> {
    let found = store.list("job/")?;
    Ok(found.into_iter().filter_map(|(_, value, v)| Some((serde_json::from_slice(&value).ok()?, v))).collect())
}
