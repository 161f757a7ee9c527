//! The manifest in a store: one object, whose being there makes a checkpoint exist.

use super::bucket::{Location, body, failed, unique, wait};
use crate::format::manifest::Manifest;
use crate::format::mark::{self, Mark};
use crate::persist::{Found, step_directory};
use everstep_core::message::ShardFile;
use everstep_wire::limits::MANIFEST_BYTES_MAX;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path as Key;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutPayload, UpdateVersion};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;

/// Manifests that are read at a time.
const READS: usize = 16;
/// Seconds for which a writer may go on after the generation that follows its own has published.
const LATE: u64 = 600;
/// Times that a manifest is put where another writer puts its own.
const TRIES: usize = 3;

/// A manifest by its name, `step-N.json` or `step-N.G-XXXX.json`: its step.
fn step_of(key: &Key) -> Option<u64> {
    let name = key.filename()?.strip_prefix("step-")?.strip_suffix(".json")?;
    name.split('.').next()?.parse().ok()
}

/// The turn in which a checkpoint was written (see [`crate::format::mark::Mark::turn`]); in older ones, by the name of its first shard.
pub(super) fn turn_of(manifest: &Manifest) -> (u64, u64) {
    let named = || mark::turn_of(manifest.shards.first()?.file.split('-').next()?);
    manifest.writer.map(|w| w.turn()).or_else(named).unwrap_or((0, 0))
}

/// Makes a checkpoint visible. Doing it again changes nothing.
///
/// # Errors
/// Those of the store; `NotFound` when a shard is not there as it was written; `AlreadyExists` when a later generation has published
/// this step.
pub fn publish(to: &Location, mark: &Mark, manifest: &Manifest) -> io::Result<()> {
    let (step, shards) = (manifest.step, &manifest.shards);
    let bytes: PutPayload = manifest.to_bytes().map_err(io::Error::other)?.into();
    wait(async {
        present(to, step, shards).await?;
        if !to.heeds_conditions().await? {
            let key = to.join(&format!("manifests/step-{step}.{}-{:016x}.json", mark.turn_text(), unique()));
            to.bucket.store.put(&key, bytes).await.map_err(failed)?;
            return Ok(());
        }
        let key = to.join(&format!("manifests/step-{step}.json"));
        let mut mode = PutMode::Create;
        for _ in 0..TRIES {
            match to.bucket.store.put_opts(&key, bytes.clone(), mode.into()).await {
                Ok(_) => return Ok(()),
                Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {}
                Err(e) => return Err(failed(e)),
            }
            // Our own, the answer to which was lost; of a past that was given up; or of somebody who is ahead of us.
            let got = to.bucket.store.get(&key).await.map_err(failed)?;
            let version = UpdateVersion { e_tag: got.meta.e_tag.clone(), version: got.meta.version.clone() };
            let there = Manifest::from_bytes(&body(got, MANIFEST_BYTES_MAX).await?);
            match there {
                Ok(m) if m.shards == *shards => return Ok(()),
                Ok(m) if outlives(&m, mark.turn(), manifest.saved_at) => break,
                _ => mode = PutMode::Update(version),
            }
        }
        Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "another run publishes the same step there; give each run a prefix of its own",
        ))
    })
}

/// All shards are there, as long as they were written.
async fn present(to: &Location, step: u64, shards: &[ShardFile]) -> io::Result<()> {
    let below = to.join(&format!("step-{step}"));
    let found: HashMap<Key, u64> =
        to.bucket.store.list(Some(&below)).map_ok(|o| (o.location, o.size)).try_collect().await.map_err(failed)?;
    for shard in shards {
        let key = to.join(&format!("step-{step}/{}", shard.file));
        if found.get(&key) != Some(&shard.bytes) {
            let what = format!("{key} is not there, or not as it was written");
            return Err(io::Error::new(io::ErrorKind::NotFound, what));
        }
    }
    Ok(())
}

/// Every manifest, read. Several of one step are left to the caller.
pub(super) async fn manifests(of: &Location) -> io::Result<Vec<(u64, ObjectMeta, Result<Manifest, String>)>> {
    let below = of.join("manifests");
    let named = of
        .bucket
        .store
        .list(Some(&below))
        .map_err(failed)
        .try_filter_map(|o| async { Ok(step_of(&o.location).map(|step| (step, o))) });
    named.map_ok(|(step, object)| read(of, step, object)).try_buffer_unordered(READS).try_collect().await
}

