//! The embedded store: one redb file. Every write is one transaction, synced before it returns.

use super::Store;
use everstep_core::coordinator::command::Precondition;
use everstep_core::coordinator::event::{StoreFailure, Version};
use everstep_wire::private;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use rustix::fs::OFlags;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

const TABLE: TableDefinition<'_, &str, (Version, &[u8])> = TableDefinition::new("everstep");

/// A [`Store`] in one redb file.
pub struct RedbStore {
    db: Database,
    /// Why the last operation failed.
    why: Mutex<String>,
}

/// Why a store cannot be opened. Each message has the path and a remedy.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot open the store {}: {}", path.display(), advised(&source.to_string(), path))]
    File { path: PathBuf, source: std::io::Error },
    /// The file is damaged, locked, or of another version, or the disk fails.
    #[error("cannot open the store {}: {}", path.display(), advised(&source.to_string(), path))]
    Database { path: PathBuf, source: Box<redb::Error> },
}

impl RedbStore {
    /// Opens or creates the file.
    ///
    /// # Errors
    /// Fails if the file cannot be used.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let failed = |e: redb::Error| OpenError::Database { path: path.to_owned(), source: Box::new(e) };
        let file = private::open(path, OFlags::RDWR | OFlags::CREATE)
            .map_err(|source| OpenError::File { path: path.to_owned(), source })?;
        let db = Database::builder().create_file(file).map_err(|e| failed(e.into()))?;
        let write = db.begin_write().map_err(|e| failed(e.into()))?;
        write.open_table(TABLE).map_err(|e| failed(e.into()))?;
        write.commit().map_err(|e| failed(e.into()))?;
        Ok(RedbStore { db, why: Mutex::default() })
    }

    fn failed(&self, why: &dyn std::fmt::Display) -> StoreFailure {
        *self.why.lock().unwrap_or_else(PoisonError::into_inner) = why.to_string();
        StoreFailure::Unavailable
    }

    /// Returns why the last operation failed. The store must be reopened after a failure.
    pub fn why(&self) -> String {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Adds the remedy to `why`. redb passes on only the text of system errors.
fn advised(why: &str, path: &Path) -> String {
    let of = |e: rustix::io::Errno| why.contains(&std::io::Error::from(e).to_string());
    if of(rustix::io::Errno::FBIG) {
        return format!(
            "{why}; the store needs a few MiB, more than the file size limit allows; raise the limit (ulimit -f)"
        );
    }
    if of(rustix::io::Errno::NOSPC) || of(rustix::io::Errno::DQUOT) {
        return format!("{why}; free some space there, or set EVERSTEP_STATE_DIR to a directory on another disk");
    }
    if [rustix::io::Errno::ACCESS, rustix::io::Errno::PERM, rustix::io::Errno::ROFS, rustix::io::Errno::MFILE]
        .into_iter()
        .any(of)
    {
        return why.to_owned();
    }
    format!(
        "{why}; if the disk is sound, the file is damaged: move it away to begin with an empty store (mv {0} {0}.damaged); checkpoints are not in it and are not lost",
        path.display()
    )
}

impl Store for RedbStore {
    fn get(&self, key: &str) -> Result<Option<(Vec<u8>, Version)>, StoreFailure> {
        let read = self.db.begin_read().map_err(|e| self.failed(&e))?;
        let table = read.open_table(TABLE).map_err(|e| self.failed(&e))?;
        let entry = table.get(key).map_err(|e| self.failed(&e))?;
        Ok(entry.map(|e| (e.value().1.to_vec(), e.value().0)))
    }

    fn put(&self, key: &str, value: &[u8], when: Precondition) -> Result<Version, StoreFailure> {
        let write = self.db.begin_write().map_err(|e| self.failed(&e))?;
        let next = {
            let mut table = write.open_table(TABLE).map_err(|e| self.failed(&e))?;
            let version = table.get(key).map_err(|e| self.failed(&e))?.map(|e| e.value().0);
            let holds = match when {
                Precondition::Absent => version.is_none(),
                Precondition::Version(v) => version == Some(v),
            };
            if !holds {
                return Err(StoreFailure::Conflict);
            }
            let next = version.unwrap_or(0) + 1;
            table.insert(key, (next, value)).map_err(|e| self.failed(&e))?;
            next
        };
        write.commit().map_err(|e| self.failed(&e))?;
        Ok(next)
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>, Version)>, StoreFailure> {
        let read = self.db.begin_read().map_err(|e| self.failed(&e))?;
        let table = read.open_table(TABLE).map_err(|e| self.failed(&e))?;
        let mut found = Vec::new();
        for entry in table.range(prefix..).map_err(|e| self.failed(&e))? {
            let (key, value) = entry.map_err(|e| self.failed(&e))?;
            if !key.value().starts_with(prefix) {
                break;
            }
            found.push((key.value().to_owned(), value.value().1.to_vec(), value.value().0));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_need_the_version_they_rest_on_and_survive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        let store = RedbStore::open(&path).unwrap();
        assert_eq!(store.put("job/a", b"1", Precondition::Absent), Ok(1));
        assert_eq!(store.put("job/a", b"2", Precondition::Absent), Err(StoreFailure::Conflict));
        assert_eq!(store.put("job/a", b"2", Precondition::Version(1)), Ok(2));
        assert_eq!(store.put("job/a", b"3", Precondition::Version(1)), Err(StoreFailure::Conflict));
        store.put("kob", b"x", Precondition::Absent).unwrap();
        drop(store);
        let store = RedbStore::open(&path).unwrap();
        assert_eq!(store.get("job/a"), Ok(Some((b"2".to_vec(), 2))));
        assert_eq!(store.list("job/").unwrap(), vec![("job/a".into(), b"2".to_vec(), 2)]);
    }
}
