//! Storage of durable checkpoints: the common interface of a directory and a prefix in an object
//! store. [`crate::persist`] decides once which of them it is; no other code depends on it.

use crate::direct_io::Throttle;
use crate::format::manifest::{Manifest, ManifestError};
use crate::format::mark::Mark;
use crate::lineage::{Lineage, OUTSIDE, Place};
use crate::retain::{Candidate, Policy};
use crate::sealed_shard::SealedShard;
use crate::shard_source::ShardSource;
use everstep_core::id::RunId;
use everstep_core::message::ShardFile;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// A published checkpoint: its step, its directory, its manifest or what is wrong with it.
pub type Found = (u64, PathBuf, Result<Manifest, Unreadable>);

/// Why the manifest of a checkpoint cannot be read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Unreadable {
    /// The file system or the store refuses the read.
    #[error("cannot read {at}: {source}")]
    Io {
        /// path or URL of the manifest
        at: String,
        /// error of the file system or store
        source: Arc<io::Error>,
    },
    /// The address cannot be that of checkpoints.
    #[error(transparent)]
    Address(Arc<io::Error>),
    /// The contents are not a manifest.
    #[error("{at}: {source}")]
    Invalid {
        /// path, or name of the object
        at: String,
        /// what is wrong with it
        source: ManifestError,
    },
    /// An object is longer than a manifest may be.
    #[error("{at} is {bytes} bytes long, over the limit")]
    TooLong {
        /// name of the object
        at: String,
        /// length in bytes
        bytes: u64,
    },
    /// The answer of a store is longer than a manifest may be.
    #[error(transparent)]
    Body(Arc<io::Error>),
    /// The step differs from that in its name.
    #[error("{at} holds step {step}")]
    OtherStep {
        /// path, or name of the object
        at: String,
        /// step in the manifest
        step: u64,
    },
    /// The directory also has checkpoints of other directories, copied into it: it is unknown which
    /// branch ran last, so no checkpoint can be chosen.
    #[error(
        "cannot choose {0}: checkpoints from several directories are mixed there, and it is not recorded which one \
        training continued from last; name a step (restore(step=…), --step)"
    )]
    Mixed(String),
    /// The manifest was deleted while it was read.
    #[error("deleted")]
    Deleted,
    /// There is no such checkpoint.
    #[error("there is no checkpoint {0}")]
    Missing(String),
}

impl Unreadable {
    pub(crate) fn io(at: impl fmt::Display, source: io::Error) -> Self {
        Unreadable::Io { at: at.to_string(), source: Arc::new(source) }
    }

    /// Returns whether there is no manifest, according to the file system.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Unreadable::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Identifies the place of a directory of checkpoints, so that a copy of it can be recognized.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// Path without links, or URL.
    pub path: String,
    /// Inode of the directory; `None` in a store.
    pub inode: Option<u64>,
    /// When it was created, in nanoseconds since 1970, if the file system reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<u64>,
    /// When the file was written here, in nanoseconds since 1970; 0 if unknown.
    #[serde(skip)]
    pub written: i128,
}

impl Home {
    /// Returns whether the directory here is a copy of the recorded one. Moving a directory changes
    /// its path only, and some network file systems give other inodes after each mount. A copy is
    /// created later, even one that takes the original's path, such as a restored backup.
    #[must_use]
    pub fn is_copy_of(&self, recorded: &Home) -> bool {
        let same_number = self.inode.is_some() && self.inode == recorded.inode;
        let created_later = self.created.zip(recorded.created).is_some_and(|(here, there)| here != there);
        created_later || (!self.is_at(recorded) && !same_number)
    }

    /// Returns whether this place is the recorded one, in all that identifies a copy.
    #[must_use]
    pub fn is_as_recorded(&self, recorded: &Home) -> bool {
        self.is_at(recorded) && (self.inode, self.created) == (recorded.inode, recorded.created)
    }

    /// Returns whether both have the same path or URL. Earlier builds recorded URLs as they were
    /// given.
    fn is_at(&self, recorded: &Home) -> bool {
        address(&self.path) == address(&recorded.path)
    }
}

