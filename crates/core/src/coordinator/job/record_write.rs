//! The writes of a job's record: what is on its way to the store, and what is still to be written.

use super::super::event::Version;
use crate::id::PersistId;
use crate::time::Time;
use std::time::Duration;

/// Longest pause between two attempts to write to the store.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// State of the writes to a job's key. There is at most one at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordWrite {
    /// Version of the key; `None` while it does not exist.
    version: Option<Version>,
    /// The write in flight.
    in_flight: Option<PersistId>,
    /// Whether the record changed after that write left.
    dirty: bool,
    /// When to retry after a failure.
    retry: Option<Time>,
    /// The pause before the latest retry, to be doubled by the next one.
    pause: Option<Duration>,
    /// Whether the write in flight carries a promise that must be made again if it fails.
    announces: bool,
    /// Whether the next write carries a promise.
    announce_next: bool,
}

impl RecordWrite {
    /// Returns the state with nothing to write to a key that has this version.
    #[must_use]
    pub fn of(version: Option<Version>) -> Self {
        RecordWrite { version, ..RecordWrite::default() }
    }

    /// Returns the version of the key; `None` while it does not exist.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        self.version
    }

    /// Returns whether the store lacks something of the record, as far as is known.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.dirty || self.retry.is_some() || self.in_flight.is_some()
    }

    /// Returns whether the store owes no answer and no write is to be tried again.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.in_flight.is_none() && self.retry.is_none()
    }

    /// Returns when a failed write is tried again.
    #[must_use]
    pub fn retry_at(&self) -> Option<Time> {
        self.retry
    }

    /// Records that the record has changed; `announce` means that a promise depends on it.
    pub(crate) fn changed(&mut self, announce: bool) {
        self.dirty = true;
        self.announce_next |= announce;
    }

    /// Returns what a promise that depends on the current record must wait for: `Some(None)` for
    /// nothing, `Some(Some(id))` for the write in flight, `None` if that write has not left yet.
    #[must_use]
    pub fn promise(&self) -> Option<Option<PersistId>> {
        match self.in_flight {
            _ if self.announce_next => None,
            Some(id) if self.announces => Some(Some(id)),
            None if self.announces => None,
            _ => Some(None),
        }
    }

    /// Returns whether a write must leave now.
    pub(crate) fn is_due(&self, now: Time) -> bool {
        self.is_pending() && self.in_flight.is_none() && self.retry.is_none_or(|at| now >= at)
    }

    /// Records that a write leaves. Returns whether it carries a promise.
    pub(crate) fn start(&mut self, id: PersistId) -> bool {
        let announces = self.announce_next || self.announces;
        *self = RecordWrite {
            version: self.version,
            in_flight: Some(id),
            announces,
            pause: self.pause,
            ..RecordWrite::default()
        };
        announces
    }

    /// Records that the store has answered this write. Returns false if it is not the one in
    /// flight.
    pub(crate) fn finish(&mut self, id: PersistId) -> bool {
        self.in_flight.take_if(|known| *known == id).is_some()
    }

    /// Records that the write has succeeded.
    pub(crate) fn succeeded(&mut self, version: Version) {
        self.version = Some(version);
        self.retry = None;
        self.pause = None;
        self.announces = false;
    }

    /// Records that the write has failed: it is tried again after a pause, at first the shortest.
    pub(crate) fn failed(&mut self, now: Time, shortest: Duration) {
        let pause = self.pause.map_or(shortest, |p| (p * 2).min(PAUSE_MAX));
        self.pause = Some(pause);
        self.retry = Some(now.after(pause));
    }
}
