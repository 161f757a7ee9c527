//! The branch that training is in: which checkpoints it continues (see [`crate::lineage`]). Whoever publishes reads it here; it is written
//! when the first step of a branch is complete, so that a restart goes on in it even before anything of it is durable.

use super::ownership::still_owned;
use crate::format::mark::Mark;
use crate::lineage::{self, From, Lineage, Place};
use crate::storage::{Found, Storage, place_of};
use everstep_core::id::RunId;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::io;

/// The file with the running branch.
pub const BRANCH_FILE: &str = "everstep-branch.json";
const VERSION: u32 = 1;

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
}

/// The branch that ran last, by its own record. One of another directory (a copy) says nothing here.
///
/// # Errors
/// Those of the file system or store; `InvalidData` for something else of this name.
pub(super) fn recorded(storage: &dyn Storage, run: Option<RunId>) -> io::Result<Option<Record>> {
    let Some(bytes) = storage.recall(BRANCH_FILE)? else { return Ok(None) };
    match serde_json::from_slice::<Record>(&bytes) {
        Ok(found) if found.everstep == VERSION && found.lineage.is_possible() => {
            Ok(Some(found).filter(|r| Some(r.run) == run))
        }
        _ => {
            let what = format!("{BRANCH_FILE} is damaged, or not everstep's; restore it or move it away");
            Err(io::Error::new(io::ErrorKind::InvalidData, what))
        }
    }
}

/// Published checkpoints, newest first; of several of one step, that of the branch that ran last comes first.
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
fn known(storage: &dyn Storage, run: Option<RunId>) -> io::Result<(Vec<Place>, Vec<u64>)> {
    let (mut known, mut unread) = (Vec::new(), Vec::new());
    for (step, _, manifest) in newest_first(storage)? {
        match manifest {
            Ok(m) => known.push(place_of(&m, run)),
            Err(_) => unread.push(step),
        }
    }
    Ok((known, unread))
}

/// Training goes on from `from`: the branch that it is in, recorded for whoever publishes. `asked`: the user named the step.
///
/// # Errors
/// Those of the file system or store; `PermissionDenied` when another job has taken the directory over.
pub(super) fn begin(storage: &dyn Storage, from: From, asked: bool, mark: &Mark) -> io::Result<Lineage> {
    still_owned(storage, mark)?;
    let run = mark.run;
    let record = recorded(storage, Some(run))?;
    let before = record.as_ref().map(|r| &r.lineage);
    let step = match &from {
        From::Scratch => 0,
        From::Memory { step } => *step,
        From::Durable(place) => place.step,
    };
    let (known, unread) = known(storage, Some(run))?;
    let lineage = lineage::begin(before, &known, &unread, from, asked);
    // Whoever goes on in the branch goes on with what the user asked for.
    let earlier = record.as_ref().filter(|r| r.lineage == lineage).and_then(|r| r.asked);
    let asked = asked.then_some(step).or(earlier);
    let now = Record {
        everstep: VERSION,
        run,
        lineage: lineage.clone(),
        asked,
        epoch: mark.epoch,
        generation: mark.generation,
    };
    let same = record.as_ref().is_some_and(|r| r.lineage == now.lineage);
    let written = match &record {
        Some(there) if *there == now => Ok(()),
        _ => storage.remember(BRANCH_FILE, serde_json::to_vec(&now)?),
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
/// As [`begin`].
pub(super) fn running(storage: &dyn Storage, mark: &Mark, step: u64) -> io::Result<Lineage> {
    match recorded(storage, Some(mark.run))? {
        Some(record) => Ok(record.lineage),
        // Somebody has deleted the record. What it may have left behind stays.
        None => begin(storage, From::Memory { step: step.saturating_sub(1) }, true, mark),
    }
}
