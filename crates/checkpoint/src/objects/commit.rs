//! The manifest in a store: one object, whose presence makes a checkpoint exist.

use super::bucket::{Location, body, failed, wait};
use crate::format::manifest::Manifest;
use crate::format::mark::{self, Mark};
use crate::storage::{Found, Target, Unreadable};
use crate::unique_id::unique_id;
use everstep_core::id::RunId;
use everstep_core::message::{Purpose, ShardFile};
use everstep_wire::limits::MANIFEST_BYTES_MAX;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path as Key;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutPayload, UpdateVersion};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Number of manifests that are read at a time.
const READS: usize = 16;
/// Seconds for which a writer may continue after the generation that follows its own has published.
const LATE: u64 = 600;
/// Number of attempts to put a manifest where another writer puts its own.
const TRIES: usize = 3;
/// Time limit for withdrawing a manifest.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum number of manifests of one step beside each other: of several branches, or automatic and
/// the user's.
const NAMES: u32 = 1000;

/// A manifest: its step, the object, and the contents or the reason why it cannot be read.
pub(super) type Read = (u64, ObjectMeta, Result<Manifest, Unreadable>);

/// Returns the step in the name of a manifest, `step-N.json` or `step-N.G-XXXX.json`.
fn step_of(key: &Key) -> Option<u64> {
    let name = key.filename()?.strip_prefix("step-")?.strip_suffix(".json")?;
    let step = name.split('.').next()?;
    step.parse().ok().filter(|n: &u64| n.to_string() == step)
}

/// Returns the turn in the name of a manifest that was published in a store that ignores
/// conditions, `step-N.E.G-XXXX.json`.
fn attempt_of(key: &Key) -> Option<(u64, u64)> {
    let (_, attempt) = key.filename()?.strip_suffix(".json")?.split_once('.')?;
    mark::turn_of(attempt.split_once('-')?.0)
}

/// Returns the turn in which a checkpoint was written (see [`crate::format::mark::Mark::turn`]). In
/// older manifests, it comes from the name of the first shard.
pub(super) fn turn_of(manifest: &Manifest) -> (u64, u64) {
    let named = || mark::turn_of(manifest.shards.first()?.file.split('-').next()?);
    manifest.writer.map(|w| w.turn()).or_else(named).unwrap_or((0, 0))
}

/// Makes a checkpoint visible, beside others of its step. Doing it again changes nothing. `created`
/// becomes the name that its manifest may have been put under without replacing another one, even
/// if this fails: the answer to a put can be lost.
///
/// # Errors
/// Those of the store; `NotFound` when a shard is missing or has another length; `AlreadyExists`
/// when a later generation has published this step, or when `target` names an existing checkpoint
/// that it may not replace.
pub(super) fn publish(
    to: &Location,
    mark: &Mark,
    manifest: &Manifest,
    target: Target,
    created: &mut Option<Key>,
) -> io::Result<PathBuf> {
    let (step, shards) = (manifest.step, &manifest.shards);
    let bytes: PutPayload = manifest.to_bytes().map_err(io::Error::other)?.into();
    let path = |name: &str| PathBuf::from(format!("{}/{}", to.url, name.trim_end_matches(".json")));
    wait(async {
        present(to, step, shards).await?;
        if !to.heeds_conditions().await? {
            let name = format!("step-{step}.{}-{:016x}.json", mark.turn_text(), unique_id());
            let key = created.insert(to.join(&format!("manifests/{name}")));
            to.bucket.store.put(key, bytes).await.map_err(failed)?;
            return Ok(path(&name));
        }
        for number in 1..=NAMES {
            let name = if number == 1 { format!("step-{step}.json") } else { format!("step-{step}.{number}.json") };
            let key = to.join(&format!("manifests/{name}"));
            *created = Some(key.clone());
            let put = put(to, &key, &bytes, mark, manifest, target, created).await?;
            if !matches!(put, Put::Done) {
                *created = None;
            }
            match put {
                Put::Done => return Ok(path(&name)),
                Put::Taken if target == Target::Branch => {}
                Put::Taken => {
                    let what = format!(
                        "{key} already exists and is not replaced: everstep.dcp.Writer did not save it there; use another name"
                    );
                    return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
                }
                Put::Outlived => break,
            }
        }
        Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "another run publishes the same step there; give each run a prefix of its own",
        ))
    })
}

/// The result of putting a manifest.
enum Put {
    Done,
    /// The name belongs to a checkpoint that this one may not replace.
    Taken,
    /// A later generation has published this step.
    Outlived,
}