async fn read(of: &Location, step: u64, object: ObjectMeta) -> io::Result<(u64, ObjectMeta, Result<Manifest, String>)> {
    let name = &object.location;
    if object.size > MANIFEST_BYTES_MAX {
        let wrong = format!("{name} is {} bytes long, over the limit", object.size);
        return Ok((step, object, Err(wrong)));
    }
    let bytes = match of.bucket.store.get(name).await {
        Ok(got) => match body(got, MANIFEST_BYTES_MAX).await {
            Err(e) if e.kind() == io::ErrorKind::InvalidData => return Ok((step, object, Err(e.to_string()))),
            read => read?,
        },
        // Deleted since.
        Err(Error::NotFound { .. }) => return Ok((step, object, Err("deleted".into()))),
        Err(e) => return Err(failed(e)),
    };
    let manifest = Manifest::from_bytes(&bytes).map_err(|e| format!("{name}: {e}"));
    let manifest =
        manifest.and_then(|m| if m.step == step { Ok(m) } else { Err(format!("{name} holds step {}", m.step)) });
    Ok((step, object, manifest))
}

/// Of each step the manifest that counts: the latest one, but for what a generation that is over has put after the one that followed it; a
/// damaged one only where there is no other.
pub(super) fn newest(
    mut all: Vec<(u64, ObjectMeta, Result<Manifest, String>)>,
) -> BTreeMap<u64, Result<Manifest, String>> {
    all.sort_by_key(|(_, object, _)| object.last_modified);
    let mut best: BTreeMap<u64, Result<Manifest, String>> = BTreeMap::new();
    for (step, _, manifest) in all {
        let keep = match (best.get(&step), &manifest) {
            (None | Some(Err(_)), _) => false,
            (Some(Ok(_)), Err(_)) => true,
            (Some(Ok(there)), Ok(new)) => outlives(there, turn_of(new), new.saved_at),
        };
        if !keep {
            best.insert(step, manifest);
        }
    }
    best
}

/// What is there is of a later generation than a manifest of this one that comes now, which is so late that it counts no more. A job
/// whose coordinator has lost its store counts from 1 again: then what is there is old.
fn outlives(there: &Manifest, turn: (u64, u64), now: u64) -> bool {
    turn_of(there) > turn && now.saturating_sub(there.saved_at) < LATE
}

/// Published checkpoints, newest first; damaged ones with the reason.
///
/// # Errors
/// Those of the store; a prefix with nothing below holds none.
pub fn list(of: &Location) -> io::Result<Vec<Found>> {
    let all = newest(wait(manifests(of))?);
    let path = |step| step_directory(Path::new(&of.url), step);
    Ok(all.into_iter().rev().map(|(step, manifest)| (step, path(step), manifest)).collect())
}

/// Reads the manifest of a published checkpoint.
///
/// # Errors
/// A sentence with the URL.
pub fn read_manifest(checkpoint: &Location) -> Result<Manifest, String> {
    let unreadable = |e: io::Error| format!("cannot read {}: {e}", checkpoint.url);
    let (of, step) = checkpoint.parent().map_err(unreadable)?;
    let own = wait(async {
        let below = of.join("manifests");
        let named: Vec<ObjectMeta> = of.bucket.store.list(Some(&below)).try_collect().await.map_err(failed)?;
        let own = named.into_iter().filter(|o| step_of(&o.location) == Some(step));
        stream::iter(own).map(|o| read(&of, step, o)).buffer_unordered(READS).try_collect().await
    });
    let found = newest(own.map_err(unreadable)?).remove(&step);
    found.unwrap_or_else(|| Err(format!("there is no checkpoint {}", checkpoint.url)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::manifest::VERSION;
    use everstep_core::id::Rank;
    use everstep_core::message::Purpose;
    use std::time::UNIX_EPOCH;

    fn manifest(generation: u64, saved_at: u64) -> Manifest {
        let file = format!("{generation}-00/rank-0.safetensors");
        let shard = ShardFile { rank: Rank(0), file, bytes: 1, crc: String::new(), purpose: Purpose::Recovery };
        Manifest { version: VERSION, step: 4, world_size: 1, saved_at, writer: None, shards: vec![shard] }
    }

    fn counts(all: &[(u64, u64)]) -> u64 {
        let object = |at: u64| ObjectMeta {
            location: Key::from("manifests/step-4.json"),
            last_modified: (UNIX_EPOCH + std::time::Duration::from_secs(at)).into(),
            size: 1,
            e_tag: None,
            version: None,
        };
        let rows = all.iter().map(|(generation, at)| (4, object(*at), Ok(manifest(*generation, *at)))).collect();
        turn_of(newest(rows)[&4].as_ref().unwrap()).1
    }

    #[test]
    fn a_manifest_that_comes_too_late_does_not_count() {
        assert_eq!(counts(&[(2, 100), (3, 200)]), 3);
        assert_eq!(counts(&[(3, 200), (2, 230)]), 3, "the generation before was still at it");
        assert_eq!(counts(&[(7, 200), (1, 200 + LATE)]), 1, "another life of the job counts from 1");
    }

    #[test]
    fn manifests_are_told_by_their_names() {
        let step = |name: &str| step_of(&Key::from(format!("a/manifests/{name}")));
        assert_eq!(step("step-12.json"), Some(12));
        assert_eq!(step("step-12.3-00ff.json"), Some(12));
        assert_eq!([step("step-.json"), step("other.json"), step("step-12")], [None, None, None]);
    }
}
