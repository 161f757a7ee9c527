//! Where durable checkpoints are kept: what a directory and a prefix in an object store have in
//! common. Which of them it is, is decided once, by [`crate::persist`]; nobody else asks.

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
    /// The file system or the store refuses.
    #[error("cannot read {at}: {source}")]
    Io {
        /// Its path or URL.
        at: String,
        /// The refusal.
        source: Arc<io::Error>,
    },
    /// Nothing can be kept at such an address.
    #[error(transparent)]
    Address(Arc<io::Error>),
    /// What is there is no manifest.
    #[error("{at}: {source}")]
    Invalid {
        /// Its path or the name of its object.
        at: String,
        /// What is wrong with it.
        source: ManifestError,
    },
    /// An object is longer than a manifest may be.
    #[error("{at} is {bytes} bytes long, over the limit")]
    TooLong {
        /// The name of the object.
        at: String,
        /// Its length.
        bytes: u64,
    },
    /// What a store sends is longer than a manifest may be.
    #[error(transparent)]
    Body(Arc<io::Error>),
    /// It is another step's than its name says.
    #[error("{at} holds step {step}")]
    OtherStep {
        /// Its path or the name of its object.
        at: String,
        /// The step that it holds.
        step: u64,
    },
    /// The directory also has checkpoints of other directories, copied into it: the branch that ran
    /// last is not known, so nothing can be chosen.
    #[error(
        "cannot choose {0}: checkpoints from several directories are mixed there, and it is not recorded which one \
        training continued from last; name a step (restore(step=…), --step)"
    )]
    Mixed(String),
    /// It was deleted while it was looked at.
    #[error("deleted")]
    Deleted,
    /// There is none.
    #[error("there is no checkpoint {0}")]
    Missing(String),
}

impl Unreadable {
    pub(crate) fn io(at: impl fmt::Display, source: io::Error) -> Self {
        Unreadable::Io { at: at.to_string(), source: Arc::new(source) }
    }

    /// Whether there is no manifest, as far as a file system says.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Unreadable::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Where a directory of checkpoints is, so that a copy of it can be told from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// Its path without links, or its URL.
    pub path: String,
    /// The number that its file system gives to it; a store gives none.
    pub inode: Option<u64>,
    /// When it was created, in nanoseconds since 1970, where the file system says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<u64>,
    /// When the file was written here, in nanoseconds since 1970; 0 where nothing tells.
    #[serde(skip)]
    pub written: i128,
}

impl Home {
    /// Whether what was recorded there has been copied here. Moving a directory changes its path
    /// only, and some network file systems give other numbers after each mount. A copy is created
    /// later, also one that takes the original's path, as a restored backup.
    #[must_use]
    pub fn is_copy_of(&self, recorded: &Home) -> bool {
        let same_number = self.inode.is_some() && self.inode == recorded.inode;
        let created_later = self.created.zip(recorded.created).is_some_and(|(here, there)| here != there);
        created_later || (!self.is_at(recorded) && !same_number)
    }

    /// Whether this is recorded, as far as a copy is told by it.
    #[must_use]
    pub fn is_as_recorded(&self, recorded: &Home) -> bool {
        self.is_at(recorded) && (self.inode, self.created) == (recorded.inode, recorded.created)
    }

    /// Earlier builds recorded URLs as they were given.
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
    /// As the next one of the running branch. Where the name is taken, beside what has it.
    Branch,
    /// Under this very name, in no branch: saved through `torch.distributed.checkpoint`. Only what
    /// was saved in the same way is replaced.
    Exactly,
}

/// An entry that everstep leaves alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// Its name.
    pub name: String,
    /// The step in its name, if there is one.
    pub step: Option<u64>,
    /// Why it is not everstep's, or cannot be told.
    pub why: String,
}

/// What a clean-up has deleted, or would delete.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Checkpoints: steps and names.
    pub gone: Vec<(u64, String)>,
    /// Half of a checkpoint, left by writers that died.
    pub leftovers: Vec<String>,
    /// Entries that are never deleted, whatever the policy says.
    pub foreign: Vec<Foreign>,
}

/// The runs whose branches are counted together in a directory: its own, and those of the
/// directories that it was copied from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Runs(pub Vec<Inherited>);

/// A run whose checkpoints a directory has as a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inherited {
    /// The run.
    pub run: RunId,
    /// The directory's own turns begin here. What that run did in a later one was copied
    /// afterwards, and has no place.
    pub until: u64,
}

impl Runs {
    /// This run alone.
    pub fn only(run: Option<RunId>) -> Self {
        Runs(run.into_iter().map(|run| Inherited { run, until: u64::MAX }).collect())
    }

