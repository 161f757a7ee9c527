//! Persist: shards and their manifest on a file system, so that a crash at any point leaves the
//! previous checkpoint whole.
//!
//! ```text
//!  step-N.tmp-G/rank-R.safetensors   each rank: write, fsync
//!  step-N.tmp-G/manifest.json        the leader, when all shards are there: write, fsync, fsync directory
//!  step-N/                           rename, fsync parent: from now on it exists
//! ```

use crate::arena::{REGION_AT, Slot};
use crate::format::digest::{combine_chunks, crc};
use crate::format::manifest::{MANIFEST_FILE, Manifest, VERSION};
use everstep_core::id::Rank;
use everstep_core::message::ShardFile;
use everstep_wire::limits::MANIFEST_BYTES_MAX;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Directory of a published checkpoint.
#[must_use]
pub fn step_directory(directory: &Path, step: u64) -> PathBuf {
    directory.join(format!("step-{step}"))
}

fn unpublished(directory: &Path, step: u64, generation: u64) -> PathBuf {
    directory.join(format!("step-{step}.tmp-{generation}"))
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Writes a sealed slot as one rank's shard; the slot must be pinned.
///
/// # Errors
/// Those of the file system; `InvalidData` when the slot does not hold `step` any more.
pub fn write_shard(slot: &Slot, directory: &Path, generation: u64, step: u64, rank: Rank) -> io::Result<ShardFile> {
    let stale = || io::Error::new(io::ErrorKind::InvalidData, format!("the slot does not hold step {step} any more"));
    let (label, index) = slot.inspect().map_err(io::Error::other)?;
    if label.step != step {
        return Err(stale());
    }
    let target = unpublished(directory, step, generation);
    fs::create_dir_all(&target)?;
    let metadata = BTreeMap::from([
        ("everstep".to_owned(), VERSION.to_string()),
        ("step".to_owned(), step.to_string()),
        ("rank".to_owned(), rank.to_string()),
        ("world_size".to_owned(), label.world_size.to_string()),
    ]);
    let header = index.safetensors_header(&metadata).map_err(io::Error::other)?;
    let name = format!("rank-{rank}.safetensors");
    let mut file = File::create(target.join(&name))?;
    file.write_all(&header)?;
    let region = usize::try_from(index.bytes()).map_err(io::Error::other)?;
    file.write_all(slot.map().bytes(REGION_AT, region).ok_or_else(stale)?)?;
    file.sync_all()?;
    if slot.inspect().ok().map(|(l, _)| l) != Some(label) {
        return Err(stale());
    }
    let sum = combine_chunks(crc(&header), &index.crcs, index.bytes());
    Ok(ShardFile { rank, file: name, bytes: header.len() as u64 + index.bytes(), crc: format!("{sum:016x}") })
}

/// Makes a checkpoint visible. Doing it again changes nothing.
///
/// # Errors
/// Those of the file system.
pub fn publish(directory: &Path, generation: u64, step: u64, shards: &[ShardFile]) -> io::Result<()> {
    let (from, to) = (unpublished(directory, step, generation), step_directory(directory, step));
    let manifest = Manifest {
        version: VERSION,
        step,
        world_size: u32::try_from(shards.len()).map_err(io::Error::other)?,
        shards: shards.to_vec(),
    };
    if !from.exists() && read_manifest(&to).is_ok_and(|m| m == manifest) {
        return Ok(());
    }
    let mut file = File::create(from.join(MANIFEST_FILE))?;
    file.write_all(&manifest.to_bytes().map_err(io::Error::other)?)?;
    file.sync_all()?;
    sync_directory(&from)?;
    if to.exists() {
        // The same step once more, after a rollback: swap, so that there is never none.
        renameat_with(CWD, &from, CWD, &to, RenameFlags::EXCHANGE)?;
        sync_directory(directory)?;
        fs::remove_dir_all(&from)?;
    } else {
        fs::rename(&from, &to)?;
    }
    sync_directory(directory)
}

/// Reads the manifest of a published checkpoint.
///
/// # Errors
/// A sentence with the path.
pub fn read_manifest(checkpoint: &Path) -> Result<Manifest, String> {
    let path = checkpoint.join(MANIFEST_FILE);
    let length = fs::metadata(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?.len();
    if length > MANIFEST_BYTES_MAX {
        return Err(format!("{} is {length} bytes long, over the limit", path.display()));
    }
    let bytes = fs::read(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    Manifest::from_bytes(&bytes).map_err(|e| format!("{}: {e}", path.display()))
}

/// A published checkpoint: its step, its directory, its manifest or what is wrong with it.
pub type Found = (u64, PathBuf, Result<Manifest, String>);

/// Published checkpoints, newest first; damaged ones with the reason.
///
/// # Errors
/// Those of reading the directory; a missing directory holds none.
pub fn list(directory: &Path) -> io::Result<Vec<Found>> {
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let step = name.to_str().and_then(|n| n.strip_prefix("step-")).and_then(|n| n.parse::<u64>().ok());
        if let Some(step) = step {
            let manifest = read_manifest(&entry.path()).and_then(|m| {
                if m.step == step { Ok(m) } else { Err(format!("{} holds step {}", entry.path().display(), m.step)) }
            });
            found.push((step, entry.path(), manifest));
        }
    }
    found.sort_by_key(|f: &Found| std::cmp::Reverse(f.0));
    Ok(found)
}

/// Deletes published checkpoints beyond the `keep` newest good ones (at least two stay), and what
/// generations before `generation` left unpublished. The manifest goes first, so that half a
/// deletion never looks like a checkpoint.
///
/// # Errors
/// Those of the file system.
pub fn prune(directory: &Path, keep: usize, generation: u64) -> io::Result<()> {
    let good: Vec<_> = list(directory)?.into_iter().filter(|(_, _, m)| m.is_ok()).collect();
    for (_, path, _) in good.into_iter().skip(keep.max(2)) {
        fs::remove_file(path.join(MANIFEST_FILE))?;
        fs::remove_dir_all(path)?;
    }
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let writer = name.to_str().and_then(|n| n.strip_prefix("step-")?.split_once(".tmp-")?.1.parse::<u64>().ok());
        if writer.is_some_and(|g| g < generation) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}
