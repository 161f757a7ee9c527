//! What a coordinator reads when it starts: its epoch, and the jobs of earlier coordinators.

use crate::store::{Store, redb::RedbStore};
use everstep_core::coordinator::command::Precondition;
use everstep_core::coordinator::event::{StoreFailure, Version};
use everstep_core::coordinator::job::JobRecord;
use everstep_core::id::Epoch;

/// Why a coordinator cannot use what the store contains.
#[derive(Debug, thiserror::Error)]
pub enum RecordsError {
    #[error("cannot read the store: {why}")]
    Unreadable { why: String },
    #[error("cannot write the store: {why}; check that the disk has free space and that you have write permission")]
    Unwritable { why: String },
    #[error("another coordinator has written the store")]
    Conflict,
    /// The record of a job is damaged, or another version wrote it.
    #[error(
        "the record of job {job} in the store cannot be read: {source}; use the everstep version that wrote it, or \
         move store.redb away to begin with an empty store (checkpoints are not in it)"
    )]
    Job { job: String, source: serde_json::Error },
}

/// Issues an epoch later than all before it.
///
/// # Errors
/// Fails if the store cannot be read or written.
pub fn take_epoch(store: &RedbStore) -> Result<Epoch, RecordsError> {
    let version = store.get("epoch").map_err(|_| unreadable(store))?.map(|(_, v)| v);
    let precondition = version.map_or(Precondition::Absent, Precondition::Version);
    store.put("epoch", b"", precondition).map(Epoch).map_err(|e| match e {
        StoreFailure::Conflict => RecordsError::Conflict,
        StoreFailure::Unavailable => RecordsError::Unwritable { why: store.why() },
    })
}

fn unreadable(store: &RedbStore) -> RecordsError {
    RecordsError::Unreadable { why: store.why() }
}

/// Returns the jobs in the store.
///
/// # Errors
/// Fails if the store or a job's record cannot be read. Such a job must not be forgotten, because
/// its generation numbers are in use.
pub fn load(store: &RedbStore) -> Result<Vec<(JobRecord, Version)>, RecordsError> {
    let found = store.list("job/").map_err(|_| unreadable(store))?;
    let record = |(key, value, v): (String, Vec<u8>, Version)| {
        let read = serde_json::from_slice(&value).map_err(|source| {
            let job = key.trim_start_matches("job/").to_owned();
            RecordsError::Job { job, source }
        });
        read.map(|record| (record, v))
    };
    found.into_iter().map(record).collect()
}