/// Puts a manifest under a name. It replaces only a manifest that it stands for.
async fn put(
    to: &Location,
    key: &Key,
    bytes: &PutPayload,
    mark: &Mark,
    manifest: &Manifest,
    target: Target,
    created: &mut Option<Key>,
) -> io::Result<Put> {
    let mut mode = PutMode::Create;
    for _ in 0..TRIES {
        match to.bucket.store.put_opts(key, bytes.clone(), mode.into()).await {
            Ok(_) => return Ok(Put::Done),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {}
            Err(e) => return Err(failed(e)),
        }
        // It is our own, whose answer was lost; or it belongs to a past that was given up, or to a
        // later owner.
        let got = to.bucket.store.get(key).await.map_err(failed)?;
        let version = UpdateVersion { e_tag: got.meta.e_tag.clone(), version: got.meta.version.clone() };
        let Ok(there) = Manifest::from_bytes(&body(got, MANIFEST_BYTES_MAX).await?) else { return Ok(Put::Taken) };
        if there.shards == manifest.shards {
            return Ok(Put::Done);
        }
        if !manifest.stands_for(&there, mark.run, target == Target::Exactly) {
            return Ok(Put::Taken);
        }
        if outlives(&there, mark.turn(), manifest.saved_at) {
            return Ok(Put::Outlived);
        }
        mode = PutMode::Update(version);
        *created = None;
    }
    Ok(Put::Outlived)
}

/// Deletes a manifest that was put under `key`, if it is still there unchanged.
///
/// # Errors
/// Those of the store; `TimedOut`.
pub(super) fn withdraw(from: &Location, key: &Key, manifest: &Manifest) -> io::Result<()> {
    let withdrawn = async {
        let there = match from.bucket.store.get(key).await {
            Ok(got) => body(got, MANIFEST_BYTES_MAX).await?,
            Err(Error::NotFound { .. }) => return Ok(()),
            Err(e) => return Err(failed(e)),
        };
        // They differ in `saved_at` if an earlier call has put the same shards, and that put may
        // have replaced something.
        if Manifest::from_bytes(&there).is_ok_and(|there| there == *manifest) {
            from.bucket.store.delete(key).await.map_err(failed)?;
        }
        Ok(())
    };
    wait(async {
        // A deletion that is retried for minutes could delete what the new owner publishes there.
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, "the store does not answer");
        tokio::time::timeout(WITHDRAW_TIMEOUT, withdrawn).await.map_err(late)?
    })
}

/// Checks that all shards are there with the lengths that were written.
async fn present(to: &Location, step: u64, shards: &[ShardFile]) -> io::Result<()> {
    let below = to.join(&format!("step-{step}"));
    let found: HashMap<Key, u64> =
        to.bucket.store.list(Some(&below)).map_ok(|o| (o.location, o.size)).try_collect().await.map_err(failed)?;
    for shard in shards {
        let key = to.join(&format!("step-{step}/{}", shard.file));
        if found.get(&key) != Some(&shard.bytes) {
            let what = format!("{key} is missing or was changed");
            return Err(io::Error::new(io::ErrorKind::NotFound, what));
        }
    }
    Ok(())
}

/// Reads every manifest, including several of the same step.
pub(super) async fn manifests(of: &Location) -> io::Result<Vec<Read>> {
    let below = of.join("manifests");
    let named = of
        .bucket
        .store
        .list(Some(&below))
        .map_err(failed)
        .try_filter_map(|o| async { Ok(step_of(&o.location).map(|step| (step, o))) });
    named.map_ok(|(step, object)| read(of, step, object)).try_buffer_unordered(READS).try_collect().await
}

async fn read(of: &Location, step: u64, object: ObjectMeta) -> io::Result<Read> {
    let name = &object.location;
    if object.size > MANIFEST_BYTES_MAX {
        let wrong = Unreadable::TooLong { at: name.to_string(), bytes: object.size };
        return Ok((step, object, Err(wrong)));
    }
    let bytes = match of.bucket.store.get(name).await {
        Ok(got) => match body(got, MANIFEST_BYTES_MAX).await {
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                return Ok((step, object, Err(Unreadable::Body(Arc::new(e)))));
            }
            read => read?,
        },
        // Deleted in the meantime.
        Err(Error::NotFound { .. }) => return Ok((step, object, Err(Unreadable::Deleted))),
        Err(e) => return Err(failed(e)),
    };
    let manifest = match Manifest::from_bytes(&bytes) {
        Ok(m) if m.step == step => Ok(m),
        Ok(m) => Err(Unreadable::OtherStep { at: name.to_string(), step: m.step }),
        Err(source) => Err(Unreadable::Invalid { at: name.to_string(), source }),
    };
    Ok((step, object, manifest))
}

