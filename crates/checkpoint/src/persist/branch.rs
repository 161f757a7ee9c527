//! The branch that training is in: which checkpoints it continues (see [`crate::lineage`]). The
//! process that publishes reads it here; it is written when the first step of a branch is complete,
//! so that a restart continues in it even before anything of it is durable.
//!
//! A copy of a directory (moved to another file system, or restored from a backup) is of another
//! run, and has the branches of the original until it begins one of its own. From then on its
//! record names the runs that it has inherited branches from.

use super::ownership::{newest_epoch, still_owned};
use crate::format::manifest::Manifest;
use crate::format::mark::Mark;
use crate::lineage::{self, Departure, From, Lineage, Place};
use crate::storage::{Found, Inherited, Runs, Storage};
use everstep_core::id::RunId;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::io;

/// The file with the running branch.
pub const BRANCH_FILE: &str = "everstep-branch.json";
const VERSION: u32 = 1;
/// Maximum number of runs that a record names: copies of copies.
const INHERITED_MAX: usize = 64;

/// The running branch, as it is recorded in the directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this file, which also marks it as everstep's (see [`super::remember`]).
    everstep: u32,
    /// The directory's identity.
    pub run: RunId,
    /// The branch, and its ancestors.
    pub lineage: Lineage,
    /// The step that the user went back to, from which this branch began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<u64>,
    /// Epoch of the directory's owner that wrote this record.
    pub epoch: u64,
    /// Generation of the job that wrote this record.
    pub generation: u64,
    /// The point from which this generation continued.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    continued: Option<Continued>,
    /// Runs of the directories that this one was copied from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inherited: Vec<Inherited>,
}

/// The point from which a generation continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Continued {
    /// Step of the restored state.
    step: u64,
    /// The ownership of the directory at that time. If [`Record::epoch`] is 0, the writer of the
    /// record did not know its own.
    owner: u64,
}

impl Record {
    /// Returns the runs whose branches count together.
    fn runs(&self) -> Runs {
        let mut runs = Runs::only(Some(self.run));
        runs.0.extend(&self.inherited);
        runs
    }

    /// Returns the step from which a later generation than that of `mark` continued, if that was
    /// before `step`: this branch does not contain the step that `mark` wrote.
    fn left_at(&self, step: u64, mark: &Mark) -> Option<u64> {
        let continued = self.continued.filter(|c| (c.owner, self.generation) > mark.turn() && c.step < step)?;
        Some(continued.step)
    }
}

/// The state that training continues from.
#[derive(Clone, Copy, Debug)]
pub enum Origin<'a> {
    /// No state: training begins at step 0.
    Scratch,
    /// State in memory, which is that of the branch that ran last.
    Memory {
        /// The step in memory.
        step: u64,
    },
    /// A durable checkpoint.
    Durable(&'a Manifest),
}

/// The branches of a directory as its record shows them.
pub(super) struct Seen {
    record: Option<Record>,
    /// Runs that the branches belong to.
    pub runs: Runs,
    /// Whether the branches are those of the directory that this one was copied from.
    copied: bool,
    /// Whether checkpoints of several directories are here, and no record tells which of them ran
    /// last.
    pub mixed: bool,
}

impl Seen {
    /// Reads the record of the directory. `all` are the checkpoints that are published there.
    ///
    /// # Errors
    /// The same as for [`recorded`].
    pub fn of(storage: &dyn Storage, run: Option<RunId>, all: &[Found]) -> io::Result<Seen> {
        let record = read(storage)?;
        let own = |r: &Record| Some(r.run) == run;
        // Training that began here after the copy has a record of its own, unless the record was
        // deleted, or replaced by another copy.
        let begun = || trained(all).any(|(by, _)| Some(by) == run);
        let replaced = |r: &Record| {
            let runs = r.runs();
            trained(all).any(|(by, turn)| !runs.0.iter().any(|i| i.run == by) && turn > r.lineage.turn)
        };
        let mixed = record.as_ref().is_some_and(|r| !own(r) && !begun() && replaced(r));
        let record = record.filter(|r| own(r) || !mixed && !begun());
        let copied = record.as_ref().is_some_and(|r| !own(r));
        let mut runs = record.as_ref().map_or_else(|| Runs::only(run), Record::runs);
        if let Some(run) = run.filter(|_| copied) {
            // Checkpoints that were saved here without a training loop belong to no branch.
            runs.0.extend(Runs::only(Some(run)).0);
        }
        Ok(Seen { record, runs, copied, mixed })
    }

