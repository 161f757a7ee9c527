//! Deletion of checkpoints that the policy does not keep, and of leftovers of writers that died.

use super::bucket::{Location, PROBE, body, failed, wait};
use super::commit::{Read, manifests};
use super::notes::Note;
use super::upload::Begun;
use crate::format::manifest::Manifest;
use crate::format::mark::{MARK_FILE, Mark, turn_of};
use crate::lineage::{self, Place};
use crate::retain::{Candidate, surplus};
use crate::storage::{CleanUp, Foreign, Pruned, Runs, Unchanged, candidate};
use everstep_core::id::RunId;
use everstep_wire::limits::NOTE_BYTES_MAX;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Age after which objects that no manifest names are deleted, whichever turn of this run wrote
/// them.
const LEFT_FOR: Duration = Duration::from_hours(24);

/// Deletes published checkpoints that `policy` does not keep, and unpublished objects of turns
/// before `before`, or of any turn if they are a day old. The manifest is deleted first, so that an
/// incomplete deletion never looks like a checkpoint. With `dry_run`, nothing is deleted.
///
/// # Errors
/// Those of the store.
pub(super) fn prune(of: &Location, what: &CleanUp<'_>, unchanged: Unchanged<'_>) -> io::Result<Pruned> {
    let CleanUp { policy, run, record, dry_run, .. } = *what;
    let all = wait(manifests(of))?;
    let good: Vec<(&ObjectMeta, &Manifest)> =
        all.iter().filter_map(|(_, object, m)| Some((object, m.as_ref().ok()?))).collect();
    let runs = Runs::only(Some(run));
    let places: Vec<Place> = good.iter().map(|(_, m)| runs.place_of(m)).collect();
    let running = lineage::last(record, &places).cloned().unwrap_or_default();
    let (own, mut done) = deletable(&all, run);
    let candidates: Vec<Candidate> = own.iter().map(|(_, m)| candidate(m, run)).collect();
    let go: Vec<(&ObjectMeta, &Manifest)> =
        surplus(policy, &running, &candidates, all.iter().any(|(_, _, m)| m.is_err()))
            .into_iter()
            .filter_map(|i| own.get(i).copied())
            .collect();
    let name = |o: &ObjectMeta| o.location.filename().unwrap_or_default().trim_end_matches(".json").to_owned();
    done.gone = go.iter().map(|(o, m)| (m.step, name(o))).collect();
    let files = |m: &Manifest| -> Vec<Key> {
        let files = m.shards.iter().map(|s| format!("step-{}/{}", m.step, s.file));
        files.flat_map(|file| [of.join(&file), of.join(&marked(&file))]).collect()
    };
    let gone: HashSet<&Key> = go.iter().map(|(o, _)| &o.location).collect();
    let stay = good.iter().filter(|(o, _)| !gone.contains(&o.location));
    let named: HashSet<Key> = stay.flat_map(|(_, m)| files(m)).collect();
    // Shards before their marks.
    let mut left: Vec<Key> = go.iter().flat_map(|(_, m)| files(m)).filter(|k| !named.contains(k)).collect();
    left.sort_by_key(|k| k.filename() == Some(MARK_FILE));
    if !dry_run {
        // During the listing, training may have gone back to a checkpoint that would be deleted
        // now.
        if !unchanged()? {
            return Ok(Pruned { gone: Vec::new(), ..done });
        }
        wait(async {
            delete(of, go.iter().map(|(o, _)| o.location.clone()).collect()).await?;
            delete(of, left.clone()).await
        })?;
    }
    let known = named.into_iter().chain(left).collect();
    // The shards of a manifest that cannot be read are unknown.
    let unknown: HashSet<u64> = all.iter().filter(|(_, _, m)| m.is_err()).map(|(step, ..)| *step).collect();
    done.leftovers = wait(orphans(of, &known, &unknown, what))?;
    Ok(done)
}

/// Returns the checkpoints that this run may delete, and why it may not delete the others.
fn deletable(all: &[Read], run: RunId) -> (Vec<(&ObjectMeta, &Manifest)>, Pruned) {
    let (mut own, mut done) = (Vec::new(), Pruned::default());
    for (step, object, manifest) in all {
        let why = match manifest {
            Ok(m) if m.writer.is_none() => "written by an earlier version of everstep".into(),
            Ok(m) if m.writer.is_some_and(|w| w.run != run) => "written for another prefix".into(),
            Ok(m) if m.lineage.is_none() => "saved through torch.distributed.checkpoint".into(),
            Ok(m) => {
                own.push((object, m));
                continue;
            }
            Err(why) => why.to_string(),
        };
        let name = object.location.filename().unwrap_or_default().to_owned();
        done.foreign.push(Foreign { name, step: Some(*step), why });
    }
    (own, done)
}

/// Returns the name of the mark beside a shard.
fn marked(file: &str) -> String {
    file.rsplit_once('/').map_or_else(String::new, |(attempt, _)| format!("{attempt}/{MARK_FILE}"))
}

/// Returns the turn in `E.G-XXXX` or `step-N.E.G`, the names of attempts and notes.
fn turn_in(name: &str) -> Option<(u64, u64)> {
    let name = name.strip_prefix("step-").map_or(name, |n| n.split_once('.').map_or("", |(_, g)| g));
    turn_of(name.split('-').next()?)
}

