//! A prefix in an object store, as storage.

use super::bucket::{Location, reach};
use super::source::Object;
use super::{commit, notes, orphans, upload};
use crate::direct::Throttle;
use crate::format::manifest::Manifest;
use crate::format::mark::Mark;
use crate::prepared::Prepared;
use crate::storage::{CleanUp, Foreign, Found, Home, Pruned, StillOwned, Storage, Target, absent, is_ours, not_ours};
use crate::stored::{Stored, is_inside};
use everstep_core::id::RunId;
use everstep_core::message::ShardFile;
use std::io;
use std::path::PathBuf;

impl Storage for Location {
    fn reach(&self) -> io::Result<()> {
        reach(self)
    }

    fn home(&self, _file: &str) -> io::Result<Home> {
        Ok(Home { path: self.url.clone(), inode: None, created: None, written: 0 })
    }

    fn write_shard(&self, of: &Prepared, mark: &Mark, throttle: &Throttle) -> io::Result<ShardFile> {
        upload::write_shard(self, of, mark, throttle)
    }

    /// The put of the manifest has its own condition, so one look is enough.
    fn publish(&self, mark: &Mark, manifest: &Manifest, target: Target, owned: StillOwned<'_>) -> io::Result<PathBuf> {
        owned()?;
        commit::publish(self, mark, manifest, target)
    }

    fn manifest(&self) -> Result<Manifest, String> {
        commit::read_manifest(self)
    }

    /// Each shard has the name of its upload in front.
    fn may_hold(&self, file: &str) -> bool {
        is_inside(file, 2)
    }

    fn shard(&self, file: &str) -> io::Result<Stored> {
        Object::open(self, file).map(Stored::Object)
    }

    fn list(&self) -> io::Result<Vec<Found>> {
        commit::list(self)
    }

    /// Nobody else's objects have names as manifests have.
    fn foreign(&self, _: Option<RunId>) -> io::Result<Vec<Foreign>> {
        Ok(Vec::new())
    }

    fn prune(&self, what: &CleanUp<'_>) -> io::Result<Pruned> {
        orphans::prune(self, what)
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
