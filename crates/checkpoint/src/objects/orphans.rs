//! Deleting: checkpoints that nobody is to keep, and what writers left that died half-way.

use super::bucket::{Location, body, failed, wait};
use super::commit::{manifests, newest};
use super::upload::Begun;
use crate::format::mark::{MARK_FILE, Mark, turn_of};
use crate::retain::{Candidate, Policy, surplus};
use everstep_wire::limits::NOTE_BYTES_MAX;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt};
use std::collections::HashSet;
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What no manifest names is deleted after so long whoever wrote it.
const LEFT_FOR: Duration = Duration::from_secs(24 * 3600);

/// Deletes published checkpoints that `policy` does not keep, and what turns before that of `mark` left unpublished, or anybody a day
/// ago. The manifest goes first, so that half a deletion never looks like a checkpoint. Returns the steps that went.
///
/// # Errors
/// Those of the store.
pub fn prune(of: &Location, policy: Policy, mark: &Mark) -> io::Result<Vec<u64>> {
    wait(async {
        let all = manifests(of).await?;
        let keys: Vec<(u64, Key)> = all.iter().map(|(step, object, _)| (*step, object.location.clone())).collect();
        let good: Vec<_> = newest(all).into_iter().filter_map(|(step, m)| Some((step, m.ok()?))).collect();
        let candidates: Vec<Candidate> = good
            .iter()
            .map(|(step, m)| Candidate { step: *step, saved_at: m.saved_at, purpose: m.purpose() })
            .collect();
        let go = surplus(policy, &candidates);
        delete(of, keys.into_iter().filter(|(step, _)| go.contains(step)).map(|(_, key)| key).collect()).await?;
        let named: HashSet<Key> = good
            .iter()
            .filter(|(step, _)| !go.contains(step))
            .flat_map(|(step, m)| m.shards.iter().map(move |s| format!("step-{step}/{}", s.file)))
            .flat_map(|file| [of.join(&file), of.join(&marked(&file))])
            .collect();
        orphans(of, &go, &named, mark.turn()).await?;
        Ok(go)
    })
}

/// The mark beside a shard.
fn marked(file: &str) -> String {
    file.rsplit_once('/').map_or_else(String::new, |(attempt, _)| format!("{attempt}/{MARK_FILE}"))
}

/// The turn in `E.G-XXXX` or `step-N.E.G`, as attempts and notes are named.
fn turn_in(name: &str) -> Option<(u64, u64)> {
    let name = name.strip_prefix("step-").map_or(name, |n| n.split_once('.').map_or("", |(_, g)| g));
    turn_of(name.split('-').next()?)
}

async fn orphans(of: &Location, go: &[u64], named: &HashSet<Key>, turn: (u64, u64)) -> io::Result<()> {
    let prefix = (!of.key.as_ref().is_empty()).then_some(&of.key);
    let all: Vec<ObjectMeta> = of.bucket.store.list(prefix).try_collect().await.map_err(failed)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let depth = of.key.parts().count();
    let (mut uploads, mut left) = (Vec::new(), Vec::new());
    for object in all {
        let parts: Vec<_> = object.location.parts().skip(depth).collect();
        let parts: Vec<&str> = parts.iter().map(AsRef::as_ref).collect();
        let old = now.as_secs().saturating_sub(object.last_modified.timestamp().unsigned_abs()) > LEFT_FOR.as_secs();
        let before = |name: &str| old || turn_in(name).is_some_and(|t| t < turn);
        match parts.as_slice() {
            ["uploads", note] if before(note) => uploads.push(object.location.clone()),
            ["notes", name, _] if before(name) => left.push(object.location.clone()),
            ["probes", _] if old => left.push(object.location.clone()),
            [step, attempt, _] => {
                let step = step.strip_prefix("step-").and_then(|s| s.parse::<u64>().ok());
                let gone = step.is_some_and(|s| go.contains(&s)) || before(attempt);
                if step.is_some() && gone && !named.contains(&object.location) {
                    left.push(object.location.clone());
                }
            }
            _ => {}
        }
    }
    for note in &uploads {
        end(of, note).await?;
    }
    left.extend(uploads);
    delete(of, left).await
}

/// Ends an upload that was begun and never completed; parts that nobody sees cost money.
async fn end(of: &Location, note: &Key) -> io::Result<()> {
    let bytes = match of.bucket.store.get(note).await {
        Ok(got) => body(got, NOTE_BYTES_MAX).await?,
        Err(Error::NotFound { .. }) => return Ok(()),
        Err(e) => return Err(failed(e)),
    };
    let Ok(begun) = serde_json::from_slice::<Begun>(&bytes) else { return Ok(()) };
    // It may be complete, or ended by whoever was before us.
    let _ = MultipartStore::abort_multipart(&*of.bucket.store, &begun.key.into(), &begun.id).await;
    Ok(())
}

/// Whoever else deletes the same at this moment may be first.
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