/// Distinguishes manifests of the same step.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// Of several automatic checkpoints of one run and branch, only one counts.
    Automatic { run: Option<RunId>, branch: Option<u64> },
    /// Each of the user's saves counts, and each that cannot be read: it may be of any branch.
    Single(Key),
}

impl Kind {
    fn of(object: &ObjectMeta, manifest: &Result<Manifest, Unreadable>) -> Self {
        match manifest {
            Ok(m) if m.purpose() != Purpose::User => {
                Kind::Automatic { run: m.writer.map(|w| w.run), branch: m.lineage.as_ref().map(|l| l.branch) }
            }
            _ => Kind::Single(object.location.clone()),
        }
    }
}

/// Returns the manifests that count: of each step, run, branch and the user's saves the latest one,
/// except those that a generation has put too late, after the one that followed it. Damaged ones
/// count, except for attempts that were followed by a readable one.
pub(super) fn newest(mut all: Vec<Read>) -> Vec<Read> {
    all.sort_by_key(|(_, object, _)| object.last_modified);
    let mut readable: HashMap<u64, (u64, u64)> = HashMap::new();
    for (step, object, _) in all.iter().filter(|(_, _, m)| m.is_ok()) {
        if let Some(turn) = attempt_of(&object.location) {
            readable.entry(*step).and_modify(|latest| *latest = turn.max(*latest)).or_insert(turn);
        }
    }
    let followed = |step: &u64, turn| readable.get(step).is_some_and(|latest| *latest >= turn);
    all.retain(|(step, object, m)| m.is_ok() || !attempt_of(&object.location).is_some_and(|turn| followed(step, turn)));
    let mut best: BTreeMap<(u64, Kind), Read> = BTreeMap::new();
    for (step, object, manifest) in all {
        let kind = (step, Kind::of(&object, &manifest));
        let keep = match (best.get(&kind), &manifest) {
            (Some((_, _, Ok(there))), Ok(new)) => outlives(there, turn_of(new), new.saved_at),
            _ => false,
        };
        if !keep {
            best.insert(kind, (step, object, manifest));
        }
    }
    best.into_values().collect()
}

/// Returns whether the manifest `there` is of a later generation than a manifest that arrives now,
/// which is then too late to count. A job whose coordinator has lost its store counts from 1 again:
/// then the manifest `there` is older than [`LATE`].
fn outlives(there: &Manifest, turn: (u64, u64), now: u64) -> bool {
    turn_of(there) > turn && now.saturating_sub(there.saved_at) < LATE
}

/// Returns the published checkpoints, damaged ones with the reason.
///
/// # Errors
/// Those of the store; an empty prefix is not an error.
pub(super) fn list(of: &Location) -> io::Result<Vec<Found>> {
    let path = |object: &ObjectMeta| {
        let name = object.location.filename().unwrap_or_default();
        PathBuf::from(format!("{}/{}", of.url, name.trim_end_matches(".json")))
    };
    Ok(newest(wait(manifests(of))?).into_iter().map(|(step, object, m)| (step, path(&object), m)).collect())
}