    /// Where a checkpoint stands among the others of the directory. What comes from anywhere else
    /// has no place in the branches, but may be what they began with.
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

/// What retention has to know of a checkpoint that this run has written.
pub(crate) fn candidate(manifest: &Manifest, run: RunId) -> Candidate {
    Candidate {
        place: Runs::only(Some(run)).place_of(manifest),
        saved_at: manifest.saved_at,
        purpose: manifest.purpose(),
        objects: manifest.objects(),
    }
}

/// What a clean-up deletes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CleanUp<'a> {
    /// What stays.
    pub policy: Policy,
    /// Only what this run has written goes.
    pub run: RunId,
    /// Turns before this one have left what they did not publish.
    pub before: (u64, u64),
    /// The branch that ran last, as it is recorded.
    pub record: Option<&'a Lineage>,
    /// Only says what would go.
    pub dry_run: bool,
}

/// Whether the directory has the owner and the branch with which a clean-up was planned.
pub(crate) type Unchanged<'a> = &'a dyn Fn() -> io::Result<bool>;

/// Fails once somebody else has the directory.
pub(crate) type StillOwned<'a> = &'a dyn Fn() -> io::Result<()>;

/// A directory of checkpoints. Errors are those of the file system or the store.
pub(crate) trait Storage: fmt::Debug + Send + Sync {
    /// Answers at all, within seconds.
    fn reach(&self) -> io::Result<()>;

    /// Writes one rank's shard. `InvalidData` when its slot does not hold the step any more.
    fn write_shard(&self, of: &SealedShard, mark: &Mark, throttle: &Throttle) -> io::Result<ShardFile>;

    /// Makes a checkpoint visible if the directory is still its writer's, and says where. Doing it
    /// again changes nothing. `AlreadyExists` where `target` names what something else has.
    fn publish(&self, mark: &Mark, manifest: &Manifest, target: Target, owned: StillOwned<'_>) -> io::Result<PathBuf>;

    /// The manifest of the checkpoint that this is itself. Errors are a sentence with the path.
    fn manifest(&self) -> Result<Manifest, Unreadable>;

    /// A manifest may give a shard of this checkpoint such a name: it stays below the checkpoint.
    fn may_hold(&self, file: &str) -> bool;

    /// Opens a shard of the checkpoint that this is itself.
    fn shard(&self, file: &str) -> io::Result<ShardSource>;

    /// Published checkpoints in no order, damaged ones with the reason. A directory that is missing
    /// has none.
    fn list(&self) -> io::Result<Vec<Found>>;

    /// Entries named as checkpoints that everstep did not write, or that cannot be told.
    fn foreign(&self, run: Option<RunId>) -> io::Result<Vec<Foreign>>;

    /// Deletes.
    fn prune(&self, what: &CleanUp<'_>, unchanged: Unchanged<'_>) -> io::Result<Pruned>;

    /// Writes down a shard, for whoever publishes.
    fn note(&self, mark: &Mark, step: u64, shard: &ShardFile) -> io::Result<()>;

    /// What [`Storage::note`] has written for a rank.
    fn noted(&self, mark: &Mark, step: u64, rank: u32) -> Option<ShardFile>;

    /// Removes such a note, if publishing does not.
    fn forget(&self, mark: &Mark, step: u64, rank: u32) -> io::Result<()>;

    /// Where this is. `file` is one that is written when it is first used.
    fn home(&self, file: &str) -> io::Result<Home>;

    /// A small file beside the checkpoints; `None` when there is none.
    fn recall(&self, name: &str) -> io::Result<Option<Vec<u8>>>;

    /// Writes one for good. `AlreadyExists` for something that [`is_ours`] does not know.
    fn remember(&self, name: &str, bytes: Vec<u8>) -> io::Result<()>;

    /// Writes one unless it is there. False when it is, whoever wrote it.
    fn create_new(&self, name: &str, bytes: Vec<u8>) -> io::Result<bool>;

    /// Replaces one at once. It need not survive a loss of power.
    fn replace(&self, name: &str, bytes: Vec<u8>) -> io::Result<()>;

    /// Replaces one at once and for good: after a loss of power, it is the earlier or the new one.
    fn replace_durably(&self, name: &str, bytes: Vec<u8>) -> io::Result<()>;

    /// Removes one.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// The name of the record of an epoch's owner.
    fn owner_name(&self, epoch: u64) -> String;

    /// Epochs that have such a record.
    fn owners(&self) -> io::Result<Vec<u64>>;
}

/// A small file is everstep's: a JSON object with the key `everstep`.
pub(crate) fn is_ours(bytes: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Value>(bytes).is_ok_and(|v| v.get("everstep").is_some())
}

/// The error for one that is not.
pub(crate) fn not_ours(name: &str) -> io::Error {
    let what = format!("{name} exists, but everstep did not write it; move it away");
    io::Error::new(io::ErrorKind::AlreadyExists, what)
}

/// Whoever else deletes the same at this moment (the next step's publication, another agent) may be
/// first.
pub(crate) fn gone(done: io::Result<()>) -> io::Result<()> {
    absent(done).map(drop)
}

/// `None` for what is not there.
pub(crate) fn absent<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    found.map(Some).or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(None) } else { Err(e) })
}
