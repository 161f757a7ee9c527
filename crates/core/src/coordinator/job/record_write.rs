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
    /// Number of the write in flight, if any.
    in_flight: Option<PersistId>,
    /// Whether the record changed after that write left.
    dirty: bool,
    /// When to retry after a failure.
    retry: Option<Time>,
    /// The pause before the latest retry, to be doubled by the next one.
    pause: Option<Duration>,
    /// Since when every write has failed.
    failing_since: Option<Time>,
    /// Whether what depends on the write was sent without it, because it failed for too long.
    waived: bool,
    /// Whether orders wait for the write in flight; if it fails, they wait for the next one.
    announces: bool,
    /// Whether orders will wait for the next write.
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

    /// Returns whether the store has answered every write and none is to be repeated.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.in_flight.is_none() && self.retry.is_none()
    }

    /// Returns when a failed write is tried again.
    #[must_use]
    pub fn retry_at(&self) -> Option<Time> {
        self.retry
    }

    /// Records that the record has changed; `announce` means that orders depend on it.
    pub(crate) fn changed(&mut self, announce: bool) {
        self.dirty = true;
        self.announce_next |= announce;
    }

    /// Returns what an order that depends on the current record must wait for: `Some(None)` for
    /// nothing, `Some(Some(id))` for the write in flight, `None` if that write has not left yet.
    #[must_use]
    pub fn awaited_write(&self) -> Option<Option<PersistId>> {
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

    /// Records that a write leaves. Returns whether orders wait for it.
    pub(crate) fn start(&mut self, id: PersistId) -> bool {
        let announces = self.announce_next || self.announces;
        *self = RecordWrite {
            version: self.version,
            in_flight: Some(id),
            announces,
            pause: self.pause,
            failing_since: self.failing_since,
            waived: self.waived,
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
        self.failing_since = None;
        self.waived = false;
        self.announces = false;
    }

    /// Records that the write has failed: it is tried again after a pause, at first the shortest.
    pub(crate) fn failed(&mut self, now: Time, shortest: Duration) {
        let pause = self.pause.map_or(shortest, |p| (p * 2).min(PAUSE_MAX));
        self.pause = Some(pause);
        self.retry = Some(now.after(pause));
        self.failing_since.get_or_insert(now);
    }

    /// Returns whether every write has failed for at least this long.
    pub(crate) fn has_failed_for(&self, now: Time, duration: Duration) -> bool {
        self.failing_since.is_some_and(|since| now.since(since) >= duration)
    }

    /// Records that what depends on the write is sent without it. Returns false if it already was.
    pub(crate) fn waive(&mut self) -> bool {
        !std::mem::replace(&mut self.waived, true)
    }

    /// Records that a failed write is not tried again: the store keeps the record before it.
    pub(crate) fn abandon(&mut self) {
        *self = RecordWrite::of(self.version);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SHORTEST: Duration = Duration::from_millis(100);

    #[test]
    fn an_order_waits_for_the_write_that_it_depends_on() {
        let mut write = RecordWrite::of(Some(1));
        assert_eq!(write.awaited_write(), Some(None), "the store has everything");
        write.changed(true);
        assert_eq!(write.awaited_write(), None, "the write has not left yet");
        assert!(write.start(PersistId(1)));
        assert_eq!(write.awaited_write(), Some(Some(PersistId(1))));
        assert!(write.finish(PersistId(1)));
        write.failed(Time(0), SHORTEST);
        assert_eq!(write.awaited_write(), None, "it must be written again");
        assert!(write.start(PersistId(2)), "and the orders wait for it");
        assert!(!write.finish(PersistId(1)), "an answer to an earlier write is void");
        assert!(write.finish(PersistId(2)));
        write.succeeded(2);
        assert_eq!((write.awaited_write(), write.version()), (Some(None), Some(2)));
    }

    #[test]
    fn the_pauses_between_failures_grow_to_their_limit() {
        let mut write = RecordWrite::default();
        write.changed(false);
        let mut pauses = Vec::new();
        for n in 0..9 {
            write.start(PersistId(n));
            assert!(write.finish(PersistId(n)));
            write.failed(Time(0), SHORTEST);
            pauses.extend(write.retry_at().map(|at| at.since(Time(0))));
        }
        assert_eq!(pauses[..3], [SHORTEST, SHORTEST * 2, SHORTEST * 4]);
        assert_eq!(pauses.last(), Some(&PAUSE_MAX));
    }

    #[test]
    fn failures_last_from_the_first_to_the_next_success() {
        let mut write = RecordWrite::of(Some(1));
        write.changed(true);
        for second in 0..3 {
            write.start(PersistId(second));
            write.finish(PersistId(second));
            write.failed(Time(second * 1000), SHORTEST);
        }
        assert!(write.has_failed_for(Time(2000), Duration::from_secs(2)));
        assert!(!write.has_failed_for(Time(1999), Duration::from_secs(2)));
        write.abandon();
        assert!(!write.is_pending() && write.is_answered() && write.version() == Some(1));
        assert!(!write.has_failed_for(Time(9000), Duration::ZERO));
    }

    proptest! {
        #[test]
        fn a_change_is_written_sooner_or_later(changes in prop::collection::vec((any::<bool>(), any::<bool>(), any::<bool>()), 1..40)) {
            let mut write = RecordWrite::default();
            let (mut next, mut in_flight, mut unwritten, mut leaving) = (1, None, false, false);
            for (changed, announce, answered) in changes {
                if changed {
                    write.changed(announce);
                    unwritten = true;
                }
                if let Some(id) = in_flight.filter(|_| answered) {
                    prop_assert!(write.finish(id));
                    in_flight = None;
                    if announce {
                        write.succeeded(id.0);
                        leaving = false;
                    } else {
                        write.failed(Time(0), SHORTEST);
                        unwritten |= leaving;
                    }
                }
                if write.is_due(Time(u64::MAX)) {
                    prop_assert!(in_flight.is_none());
                    write.start(PersistId(next));
                    (in_flight, next, leaving, unwritten) = (Some(PersistId(next)), next + 1, true, false);
                }
                prop_assert_eq!(write.is_pending(), in_flight.is_some() || unwritten);
            }
        }
    }
}
