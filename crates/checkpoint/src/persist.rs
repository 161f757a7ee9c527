//! Persist: shards and their manifest on a file system, so that a crash at any point leaves the
//! previous checkpoint whole.
//!
//! ```text
//!  step-N.tmp-G/rank-R.safetensors   each rank: write, fsync
//!  step-N.tmp-G/manifest.json        the leader, when all shards are there: write, fsync, fsync directory
//!  step-N/                           rename, fsync parent: from now on it exists
//! ```

use crate::arena::{REGION_AT, Slot};
use crate::direct::{ALIGN, Throttle, write_file};
use crate::format::digest::{CHUNK_BYTES, combine_chunks, crc};
use crate::format::manifest::{MANIFEST_FILE, Manifest, VERSION};
use crate::format::shard::{
    CHUNKS_KEY, Index, PLACES, PLACES_KEY, VALUE_PREFIX, VALUES_KEY, chunks_to_text, places_to_text, values_to_text,
};
use crate::retain::{Candidate, Policy, surplus};
use everstep_core::id::Rank;
use everstep_core::message::ShardFile;
use everstep_wire::limits::MANIFEST_BYTES_MAX;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

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

/// A slot's bytes that are known to be what was captured.
struct Verified<'a> {
    slot: &'a Slot,
    index: &'a Index,
    chunks: BTreeMap<usize, bool>,
}

impl Verified<'_> {
    fn bytes(&mut self, at: u64, bytes: u64) -> Option<&[u8]> {
        let (at, bytes) = (usize::try_from(at).ok()?, usize::try_from(bytes).ok()?);
        let region = usize::try_from(self.index.bytes()).ok()?;
        for chunk in at / CHUNK_BYTES..(at + bytes).div_ceil(CHUNK_BYTES) {
            let from = chunk * CHUNK_BYTES;
            let good = self.chunks.entry(chunk).or_insert_with(|| {
                let data = self.slot.map().bytes(REGION_AT + from, CHUNK_BYTES.min(region.saturating_sub(from)));
                data.is_some_and(|d| self.index.crcs.get(chunk) == Some(&crc(d)))
            });
            if !*good {
                return None;
            }
        }
        self.slot.map().bytes(REGION_AT + at, bytes)
    }
}

/// What a header says beside the tensors: where they belong, and checksums of the values that any rank may want alone. Where memory
/// is damaged, nothing that could be taken for right.
fn asides(slot: &Slot, index: &Index) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut verified = Verified { slot, index, chunks: BTreeMap::new() };
    let mut values = BTreeMap::new();
    let mut at = 0;
    for tensor in index.tensors.iter() {
        if tensor.name == PLACES {
            let text = verified.bytes(at, tensor.bytes).map_or_else(|| "damaged".into(), places_to_text);
            found.insert(PLACES_KEY.to_owned(), text);
        } else if tensor.name.starts_with(VALUE_PREFIX)
            && let Some(data) = verified.bytes(at, tensor.bytes).filter(|d| !d.is_empty())
        {
            values.insert(at, crc(data));
        }
        at += tensor.bytes;
    }
    if !values.is_empty() {
        found.insert(VALUES_KEY.to_owned(), values_to_text(&values));
    }
    found
}

/// Writes a sealed slot as one rank's shard, past the page cache; the slot must be pinned.
///
/// # Errors
/// Those of the file system; `InvalidData` when the slot does not hold `step` any more.
pub fn write_shard(
    slot: &Slot,
    directory: &Path,
    generation: u64,
    step: u64,
    rank: Rank,
    throttle: &Throttle,
) -> io::Result<ShardFile> {
    let stale = || io::Error::new(io::ErrorKind::InvalidData, format!("the slot does not hold step {step} any more"));
    let (label, index) = slot.inspect().map_err(io::Error::other)?;
    if label.step != step {
        return Err(stale());
    }
    let target = unpublished(directory, step, generation);
    fs::create_dir_all(&target)?;
    let mut metadata = BTreeMap::from([
        ("everstep".to_owned(), VERSION.to_string()),
        ("step".to_owned(), step.to_string()),
        ("rank".to_owned(), rank.to_string()),
        ("world_size".to_owned(), label.world_size.to_string()),
        (CHUNKS_KEY.to_owned(), chunks_to_text(&index.crcs)),
    ]);
    metadata.extend(asides(slot, &index));
    let header = index.safetensors_header(&metadata).map_err(io::Error::other)?;
    let mut head = memmap2::MmapMut::map_anon(header.len())?;
    head.copy_from_slice(&header);
    let region = usize::try_from(index.bytes()).map_err(io::Error::other)?;
    let name = format!("rank-{rank}.safetensors");
    // The index begins on the next page, so whole pages can be written and the last one cut.
    let body = slot.map().bytes(REGION_AT, region.next_multiple_of(ALIGN)).ok_or_else(stale)?;
    write_file(&target.join(&name), &head, body, region, throttle)?;
    if slot.inspect().ok().map(|(l, _)| l) != Some(label) {
        return Err(stale());
    }
    let sum = combine_chunks(crc(&header), &index.crcs, index.bytes());
    let bytes = header.len() as u64 + index.bytes();
    Ok(ShardFile { rank, file: name, bytes, crc: format!("{sum:016x}"), purpose: label.purpose })
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
        saved_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        shards: shards.to_vec(),
    };
    if !from.exists() && read_manifest(&to).is_ok_and(|m| m.step == step && m.shards == manifest.shards) {
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

/// Deletes published checkpoints that `policy` does not keep, and what generations before
/// `generation` left unpublished. The manifest goes first, so that half a deletion never looks like a checkpoint.
/// Returns the steps that went.
///
/// # Errors
/// Those of the file system.
pub fn prune(directory: &Path, policy: Policy, generation: u64) -> io::Result<Vec<u64>> {
    let good: Vec<(Candidate, PathBuf)> = list(directory)?
        .into_iter()
        .filter_map(|(step, path, m)| {
            let m = m.ok()?;
            Some((Candidate { step, saved_at: m.saved_at, purpose: m.purpose() }, path))
        })
        .collect();
    let go = surplus(policy, &good.iter().map(|(c, _)| *c).collect::<Vec<_>>());
    for (_, path) in good.iter().filter(|(c, _)| go.contains(&c.step)) {
        gone(fs::remove_file(path.join(MANIFEST_FILE)))?;
        // What follows may be lost half-way, the missing manifest may not.
        gone(sync_directory(path))?;
        gone(fs::remove_dir_all(path))?;
    }
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|n| n.strip_prefix("step-")) else { continue };
        let writer = rest.split_once(".tmp-").and_then(|(_, g)| g.parse::<u64>().ok());
        // A deletion that a crash cut short leaves shards without a manifest.
        let emptied = rest.parse::<u64>().is_ok() && !entry.path().join(MANIFEST_FILE).exists();
        if emptied || writer.is_some_and(|g| g < generation) {
            gone(fs::remove_dir_all(entry.path()))?;
        }
    }
    Ok(go)
}

/// Whoever else deletes the same at this moment (the next step's publication, another agent) may be first.
fn gone(done: io::Result<()>) -> io::Result<()> {
    done.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
}