/// Reads the manifest of a published checkpoint.
///
/// # Errors
/// [`Unreadable`].
pub(super) fn read_manifest(checkpoint: &Location) -> Result<Manifest, Unreadable> {
    let unreadable = |e: io::Error| Unreadable::io(&checkpoint.url, e);
    let (of, step) = checkpoint.parent().map_err(unreadable)?;
    let own = wait(async {
        let below = of.join("manifests");
        let named: Vec<ObjectMeta> = of.bucket.store.list(Some(&below)).try_collect().await.map_err(failed)?;
        let own = named.into_iter().filter(|o| step_of(&o.location) == Some(step));
        stream::iter(own).map(|o| read(&of, step, o)).buffer_unordered(READS).try_collect().await
    });
    let name = checkpoint.url.rsplit('/').next().unwrap_or_default();
    let is_named = |o: &ObjectMeta| o.location.filename().is_some_and(|f| f.trim_end_matches(".json") == name);
    let mut all: Vec<Read> = own.map_err(unreadable)?;
    // The one that is named; if no object has exactly this name (in a store that ignores
    // conditions), the one that counts.
    let found = match all.iter().position(|(_, o, _)| is_named(o)) {
        Some(at) => Some(all.swap_remove(at)),
        None => newest(all).into_iter().max_by_key(|(_, _, m)| m.as_ref().ok().map(|m| (turn_of(m), m.saved_at))),
    };
    found.map_or_else(|| Err(Unreadable::Missing(checkpoint.url.clone())), |(_, _, m)| m)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::manifest::VERSION;
    use everstep_core::id::Rank;
    use everstep_core::message::Purpose;
    use std::collections::BTreeSet;
    use std::time::UNIX_EPOCH;

    fn manifest(generation: u64, saved_at: u64) -> Manifest {
        let file = format!("{generation}-00/rank-0.safetensors");
        let shard = ShardFile {
            rank: Rank(0),
            file,
            bytes: 1,
            crc: String::new(),
            purpose: Purpose::Recovery,
            objects: BTreeSet::new(),
        };
        Manifest {
            version: VERSION,
            step: 4,
            world_size: 1,
            saved_at,
            writer: None,
            lineage: None,
            shards: vec![shard],
        }
    }

    fn object(name: &str, at: u64) -> ObjectMeta {
        ObjectMeta {
            location: Key::from(format!("manifests/{name}.json")),
            last_modified: (UNIX_EPOCH + Duration::from_secs(at)).into(),
            size: 1,
            e_tag: None,
            version: None,
        }
    }

    fn counts(all: &[(u64, u64)]) -> u64 {
        let rows =
            all.iter().map(|(generation, at)| (4, object("step-4", *at), Ok(manifest(*generation, *at)))).collect();
        turn_of(newest(rows)[0].2.as_ref().unwrap()).1
    }

    #[test]
    fn a_manifest_that_comes_too_late_does_not_count() {
        assert_eq!(counts(&[(2, 100), (3, 200)]), 3);
        assert_eq!(counts(&[(3, 200), (2, 230)]), 3, "the generation before was still at it");
        assert_eq!(counts(&[(7, 200), (1, 200 + LATE)]), 1, "another life of the job counts from 1");
    }

    /// Returns the names of the manifests that count of step 4; those with a `!` are damaged.
    fn counted(all: &[&str]) -> Vec<String> {
        let row = |name: &&str| match name.strip_suffix('!') {
            Some(name) => (4, object(name, 100), Err(Unreadable::OtherStep { at: name.into(), step: 5 })),
            None => (4, object(name, 100), Ok(manifest(1, 100))),
        };
        let all = newest(all.iter().map(row).collect());
        all.iter().map(|(_, o, _)| o.location.filename().unwrap().trim_end_matches(".json").to_owned()).collect()
    }

    #[test]
    fn a_damaged_manifest_counts_unless_it_is_an_attempt_that_was_made_again() {
        assert_eq!(counted(&["step-4", "step-4.2!"]), ["step-4", "step-4.2"]);
        assert_eq!(counted(&["step-4!", "step-4.2"]), ["step-4.2", "step-4"]);
        assert_eq!(counted(&["step-4!", "step-4.1.1-00ff"]), ["step-4.1.1-00ff", "step-4"]);
        assert_eq!(counted(&["step-4.1.1-00ff!", "step-4.1.2-00ff"]), ["step-4.1.2-00ff"]);
        assert_eq!(counted(&["step-4.1.1-00fe!", "step-4.1.1-00ff"]), ["step-4.1.1-00ff"]);
        assert_eq!(counted(&["step-4.1.1-00ff", "step-4.1.2-00ff!"]), ["step-4.1.1-00ff", "step-4.1.2-00ff"]);
    }

    #[test]
    fn a_manifest_of_another_run_hides_none_of_ours() {
        let of = |run| {
            let writer = Some(Mark { run: RunId(run), ..Mark::default() });
            (
                4,
                object(&format!("step-4.{run}"), 100 + u64::try_from(run).unwrap()),
                Ok(Manifest { writer, ..manifest(1, 100) }),
            )
        };
        assert_eq!(newest(vec![of(1), of(2)]).len(), 2);
    }

    #[test]
    fn manifests_are_told_by_their_names() {
        let step = |name: &str| step_of(&Key::from(format!("a/manifests/{name}")));
        assert_eq!(step("step-12.json"), Some(12));
        assert_eq!(step("step-12.3-00ff.json"), Some(12));
        assert_eq!([step("step-.json"), step("other.json"), step("step-12")], [None, None, None]);
    }
}
