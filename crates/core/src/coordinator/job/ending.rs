//! The ranks of one generation whose scripts are over, and crashes that may have come after that.

use crate::id::{NodeId, Rank, Step};
use crate::message::{Extent, Failure, Slot};
use crate::time::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a crash that may have come after the last step waits for other ranks to end.
const LAST_STEP: Duration = Duration::from_secs(1);
/// The same wait while another rank's interpreter is shutting down, which shows that the end is
/// near.
const SHUT_DOWN: Duration = Duration::from_secs(10);
/// Maximum number of notes on the end that are kept.
const TOLD: usize = 4;

/// A rank whose script is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Over {
    /// How far its training had come.
    extent: Extent,
    /// Whether its process is over, too.
    process: bool,
    /// The process that trained in place of the launched one and had vanished: nothing confirms
    /// that the script had come to its end.
    vanished: Option<u32>,
}

/// The ranks of one generation that have ended, or may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    over: BTreeMap<Rank, Over>,
    /// Crashes that may have come after the last step.
    held: Vec<(NodeId, Failure)>,
    /// When the crashes are released; `None`: none is held.
    until: Option<Time>,
    /// What people should know about the end: crashes after it, ends that nothing confirms.
    notes: Vec<String>,
}

/// A rank whose end nothing confirms: the process that trained in place of the launched one had
/// vanished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vanished {
    /// Global rank of the worker.
    pub rank: Rank,
    /// The process that had vanished.
    pub pid: u32,
    /// How far its training had come.
    pub extent: Extent,
}

impl Ending {
    /// Returns another rank whose process ended when it had done what the crashed worker had.
    #[must_use]
    pub fn with(&self, failure: &Failure) -> Option<Rank> {
        self.where_it_crashed(failure).find(|(_, over)| over.process).map(|(rank, _)| rank)
    }

    /// Returns another rank whose script was over when it had done what the crashed worker had, but
    /// whose process may still end with an exit code that contradicts this.
    #[must_use]
    pub fn perhaps_with(&self, failure: &Failure) -> Option<Rank> {
        self.where_it_crashed(failure).next().map(|(rank, _)| rank)
    }

    /// Returns the other ranks that are at their end and had done what the crashed worker had.
    fn where_it_crashed(&self, failure: &Failure) -> impl Iterator<Item = (Rank, Over)> {
        let crashed = failure.extent();
        self.confirmed(Some(failure.rank)).filter(move |(_, over)| crashed.is_the_end(over.extent))
    }

    /// Returns a rank other than `of` whose script is over, and how far its training had come.
    #[must_use]
    pub fn any_beside(&self, of: Option<Rank>) -> Option<(Rank, Extent)> {
        self.confirmed(of).next().map(|(rank, over)| (rank, over.extent))
    }

    /// Returns the ranks other than `of` that are known to have come to the end of their scripts.
    fn confirmed(&self, of: Option<Rank>) -> impl Iterator<Item = (Rank, Over)> {
        let others = self.over.iter().filter(move |(rank, over)| Some(**rank) != of && over.vanished.is_none());
        others.map(|(rank, over)| (*rank, *over))
    }

    /// Returns a rank whose end nothing confirms.
    #[must_use]
    pub fn vanished(&self) -> Option<Vanished> {
        self.over
            .iter()
            .find_map(|(rank, over)| Some(Vanished { rank: *rank, pid: over.vanished?, extent: over.extent }))
    }

    /// Returns the number of ranks whose scripts are over, or may be.
    #[must_use]
    pub fn known(&self) -> usize {
        self.over.len() + self.held.len()
    }

    /// Returns whether a crash after `step` may belong to those that are held.
    #[must_use]
    pub fn is_together(&self, step: Option<Step>) -> bool {
        self.held.first().is_none_or(|(_, f)| f.step == step)
    }

    /// Returns whether this rank's script is over.
    #[must_use]
    pub fn has(&self, rank: Rank) -> bool {
        self.over.contains_key(&rank)
    }

    /// Returns whether this rank's process was not known to be over.
    #[must_use]
    pub fn is_news(&self, rank: Rank) -> bool {
        self.over.get(&rank).is_none_or(|over| !over.process)
    }

    /// Returns when holding crashes ends.
    #[must_use]
    pub fn until(&self) -> Option<Time> {
        self.until
    }