    /// Returns the branch that ran last, according to its record.
    pub fn lineage(&self) -> Option<&Lineage> {
        self.record.as_ref().map(|r| &r.lineage)
    }

    /// Returns the runs that a branch of `run` which begins now inherits, and the runs of single
    /// checkpoints that were copied here before (`all`), which have no place in its branches.
    fn inherited(&self, run: RunId, turn: u64, all: &[Found]) -> Vec<Inherited> {
        let latest = self.record.as_ref().filter(|_| self.copied).map(|r| Inherited { run: r.run, until: turn });
        let earlier = self.record.iter().flat_map(|r| r.inherited.iter().copied());
        let mut inherited: Vec<Inherited> = latest.into_iter().chain(earlier).collect();
        for (by, _) in trained(all) {
            if by != run && !inherited.iter().any(|i| i.run == by) {
                inherited.push(Inherited { run: by, until: 0 });
            }
        }
        inherited.truncate(INHERITED_MAX);
        inherited
    }
}

/// Returns the run and the turn of each checkpoint that a training loop has published.
fn trained(all: &[Found]) -> impl Iterator<Item = (RunId, u64)> {
    let readable = all.iter().filter_map(|(_, _, manifest)| manifest.as_ref().ok());
    readable.filter_map(|m| Some((m.writer?.run, m.lineage.as_ref()?.turn)))
}

/// Returns the record of the branch that ran last. The record of another directory (a copy) is
/// ignored.
///
/// # Errors
/// Those of the file system or store; `InvalidData` when the file of this name is not a record.
pub(super) fn recorded(storage: &dyn Storage, run: Option<RunId>) -> io::Result<Option<Record>> {
    Ok(read(storage)?.filter(|r| Some(r.run) == run))
}

fn read(storage: &dyn Storage) -> io::Result<Option<Record>> {
    let Some(bytes) = storage.recall(BRANCH_FILE)? else { return Ok(None) };
    match serde_json::from_slice::<Record>(&bytes) {
        Ok(found) if found.everstep == VERSION && found.lineage.is_possible() => Ok(Some(found)),
        _ => {
            let what = format!("{BRANCH_FILE} is damaged, or not everstep's; restore it or move it away");
            Err(io::Error::new(io::ErrorKind::InvalidData, what))
        }
    }
}

/// Returns the published checkpoints, newest first. Of several of one step, the one of the branch
/// that ran last comes first.
pub(super) fn newest_first(storage: &dyn Storage) -> io::Result<Vec<Found>> {
    let mut found = storage.list()?;
    let order = |f: &Found| {
        let own = f.2.as_ref().ok().map(|m| (m.lineage.as_ref().map(|l| l.turn), m.purpose(), m.saved_at));
        (Reverse(f.0), Reverse(own), f.1.clone())
    };
    found.sort_by_cached_key(order);
    Ok(found)
}

/// Returns the places of the checkpoints, and the steps of those that cannot be read.
fn known(all: &[Found], runs: &Runs) -> (Vec<Place>, Vec<u64>) {
    let (mut known, mut unread) = (Vec::new(), Vec::new());
    for (step, _, manifest) in all {
        match manifest {
            Ok(m) => known.push(runs.place_of(m)),
            Err(_) => unread.push(*step),
        }
    }
    (known, unread)
}

