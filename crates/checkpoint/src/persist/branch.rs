//! The branch that training is in: which checkpoints it continues (see [`crate::lineage`]). Whoever
//! publishes reads it here; it is written when the first step of a branch is complete, so that a
//! restart goes on in it even before anything of it is durable.
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
/// Runs that a record names: copies of copies.
const INHERITED_MAX: usize = 64;

/// The running branch, as it is kept in the directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this file, and the sign that it is everstep's (see [`super::remember`]).
    everstep: u32,
    /// The directory's identity.
    pub run: RunId,
    /// The branch.
    pub lineage: Lineage,
    /// The step that the user went back to, from which this branch began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<u64>,
    /// Which ownership of the directory wrote this.
    pub epoch: u64,
    /// Generation that wrote this.
    pub generation: u64,
    /// What this generation continued from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    continued: Option<Continued>,
    /// Runs of the directories that this one was copied from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inherited: Vec<Inherited>,
}

/// Where a generation continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Continued {
    /// The step.
    step: u64,
    /// The ownership of the directory at that time. Where [`Record::epoch`] is 0, whoever wrote
    /// this did not know its own.
    owner: u64,
}

impl Record {
    /// The runs whose branches count together.
    fn runs(&self) -> Runs {
        let mut runs = Runs::only(Some(self.run));
        runs.0.extend(&self.inherited);
        runs
    }

    /// The step from which a later generation than that of `mark` continued, if that was before
    /// `step`: this branch does not contain the step that `mark` wrote.
    fn left_at(&self, step: u64, mark: &Mark) -> Option<u64> {
        let continued = self.continued.filter(|c| (c.owner, self.generation) > mark.turn() && c.step < step)?;
        Some(continued.step)
    }
}

/// What training goes on from.
#[derive(Clone, Copy, Debug)]
pub enum Origin<'a> {
    /// Nothing: step 0.
    Scratch,
    /// Memory, which holds what ran last.
    Memory {
        /// The step.
        step: u64,
    },
    /// A durable checkpoint.
    Durable(&'a Manifest),
}

/// The branches of a directory as its record shows them.
pub(super) struct Seen {
    record: Option<Record>,
    /// Whose branches they are.
    pub runs: Runs,
    /// They are those of the directory that this one was copied from.
    copied: bool,
    /// Checkpoints of several directories are here, and no record says which of them ran last.
    pub mixed: bool,
}

impl Seen {
    /// `all`: what is published there.
    ///
    /// # Errors
    /// As [`recorded`].
    pub fn of(storage: &dyn Storage, run: Option<RunId>, all: &[Found]) -> io::Result<Seen> {
        let record = read(storage)?;
        let own = |r: &Record| Some(r.run) == run;
        // Training that began here after the copy has a record of its own, unless somebody deleted
        // it, or replaced it by copying once more.
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
            // What was saved here without training is of no branch.
            runs.0.extend(Runs::only(Some(run)).0);
        }
        Ok(Seen { record, runs, copied, mixed })
    }

    /// The branch that ran last, by its record.
    pub fn lineage(&self) -> Option<&Lineage> {
        self.record.as_ref().map(|r| &r.lineage)
    }

    /// The runs that a branch of `run` which begins now inherits, and those of which single
    /// checkpoints were copied here before (`all`), which have no place in its branches.
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

/// Run and turn of each checkpoint that a training loop has published.
fn trained(all: &[Found]) -> impl Iterator<Item = (RunId, u64)> {
    let readable = all.iter().filter_map(|(_, _, manifest)| manifest.as_ref().ok());
    readable.filter_map(|m| Some((m.writer?.run, m.lineage.as_ref()?.turn)))
}

/// The branch that ran last, by its own record. One of another directory (a copy) says nothing
/// here.
///
/// # Errors
/// Those of the file system or store; `InvalidData` for something else of this name.
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

/// Published checkpoints, newest first; of several of one step, that of the branch that ran last
/// comes first.
pub(super) fn newest_first(storage: &dyn Storage) -> io::Result<Vec<Found>> {
    let mut found = storage.list()?;
    let order = |f: &Found| {
        let own = f.2.as_ref().ok().map(|m| (m.lineage.as_ref().map(|l| l.turn), m.purpose(), m.saved_at));
        (Reverse(f.0), Reverse(own), f.1.clone())
    };
    found.sort_by_cached_key(order);
    Ok(found)
}

/// Where the checkpoints stand, and the steps of those that cannot be read.
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

/// Training goes on from `from`: the branch that it is in, recorded for whoever publishes. `asked`:
/// the user named the step.
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
    // Whoever goes on in the branch goes on with what the user asked for.
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
    // On a full disk training goes on where the branch is recorded as it is.
    if !same {
        written?;
    }
    Ok(lineage)
}

/// The branch that a step is published in.
///
/// # Errors
/// As [`begin`]; and when a later generation has continued from an earlier step before this one was
/// published: it is of a past that training has left.
pub(super) fn running(storage: &dyn Storage, mark: &Mark, step: u64) -> io::Result<Lineage> {
    match recorded(storage, Some(mark.run))? {
        Some(record) => match record.left_at(step, mark) {
            None => Ok(record.lineage),
            Some(left) => {
                // A former owner hears of the new one rather than of its training.
                still_owned(storage, mark)?;
                Err(io::Error::other(format!("step {step} is obsolete: training has since continued from step {left}")))
            }
        },
        // Somebody has deleted the record. What it may have left behind stays.
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
        // The script goes back to step 10. What it wrote before is still on its way.
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