    /// Holds a crash that may have come after the last step.
    pub(crate) fn hold(&mut self, now: Time, node: &NodeId, failure: &Failure) {
        let near = self.any_beside(Some(failure.rank)).is_some();
        self.until.get_or_insert(now.after(if near { SHUT_DOWN } else { LAST_STEP }));
        self.held.push((node.clone(), failure.clone()));
    }

    /// Records that a rank's script is over; `process`: its process is, too.
    pub(crate) fn add_over(&mut self, rank: Rank, extent: Extent, process: bool) {
        let over = self.over.entry(rank).or_insert(Over { extent, process, vanished: None });
        let extent = if extent.step < over.extent.step { over.extent } else { extent };
        *over = Over { extent, process: over.process || process, ..*over };
    }

    /// Records that nothing confirms the end of a rank, because process `pid` had vanished.
    pub(crate) fn add_vanished(&mut self, rank: Rank, pid: u32) {
        if let Some(over) = self.over.get_mut(&rank) {
            over.vanished = Some(pid);
        }
    }

    /// Forgets that a rank's script was over: its process ended with an exit code that shows a
    /// failure of the script. Returns whether it was known to be over.
    pub(crate) fn withdraw(&mut self, rank: Rank) -> bool {
        let shutting_down = self.over.get(&rank).is_some_and(|over| !over.process);
        shutting_down && self.over.remove(&rank).is_some()
    }

    /// Waits longer for held crashes, because a rank has ended.
    pub(crate) fn wait_longer(&mut self, now: Time, process: bool) {
        if let Some(until) = &mut self.until {
            *until = (*until).max(now.after(if process { LAST_STEP } else { SHUT_DOWN }));
        }
    }

    /// Records that a rank crashed when its script was over. Returns false if its process was known
    /// to be over.
    pub(crate) fn add_crashed(&mut self, rank: Rank, extent: Extent) -> bool {
        !self.over.insert(rank, Over { extent, process: true, vanished: None }).is_some_and(|over| over.process)
    }

    /// Adds a note on the end.
    pub(crate) fn add_note(&mut self, what: String) {
        if self.notes.len() < TOLD {
            self.notes.push(what);
        }
    }

    /// Takes a held crash out that turns out to have come after the last step, with a rank that has
    /// ended at the same step. Once the wait is over, one whose interpreter is still shutting down
    /// counts.
    pub(crate) fn take_settled(&mut self, now: Time) -> Option<(NodeId, Failure, Rank)> {
        let waited = self.until.is_some_and(|until| now >= until);
        let with = |f: &Failure| if waited { self.perhaps_with(f) } else { self.with(f) };
        let (at, with) = self.held.iter().enumerate().find_map(|(at, (_, f))| Some((at, with(f)?)))?;
        let (node, failure) = self.held.remove(at);
        if self.held.is_empty() {
            self.until = None;
        }
        Some((node, failure, with))
    }

    /// Takes all held crashes out.
    pub(crate) fn release(&mut self) -> Vec<(NodeId, Failure)> {
        self.until = None;
        std::mem::take(&mut self.held)
    }

    /// Returns whether the processes of all of a node's ranks are over.
    #[must_use]
    pub fn is_over(&self, slot: &Slot) -> bool {
        slot.ranks().all(|rank| self.over.get(&Rank(rank)).is_some_and(|over| over.process))
    }

    /// Returns how far the training of each of a node's ranks had come, if the scripts of all are
    /// known to be over and none to have left steps undone.
    #[must_use]
    pub fn all_ended(&self, slot: &Slot) -> Option<Vec<(Rank, Extent)>> {
        let whole = |over: &&Over| over.vanished.is_none() && over.extent.missing(None).is_none();
        let ended = |rank| self.over.get(&rank).filter(whole);
        slot.ranks().map(Rank).map(|rank| Some((rank, ended(rank)?.extent))).collect()
    }

    /// Returns how far the training of each of a node's ranks had come that has ended with its
    /// process.
    pub(crate) fn ended_on(&self, slot: &Slot) -> Vec<(Rank, Extent)> {
        let ended = |rank| self.over.get(&rank).filter(|over| over.process && over.vanished.is_none());
        slot.ranks().map(Rank).filter_map(|rank| Some((rank, ended(rank)?.extent))).collect()
    }

    /// Returns the notes on the end, as the rest of a sentence.
    #[must_use]
    pub fn notes(&self) -> String {
        self.notes.iter().map(|what| format!("; {what}")).collect()
    }
}