/// Returns the scheme that stands for all those that mean the same kind of store.
pub(crate) fn scheme_of(alias: &str) -> Option<&'static str> {
    match alias {
        "s3" | "s3a" => Some("s3"),
        "gs" => Some("gs"),
        "az" | "azure" | "abfs" | "abfss" | "adl" => Some("az"),
        _ => None,
    }
}

/// Returns the same string for all URLs of a prefix in a store. Paths stay as they are.
pub(crate) fn address(of: &str) -> Cow<'_, str> {
    match of.split_once("://").and_then(|(alias, rest)| Some((scheme_of(alias)?, rest))) {
        Some((scheme, rest)) => {
            let parts: Vec<&str> = rest.split('/').filter(|part| !part.is_empty()).collect();
            format!("{scheme}://{}", parts.join("/")).into()
        }
        None => of.into(),
    }
}

/// Where a checkpoint is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// As the next one of the running branch. If the name is taken, beside the existing checkpoint.
    Branch,
    /// Under exactly this name, in no branch: saved through `torch.distributed.checkpoint`. Only a
    /// checkpoint that was saved in the same way is replaced.
    Exactly,
}

/// An entry that everstep leaves alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// Name in the directory.
    pub name: String,
    /// The step in its name, if there is one.
    pub step: Option<u64>,
    /// Why it is not everstep's, or is of unknown origin.
    pub why: String,
}

/// The entries that a clean-up has deleted, or would delete.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Deleted checkpoints: steps and names.
    pub gone: Vec<(u64, String)>,
    /// Names of incomplete checkpoints of writers that died.
    pub leftovers: Vec<String>,
    /// Entries that are never deleted, whatever the policy.
    pub foreign: Vec<Foreign>,
}

/// The runs whose branches are counted together in a directory: its own, and those of the
/// directories that it was copied from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Runs(pub Vec<Inherited>);

/// A run whose checkpoints a directory has as a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inherited {
    /// Id of the run.
    pub run: RunId,
    /// The turn in which the directory's own turns begin. Checkpoints of that run from later turns
    /// were copied afterwards, and have no place.
    pub until: u64,
}

impl Runs {
    /// Returns the set with this run alone.
    pub fn only(run: Option<RunId>) -> Self {
        Runs(run.into_iter().map(|run| Inherited { run, until: u64::MAX }).collect())
    }

    /// Returns the place of a checkpoint among the others of the directory. A checkpoint of any
    /// other run has no place in the branches, but they may have begun with it.
    pub fn place_of(&self, manifest: &Manifest) -> Place {
        let turn = manifest.lineage.as_ref().map_or(0, |l| l.turn);
        let counts = |w: Mark| self.0.iter().any(|r| r.run == w.run && turn < r.until);
        let lineage = match (manifest.writer.is_some_and(counts), &manifest.lineage) {
            (true, Some(lineage)) => lineage.clone(),
            (true, None) => Lineage { branch: OUTSIDE, ..Lineage::default() },
            (false, _) => Lineage::default(),
        };
        Place { step: manifest.step, lineage }
    }
}

/// Returns what the retention policy needs to know about a checkpoint of this run.
pub(crate) fn candidate(manifest: &Manifest, run: RunId) -> Candidate {
    Candidate {
        place: Runs::only(Some(run)).place_of(manifest),
        saved_at: manifest.saved_at,
        purpose: manifest.purpose(),
        objects: manifest.objects(),
    }
}

/// Describes what a clean-up deletes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CleanUp<'a> {
    /// Checkpoints to keep.
    pub policy: Policy,
    /// Only files of this run are deleted.
    pub run: RunId,
    /// Unpublished files of turns before this one are deleted.
    pub before: (u64, u64),
    /// The recorded branch that ran last.
    pub record: Option<&'a Lineage>,
    /// Report only, without deleting.
    pub dry_run: bool,
}

/// Returns whether the directory still has the owner and the branch with which a clean-up was
/// planned.
pub(crate) type Unchanged<'a> = &'a dyn Fn() -> io::Result<bool>;

/// Fails once another job owns the directory.
pub(crate) type StillOwned<'a> = &'a dyn Fn() -> io::Result<()>;

/// A directory of checkpoints. Errors are those of the file system or the store.
pub(crate) trait Storage: fmt::Debug + Send + Sync {
    /// Checks that the storage answers within seconds.
    fn reach(&self) -> io::Result<()>;

