//! A prefix in an object store, as storage.

use super::bucket::{Location, reach};
use super::source::Object;
use super::{commit, notes, prune, upload};
use crate::direct_io::Throttle;
use crate::format::manifest::Manifest;
use crate::format::mark::Mark;
use crate::sealed_shard::SealedShard;
use crate::shard_source::{ShardSource, is_inside};
use crate::storage::{
    CleanUp, Foreign, Found, Home, Pruned, StillOwned, Storage, Target, Unchanged, Unreadable, absent, address,
    is_ours, not_ours,
};
use everstep_core::id::RunId;
use everstep_core::message::ShardFile;
use object_store::path::Path as Key;
use std::io;
use std::path::PathBuf;

/// Checks the ownership again after a publication, and withdraws a manifest that came too late. The
/// condition of the put concerns its key, not the owner, and a put that is retried may succeed
/// after another job has taken the prefix over.
fn settle(
    to: &Location,
    manifest: &Manifest,
    published: io::Result<PathBuf>,
    created: Option<Key>,
    owned: StillOwned<'_>,
) -> io::Result<PathBuf> {
    // Nothing has been put.
    if published.is_err() && created.is_none() {
        return published;
    }
    let Err(lost) = owned() else { return published };
    if !is_lost(&lost) {
        return published.and(Err(lost));
    }
    // A manifest that replaced another one stays. Without it, a step that was durable would be
    // missing.
    match created.map_or(Ok(()), |key| commit::withdraw(to, &key, manifest)) {
        Ok(()) => Err(lost),
        Err(e) => {
            let step = manifest.step;
            let what = format!("{lost}; step {step} may be in {} nevertheless, and cannot be deleted: {e}", to.url);
            Err(io::Error::new(lost.kind(), what))
        }
    }
}

/// Returns whether another job owns the prefix. A store that refuses the request, for example
/// because keys have expired, fails with the same kind of error.
fn is_lost(e: &io::Error) -> bool {
    let refused = matches!(e.get_ref(), Some(inner) if inner.is::<object_store::Error>());
    e.kind() == io::ErrorKind::PermissionDenied && e.raw_os_error().is_none() && !refused
}

impl Storage for Location {
    fn reach(&self) -> io::Result<()> {
        reach(self)
    }

    fn home(&self, _file: &str) -> io::Result<Home> {
        Ok(Home { path: address(&self.url).into_owned(), inode: None, created: None, written: 0 })
    }

    fn write_shard(&self, of: &SealedShard, mark: &Mark, throttle: &Throttle) -> io::Result<ShardFile> {
        upload::write_shard(self, of, mark, throttle)
    }

    fn publish(&self, mark: &Mark, manifest: &Manifest, target: Target, owned: StillOwned<'_>) -> io::Result<PathBuf> {
        owned()?;
        let mut created = None;
        let published = commit::publish(self, mark, manifest, target, &mut created);
        settle(self, manifest, published, created, owned)
    }

    fn manifest(&self) -> Result<Manifest, Unreadable> {
        commit::read_manifest(self)
    }

    /// Accepts names with one directory: each shard has the name of its upload in front.
    fn may_hold(&self, file: &str) -> bool {
        is_inside(file, 2)
    }

    fn shard(&self, file: &str) -> io::Result<ShardSource> {
        Object::open(self, file).map(ShardSource::Object)
    }

    fn list(&self) -> io::Result<Vec<Found>> {
        commit::list(self)
    }

    /// Returns nothing: objects of others do not have the names of manifests.
    fn foreign(&self, _: Option<RunId>) -> io::Result<Vec<Foreign>> {
        Ok(Vec::new())
    }

    fn prune(&self, what: &CleanUp<'_>, unchanged: Unchanged<'_>) -> io::Result<Pruned> {
        prune::prune(self, what, unchanged)
    }

    fn note(&self, mark: &Mark, step: u64, shard: &ShardFile) -> io::Result<()> {
        notes::note(self, mark, step, shard)
    }

    fn noted(&self, mark: &Mark, step: u64, rank: u32) -> Option<ShardFile> {
        notes::noted(self, mark, step, rank)
    }

    fn forget(&self, mark: &Mark, step: u64, rank: u32) -> io::Result<()> {
        notes::forget(self, mark, step, rank)
    }

    fn recall(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        absent(notes::recall(self, name))
    }

    fn remember(&self, name: &str, bytes: Vec<u8>) -> io::Result<()> {
        match self.recall(name)? {
            Some(there) if !is_ours(&there) => Err(not_ours(name)),
            _ => notes::remember(self, name, bytes),
        }
    }

    fn create_new(&self, name: &str, bytes: Vec<u8>) -> io::Result<bool> {
        notes::create_new(self, name, bytes)
    }

    fn replace(&self, name: &str, bytes: Vec<u8>) -> io::Result<()> {
        notes::remember(self, name, bytes)
    }

    fn replace_durably(&self, name: &str, bytes: Vec<u8>) -> io::Result<()> {
        notes::remember(self, name, bytes)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        notes::remove(self, name)
    }

    fn owner_name(&self, epoch: u64) -> String {
        format!("owners/{epoch}.json")
    }

    fn owners(&self) -> io::Result<Vec<u64>> {
        let names = notes::names(self, "owners")?;
        Ok(names.iter().filter_map(|n| n.strip_suffix(".json")?.parse().ok()).collect())
    }
}

#[cfg(test)]
mod tests;
