//! A directory on a file system, as storage.

use super::files::{self, Published};
use super::ownership::is_lost;
use super::{disk, prune};
use crate::direct_io::{Source, Throttle};
use crate::format::manifest::Manifest;
use crate::format::mark::Mark;
use crate::sealed_shard::SealedShard;
use crate::shard_source::{ShardSource, is_inside};
use crate::storage::{
    CleanUp, Foreign, Found, Home, Pruned, StillOwned, Storage, Target, Unchanged, Unreadable, absent, is_ours,
    not_ours,
};
use crate::unique_id::unique_id;
use everstep_core::id::RunId;
use everstep_core::message::ShardFile;
use everstep_wire::limits::NOTE_BYTES_MAX;
use rustix::fs::FileType;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

const OWNER_PREFIX: &str = "everstep-owner-";

/// A directory of checkpoints, or one of its checkpoints.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
}

impl Directory {
    /// Returns the directory at a path. It need not exist.
    pub fn of(path: &Path) -> Self {
        Directory { path: path.to_owned() }
    }
}

/// Returns the creation time in nanoseconds since 1970; `None` if the file system does not report
/// it.
fn created(of: &fs::Metadata) -> Option<u64> {
    let since = of.created().ok()?.duration_since(UNIX_EPOCH).ok()?;
    u64::try_from(since.as_nanos()).ok().filter(|nanoseconds| *nanoseconds > 0)
}

impl Storage for Directory {
    fn reach(&self) -> io::Result<()> {
        Ok(())
    }

    fn home(&self, file: &str) -> io::Result<Home> {
        let directory = absent(fs::metadata(&self.path))?;
        let file = absent(fs::symlink_metadata(self.path.join(file)))?;
        let path = absent(fs::canonicalize(&self.path))?.unwrap_or_else(|| self.path.clone());
        Ok(Home {
            path: path.to_string_lossy().into_owned(),
            inode: directory.as_ref().map(MetadataExt::ino),
            created: directory.and_then(|d| created(&d)),
            written: file.map_or(0, |f| i128::from(f.ctime()) * 1_000_000_000 + i128::from(f.ctime_nsec())),
        })
    }

    fn write_shard(&self, of: &SealedShard, mark: &Mark, throttle: &Throttle) -> io::Result<ShardFile> {
        files::write_shard(&self.path, of, mark, throttle)
    }

    fn publish(&self, mark: &Mark, manifest: &Manifest, target: Target, owned: StillOwned<'_>) -> io::Result<PathBuf> {
        let Published { at, replaced } = files::publish(&self.path, mark, manifest, target, owned)?;
        // This process may have been stopped between the last check and the rename.
        match owned() {
            // If it were withdrawn after a replacement, a step that was durable before would be
            // missing.
            Err(e) if is_lost(&e) && !replaced => {
                files::withdraw(&self.path, &at, mark, manifest.step)?;
                Err(e)
            }
            other => other.map(|()| at),
        }
    }

    fn manifest(&self) -> Result<Manifest, Unreadable> {
        files::read_manifest(&self.path)
    }

    fn may_hold(&self, file: &str) -> bool {
        is_inside(file, 1)
    }

    fn shard(&self, file: &str) -> io::Result<ShardSource> {
        Source::open(&self.path.join(file)).map(ShardSource::File)
    }

    fn list(&self) -> io::Result<Vec<Found>> {
        files::list(&self.path)
    }

    fn foreign(&self, run: Option<RunId>) -> io::Result<Vec<Foreign>> {
        prune::foreign_in(&self.path, run)
    }

    fn prune(&self, what: &CleanUp<'_>, unchanged: Unchanged<'_>) -> io::Result<Pruned> {
        prune::prune(&self.path, what, unchanged)
    }

    fn note(&self, mark: &Mark, step: u64, shard: &ShardFile) -> io::Result<()> {
        files::note(&self.path, mark, step, shard)
    }

    fn noted(&self, mark: &Mark, step: u64, rank: u32) -> Option<ShardFile> {
        files::noted(&self.path, mark, step, rank)
    }

    /// Does nothing: notes are deleted with the publication.
    fn forget(&self, _: &Mark, _: u64, _: u32) -> io::Result<()> {
        Ok(())
    }

    fn recall(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        absent(disk::read(&self.path.join(name), NOTE_BYTES_MAX)).map_err(|e| match e.kind() {
            // The error's own text begins with "it" and does not name the file.
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
                io::Error::new(e.kind(), format!("{name}: {e}"))
            }
            _ => e,
        })
    }

    fn remember(&self, name: &str, bytes: Vec<u8>) -> io::Result<()> {
        let path = self.path.join(name);
        match disk::kind(&path)? {
            None => {}
            Some(FileType::RegularFile) if is_ours(&disk::read(&path, NOTE_BYTES_MAX)?) => {}
            Some(_) => return Err(not_ours(name)),
        }
        disk::write(&path, &bytes)?;
        disk::sync(&self.path)
    }

    fn create_new(&self, name: &str, bytes: Vec<u8>) -> io::Result<bool> {
        let (path, temporary) = (self.path.join(name), self.path.join(format!(".{name}.{:016x}", unique_id())));
        let mut file = File::create_new(&temporary)?;
        let written = file.write_all(&bytes).and_then(|()| file.sync_all());
        let linked = written.map(|()| fs::hard_link(&temporary, &path));
        let removed = fs::remove_file(&temporary);
        let linked = linked?;
        removed?;
        match linked {
            Ok(()) => File::open(&self.path)?.sync_all().map(|()| true),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            // The file system does not support hard links.
            Err(_) => match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(mut file) => {
                    file.write_all(&bytes)?;
                    file.sync_all().map(|()| true)
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
                Err(e) => Err(e),
            },
        }
    }

    fn replace(&self, name: &str, bytes: Vec<u8>) -> io::Result<()> {
        let temporary = self.path.join(format!(".{name}.{:016x}", unique_id()));
        let mut file = File::create_new(&temporary)?;
        let replaced = file.write_all(&bytes).and_then(|()| fs::rename(&temporary, self.path.join(name)));
        // On a full disk there is no space for the remains of each attempt.
        replaced.inspect_err(|_| drop(fs::remove_file(&temporary)))
    }

    fn replace_durably(&self, name: &str, bytes: Vec<u8>) -> io::Result<()> {
        disk::write(&self.path.join(name), &bytes)?;
        disk::sync(&self.path)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn owner_name(&self, epoch: u64) -> String {
        format!("{OWNER_PREFIX}{epoch}.json")
    }

    fn owners(&self) -> io::Result<Vec<u64>> {
        let Some(entries) = absent(fs::read_dir(&self.path))? else { return Ok(Vec::new()) };
        let names = entries.map(|e| Ok(e?.file_name().into_string().unwrap_or_default()));
        let names = names.collect::<io::Result<Vec<String>>>()?;
        Ok(names.iter().filter_map(|n| n.strip_prefix(OWNER_PREFIX)?.strip_suffix(".json")?.parse().ok()).collect())
    }
}