    /// Writes one rank's shard. `InvalidData` when its slot does not contain the step any more.
    fn write_shard(&self, of: &SealedShard, mark: &Mark, throttle: &Throttle) -> io::Result<ShardFile>;

    /// Makes a checkpoint visible if its writer still owns the directory, and returns its path. A
    /// second call changes nothing. `AlreadyExists` when `target` names something that may not be
    /// replaced.
    fn publish(&self, mark: &Mark, manifest: &Manifest, target: Target, owned: StillOwned<'_>) -> io::Result<PathBuf>;

    /// Reads the manifest of this checkpoint. Errors are a sentence with the path.
    fn manifest(&self) -> Result<Manifest, Unreadable>;

    /// Returns whether a manifest may give a shard of this checkpoint such a name: it stays below
    /// the checkpoint.
    fn may_hold(&self, file: &str) -> bool;

    /// Opens a shard of this checkpoint.
    fn shard(&self, file: &str) -> io::Result<ShardSource>;

    /// Returns the published checkpoints in no particular order, damaged ones with the reason. A
    /// missing directory has none.
    fn list(&self) -> io::Result<Vec<Found>>;

    /// Returns the entries with names of checkpoints that everstep did not write, or of unknown
    /// origin.
    fn foreign(&self, run: Option<RunId>) -> io::Result<Vec<Foreign>>;

    /// Deletes checkpoints and leftovers as `what` describes, while the directory is `unchanged`.
    fn prune(&self, what: &CleanUp<'_>, unchanged: Unchanged<'_>) -> io::Result<Pruned>;

    /// Writes a note of a shard, for the process that publishes.
    fn note(&self, mark: &Mark, step: u64, shard: &ShardFile) -> io::Result<()>;

    /// Returns the shard that [`Storage::note`] has written for a rank.
    fn noted(&self, mark: &Mark, step: u64, rank: u32) -> Option<ShardFile>;

    /// Removes such a note, if publishing does not remove it.
    fn forget(&self, mark: &Mark, step: u64, rank: u32) -> io::Result<()>;

    /// Returns the place of the directory. `file` is a file that is written when it is first used.
    fn home(&self, file: &str) -> io::Result<Home>;

    /// Reads a small file beside the checkpoints; `None` when there is none.
    fn recall(&self, name: &str) -> io::Result<Option<Vec<u8>>>;

    /// Writes a small file durably. `AlreadyExists` for an existing one that [`is_ours`] does not
    /// accept.
    fn remember(&self, name: &str, bytes: Vec<u8>) -> io::Result<()>;

    /// Writes a small file unless it exists. Returns false when it exists, whichever process wrote
    /// it.
    fn create_new(&self, name: &str, bytes: Vec<u8>) -> io::Result<bool>;

    /// Replaces a small file atomically. It need not survive a loss of power.
    fn replace(&self, name: &str, bytes: Vec<u8>) -> io::Result<()>;

    /// Replaces a small file atomically and durably: after a loss of power, it is the earlier or
    /// the new one.
    fn replace_durably(&self, name: &str, bytes: Vec<u8>) -> io::Result<()>;

    /// Removes a small file.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Returns the name of the record of an epoch's owner.
    fn owner_name(&self, epoch: u64) -> String;

    /// Returns the epochs that have such a record.
    fn owners(&self) -> io::Result<Vec<u64>>;
}

/// Returns whether a small file is everstep's: a JSON object with the key `everstep`.
pub(crate) fn is_ours(bytes: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Value>(bytes).is_ok_and(|v| v.get("everstep").is_some())
}

/// Returns the error for a file that is not everstep's.
pub(crate) fn not_ours(name: &str) -> io::Error {
    let what = format!("{name} exists, but everstep did not write it; move it away");
    io::Error::new(io::ErrorKind::AlreadyExists, what)
}

/// Accepts a deletion of something that does not exist any more: another process (the next step's
/// publication, another agent) may have deleted it first.
pub(crate) fn gone(done: io::Result<()>) -> io::Result<()> {
    absent(done).map(drop)
}

/// Returns `None` for something that does not exist.
pub(crate) fn absent<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    found.map(Some).or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(None) } else { Err(e) })
}