/// Determines the branch in which training continues from `from`, records it for the process that
/// publishes, and returns it. With `asked`, the user named the step.
///
/// # Errors
/// Those of the file system or store; `PermissionDenied` when another job has taken the directory
/// over.
pub(super) fn begin(storage: &dyn Storage, from: Origin<'_>, asked: bool, mark: &Mark) -> io::Result<Lineage> {
    still_owned(storage, mark)?;
    let run = mark.run;
    let all = newest_first(storage)?;
    let seen = Seen::of(storage, Some(run), &all)?;
    let inherited = matches!(from, Origin::Durable(m) if m.writer.is_none_or(|w| w.run != run));
    let (step, from) = match from {
        Origin::Scratch => (0, From::Scratch),
        Origin::Memory { step } => (step, From::Memory { step }),
        Origin::Durable(manifest) => (manifest.step, From::Durable(seen.runs.place_of(manifest))),
    };
    let (known, unread) = known(&all, &seen.runs);
    let departure = Departure { from, asked, copied: seen.copied, inherited };
    let lineage = lineage::begin(seen.lineage(), &known, &unread, departure);
    let record = &seen.record;
    // Training that continues in the branch keeps the step that the user asked for.
    let earlier = record.as_ref().filter(|r| r.lineage == lineage).and_then(|r| r.asked);
    let asked = asked.then_some(step).or(earlier);
    let owner = match mark.epoch {
        0 => newest_epoch(storage)?.unwrap_or_default(),
        own => own,
    };
    let now = Record {
        everstep: VERSION,
        run,
        lineage: lineage.clone(),
        asked,
        epoch: mark.epoch,
        generation: mark.generation,
        continued: Some(Continued { step, owner }),
        inherited: seen.inherited(run, lineage.turn, &all),
    };
    let same = record.as_ref().is_some_and(|r| r.lineage == now.lineage);
    let written = match record {
        Some(there) if *there == now => Ok(()),
        _ => {
            // Another job may have taken the directory over during these reads.
            still_owned(storage, mark)?;
            storage.remember(BRANCH_FILE, serde_json::to_vec(&now)?)
        }
    };
    // On a full disk, training continues if the branch is recorded already.
    if !same {
        written?;
    }
    Ok(lineage)
}

/// Returns the branch that a step is published in.
///
/// # Errors
/// The same as for [`begin`]; also fails when a later generation has continued from an earlier step
/// before this one was published: the step belongs to a past that training has left.
pub(super) fn running(storage: &dyn Storage, mark: &Mark, step: u64) -> io::Result<Lineage> {
    match recorded(storage, Some(mark.run))? {
        Some(record) => match record.left_at(step, mark) {
            None => Ok(record.lineage),
            Some(left) => {
                // A former owner gets the error about the new owner rather than about its training.
                still_owned(storage, mark)?;
                Err(io::Error::other(format!("step {step} is obsolete: training has since continued from step {left}")))
            }
        },
        // The record was deleted. Checkpoints that it may have left behind stay.
        None => begin(storage, Origin::Memory { step: step.saturating_sub(1) }, true, mark),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::persist::{Claimant, at, claim};
    use std::time::Duration;

    #[test]
    fn a_step_that_training_has_left_is_not_published_in_the_branch_after_it() {
        let out = tempfile::tempdir().unwrap();
        let name = || "job".to_owned();
        let who = Claimant { life: name(), job: name(), nodes: 1, leads: true, silence: Duration::from_mins(1) };
        let claim = claim(out.path(), &who, |_| ()).unwrap();
        let mark = |generation| Mark { run: claim.run(), epoch: claim.epoch(), generation, attempt: 0 };
        let storage = at(out.path()).unwrap();
        let in_branch = |generation, step| running(&*storage, &mark(generation), step).map(|l| l.branch);

        let left = begin(&*storage, Origin::Scratch, false, &mark(1)).unwrap();
        assert_eq!(in_branch(1, 20).unwrap(), left.branch);
        // The script goes back to step 10. The step that it captured before is still being written.
        let now = begin(&*storage, Origin::Memory { step: 10 }, true, &mark(2)).unwrap();
        assert_eq!(in_branch(2, 20).unwrap(), now.branch);
        assert_eq!(in_branch(1, 10).unwrap(), now.branch, "both have this step in common");
        let refused = in_branch(1, 20).unwrap_err().to_string();
        assert!(refused.contains("continued from step 10"), "{refused}");
    }

    #[test]
    fn a_former_owner_does_not_record_its_branch() {
        let out = tempfile::tempdir().unwrap();
        let who = |name: &str| Claimant {
            life: name.into(),
            job: name.into(),
            nodes: 1,
            leads: true,
            silence: Duration::from_mins(1),
        };
        let first = claim(out.path(), &who("first"), |_| ()).unwrap();
        let former = Mark { run: first.run(), epoch: first.epoch(), generation: 1, attempt: 0 };
        first.release();
        let second = claim(out.path(), &who("second"), |_| ()).unwrap();
        let mark = Mark { epoch: second.epoch(), ..former };
        let storage = at(out.path()).unwrap();
        let now = begin(&*storage, Origin::Memory { step: 10 }, true, &mark).unwrap();
        let refused = begin(&*storage, Origin::Scratch, false, &former).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "{refused}");
        assert_eq!(running(&*storage, &mark, 11).unwrap().branch, now.branch);
    }
}
