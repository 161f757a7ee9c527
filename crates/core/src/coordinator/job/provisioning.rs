//! How long nodes have been missing, and which requests for machines are being carried out.

use crate::time::Time;
use std::collections::BTreeSet;
use std::time::Duration;

/// How long nodes must be missing before others are requested: most come back.
pub(crate) const MISSED: Duration = Duration::from_secs(15);

/// State of the requests about machines in this life of the coordinator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Provisioning {
    /// Since when nodes are missing.
    short_since: Option<Time>,
    /// Requests that are being carried out.
    in_progress: BTreeSet<u64>,
}

impl Provisioning {
    /// Records that no node is missing.
    pub(crate) fn none_missing(&mut self) {
        self.short_since = None;
    }

    /// Records that nodes are missing. Returns whether they have been missing long enough for
    /// others to be requested.
    pub(crate) fn some_missing(&mut self, now: Time) -> bool {
        let long = now >= self.short_since.get_or_insert(now).after(MISSED);
        if long {
            self.short_since = None;
        }
        long
    }

    /// Returns when other nodes must be requested, unless the missing ones come back.
    #[must_use]
    pub fn missing_until(&self) -> Option<Time> {
        self.short_since.map(|at| at.after(MISSED))
    }

    /// Records that a request is being carried out. Returns false if it was.
    pub(crate) fn start(&mut self, request: u64) -> bool {
        self.in_progress.insert(request)
    }

    /// Records that a request was answered.
    pub(crate) fn finish(&mut self, request: u64) {
        self.in_progress.remove(&request);
    }
}