/// Objects that no manifest names, by kind.
#[derive(Default)]
struct Left {
    /// Attempts to write a shard: their objects, without the mark.
    attempts: BTreeMap<String, Vec<Key>>,
    uploads: Vec<Key>,
    notes: Vec<Key>,
    probes: Vec<Key>,
}

/// Deletes leftovers of writers of this run that died, and returns their names. The mark in each is
/// checked, because a name proves nothing.
async fn orphans(
    of: &Location,
    named: &HashSet<Key>,
    unknown: &HashSet<u64>,
    what: &CleanUp<'_>,
) -> io::Result<Vec<String>> {
    let prefix = (!of.key.as_ref().is_empty()).then_some(&of.key);
    let all: Vec<ObjectMeta> = of.bucket.store.list(prefix).try_collect().await.map_err(failed)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let depth = of.key.parts().count();
    let mut found = Left::default();
    for object in all.into_iter().filter(|o| !named.contains(&o.location)) {
        let parts: Vec<_> = object.location.parts().skip(depth).collect();
        let parts: Vec<&str> = parts.iter().map(AsRef::as_ref).collect();
        let old = now.as_secs().saturating_sub(object.last_modified.timestamp().unsigned_abs()) > LEFT_FOR.as_secs();
        let over = |name: &str| old || turn_in(name).is_some_and(|t| t < what.before);
        match parts.as_slice() {
            ["uploads", note] if over(note) => found.uploads.push(object.location.clone()),
            ["notes", name, _] if over(name) => found.notes.push(object.location.clone()),
            ["probes", _] if old => found.probes.push(object.location.clone()),
            [step, attempt, file] if over(attempt) => {
                let known = step.strip_prefix("step-").and_then(|s| s.parse::<u64>().ok());
                let shard = file.starts_with("rank-") && file.ends_with(".safetensors");
                if known.is_some_and(|s| !unknown.contains(&s)) && (shard || *file == MARK_FILE) {
                    let at = found.attempts.entry(format!("{step}/{attempt}")).or_default();
                    if shard {
                        at.push(object.location.clone());
                    }
                }
            }
            _ => {}
        }
    }
    found.delete(of, what).await
}

impl Left {
    /// Deletes the objects that this run wrote, and returns their names. With `dry_run`, only
    /// returns the names.
    async fn delete(self, of: &Location, what: &CleanUp<'_>) -> io::Result<Vec<String>> {
        let mut gone = Vec::new();
        let ours = |mark: Option<Mark>| mark.is_some_and(|m| m.run == what.run);
        let name = |key: &Key| {
            key.parts().skip(of.key.parts().count()).map(|p| p.as_ref().to_owned()).collect::<Vec<_>>().join("/")
        };
        for note in self.uploads {
            let Some(begun) = json::<Begun>(of, &note).await?.filter(|b| ours(b.mark)) else { continue };
            gone.push(name(&note));
            if what.dry_run {
                continue;
            }
            // The upload may be complete, or may have been ended by an earlier clean-up. Parts that
            // are not visible cost money.
            let _ = MultipartStore::abort_multipart(&*of.bucket.store, &begun.key.into(), &begun.id).await;
            delete(of, vec![note]).await?;
        }
        for note in self.notes {
            if json::<Note>(of, &note).await?.is_some_and(|n| ours(Some(n.mark))) {
                gone.push(name(&note));
                if !what.dry_run {
                    delete(of, vec![note]).await?;
                }
            }
        }
        for probe in self.probes {
            if bytes(of, &probe).await?.is_some_and(|b| b == PROBE) {
                gone.push(name(&probe));
                if !what.dry_run {
                    delete(of, vec![probe]).await?;
                }
            }
        }
        for (attempt, shards) in self.attempts {
            let mark = of.join(&format!("{attempt}/{MARK_FILE}"));
            if ours(json::<Mark>(of, &mark).await?) {
                if !what.dry_run {
                    delete(of, shards).await?;
                    delete(of, vec![mark]).await?;
                }
                gone.push(attempt);
            }
        }
        Ok(gone)
    }
}

async fn bytes(of: &Location, key: &Key) -> io::Result<Option<Vec<u8>>> {
    match of.bucket.store.get(key).await {
        Ok(got) if got.meta.size > NOTE_BYTES_MAX => Ok(None),
        Ok(got) => Ok(Some(body(got, NOTE_BYTES_MAX).await?.to_vec())),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(e) => Err(failed(e)),
    }
}

async fn json<T: DeserializeOwned>(of: &Location, key: &Key) -> io::Result<Option<T>> {
    Ok(bytes(of, key).await?.and_then(|b| serde_json::from_slice(&b).ok()))
}

/// Deletes the objects. Those that are deleted already, for example by another process, are not an
/// error.
async fn delete(of: &Location, keys: Vec<Key>) -> io::Result<()> {
    let keys = stream::iter(keys).map(Ok).boxed();
    let done = of.bucket.store.delete_stream(keys).filter(|r| {
        let there = !matches!(r, Err(Error::NotFound { .. }));
        async move { there }
    });
    done.try_for_each(|_| async { Ok(()) }).await.map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_read_from_names() {
        assert_eq!(turn_in("3-00ff"), Some((0, 3)));
        assert_eq!(turn_in("1.12-00ff.json"), Some((1, 12)));
        assert_eq!(turn_in("step-40.2.7"), Some((2, 7)));
        assert_eq!(turn_in("other"), None);
    }
}
