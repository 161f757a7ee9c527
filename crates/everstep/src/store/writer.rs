//! A store that is reopened after a failed write: a full disk may have room again, a lost mount may
//! come back.

use super::Store;
use super::redb::RedbStore;
use everstep_core::coordinator::command::Precondition;
use everstep_core::coordinator::event::{StoreFailure, Version};
use std::path::PathBuf;

/// Writes to a [`RedbStore`], and reopens it after failures.
pub struct Writer {
    /// `None` after a failure.
    store: Option<RedbStore>,
    path: PathBuf,
    failing: bool,
    news: Option<String>,
}

impl Writer {
    /// Returns a writer to `store`, which was opened at `path`.
    pub fn new(store: RedbStore, path: PathBuf) -> Self {
        Writer { store: Some(store), path, failing: false, news: None }
    }

    /// Writes like [`Store::put`].
    ///
    /// # Errors
    /// [`StoreFailure`].
    pub fn put(&mut self, key: &str, value: &[u8], when: Precondition) -> Result<Version, StoreFailure> {
        let (result, why) = match self.store.take().map_or_else(|| RedbStore::open(&self.path), Ok) {
            Ok(store) => {
                let result = store.put(key, value, when);
                let why = store.why();
                if result != Err(StoreFailure::Unavailable) {
                    self.store = Some(store);
                }
                (result, why)
            }
            Err(e) => (Err(StoreFailure::Unavailable), e.to_string()),
        };
        let failing = result == Err(StoreFailure::Unavailable);
        if failing != std::mem::replace(&mut self.failing, failing) {
            let path = self.path.display();
            self.news = Some(if failing {
                format!(
                    "cannot write the store {path}: {why}; running ranks continue, but none is started or restarted until the store can be written"
                )
            } else {
                format!("the store {path} can be written again")
            });
        }
        result
    }

    /// Returns a notice for users, once after each change.
    pub fn news(&mut self) -> Option<String> {
        self.news.take()
    }

    /// Returns whether the latest write failed.
    pub fn failing(&self) -> bool {
        self.failing
    }
}
