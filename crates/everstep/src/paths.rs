//! Where everstep keeps things on a machine. Both roots belong to this user alone; see
//! [`everstep_wire::private`].

use everstep_checkpoint::arena::job_hash;
use everstep_wire::limits::NOTE_BYTES_MAX;
use everstep_wire::private::{Directory, Root};
use everstep_wire::raw::from_text;
use rustix::process::geteuid;
use std::io;
use std::path::{Path, PathBuf};

/// Stands for a missing state directory: nothing can be created or found below it.
const NOWHERE: &str = "/dev/null/everstep";

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// Returns the home directory of this user: `$HOME`, else the one in the user database.
fn home() -> Option<PathBuf> {
    let home = variable("HOME").or_else(|| match std::env::var_os("HOME") {
        None => std::env::home_dir(),
        Some(_) => passwd_home(&std::fs::read_to_string("/etc/passwd").ok()?),
    });
    home.filter(|h| h.is_absolute())
}

/// Finds the home directory in `/etc/passwd`. If `HOME` is empty, the standard library does not.
fn passwd_home(passwd: &str) -> Option<PathBuf> {
    let own = geteuid().as_raw().to_string();
    let fields = passwd.lines().map(|l| l.split(':').collect::<Vec<_>>());
    let of_user = fields.into_iter().find(|f| f.get(2).is_some_and(|uid| **uid == own))?;
    of_user.get(5).filter(|h| !h.is_empty()).map(PathBuf::from)
}

fn state_root() -> (PathBuf, Root) {
    if let Some(chosen) = variable("EVERSTEP_STATE_DIR") {
        return (chosen, Root::Chosen);
    }
    let named = variable("XDG_STATE_HOME").filter(|d| d.is_absolute()).map(|d| d.join("everstep"));
    let named = named.or_else(|| home().map(|h| h.join(".local/state/everstep")));
    (named.unwrap_or_else(|| NOWHERE.into()), Root::Named)
}

/// Returns the directory of records, logs and tokens: `$EVERSTEP_STATE_DIR`, else
/// `$XDG_STATE_HOME/everstep`, else `~/.local/state/everstep`.
pub fn state() -> PathBuf {
    state_root().0
}

/// Returns the directory of one job under [`state`].
pub fn job(name: &str) -> PathBuf {
    state().join("jobs").join(name)
}

/// Returns the log of a node's agent, in the directory of its job.
pub fn agent_log(job_name: &str, node: &str) -> PathBuf {
    job(job_name).join(format!("agent-{node}.jsonl"))
}

/// Returns the log of the coordinator with this store.
pub fn coordinator_log(store: &Path) -> PathBuf {
    store.join("coordinator.jsonl")
}

/// Opens the directory of a job, creating it if necessary.
///
/// # Errors
/// Those of the file system, and if the directory does not belong to this user alone.
pub fn open_job(name: &str) -> io::Result<Directory> {
    let (path, root) = state_root();
    Directory::root(&path, root)?.make(Path::new("jobs").join(name))
}

fn memory_base() -> PathBuf {
    variable("EVERSTEP_SHM_DIR").unwrap_or_else(|| "/dev/shm".into())
}

fn usual_name() -> String {
    format!("everstep-{}", geteuid().as_raw())
}

/// Returns the name of the note that records which name is used in `base` because another user has
/// taken the usual one.
fn name_note(base: &Path) -> String {
    format!("shared-memory-{:016x}", job_hash(&base.to_string_lossy()))
}

/// Returns the directory in shared memory for all jobs of this user, in `$EVERSTEP_SHM_DIR`, else
/// `/dev/shm`: `everstep-UID`, or the name that [`ready`] chose instead.
pub fn memory() -> PathBuf {
    let (base, (state, root)) = (memory_base(), state_root());
    let noted = || {
        let name = Directory::existing(&state, root).ok()?.read(name_note(&base), NOTE_BYTES_MAX).ok()?;
        let name = String::from_utf8(name).ok().filter(|n| n.starts_with(&usual_name()) && !n.contains('/'))?;
        Directory::existing(&base.join(name), Root::Named).ok().map(|d| d.path().to_owned())
    };
    noted().unwrap_or_else(|| base.join(usual_name()))
}

/// Paths below the state directory are a few hundred bytes longer; the kernel accepts 4,096.
const LONGEST: usize = 3000;

/// Creates both roots.
///
/// # Errors
/// [`Unusable`].
pub fn ready() -> Result<(), Unusable> {
    let (path, root) = state_root();
    if path == Path::new(NOWHERE) {
        return Err(Unusable::NoHome);
    }
    if path.as_os_str().len() > LONGEST {
        return Err(Unusable::TooLong { bytes: path.as_os_str().len() });
    }
    let state = Directory::root(&path, root).map_err(|e| Unusable::state(&path, e))?;
    let memory = memory();
    match Directory::root(&memory, Root::Named) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => elsewhere(&state, &memory, e),
        Err(e) => Err(Unusable::memory(&memory, e)),
    }
}

/// Checks the state directory for commands that only read, and creates nothing.
///
/// # Errors
/// [`Unusable`].
pub fn inspect() -> Result<(), Unusable> {
    let (path, root) = state_root();
    match Directory::existing(&path, root) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Err(Unusable::state(&path, e)),
        _ => Ok(()),
    }
}

/// The remedy where the disk with the state directory is full.
pub const MAKE_ROOM: &str = "free some space there, or set EVERSTEP_STATE_DIR to a directory on another disk";

/// Returns whether there was no room on the disk, or none left for this user.
pub fn is_full(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Why a root cannot be used, with the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    #[error(
        "this user has no home directory to keep records in; set EVERSTEP_STATE_DIR to a directory that only you can write"
    )]
    NoHome,
    #[error(
        "cannot keep records in a directory whose path has {bytes} bytes; set EVERSTEP_STATE_DIR to one of at most {LONGEST}"
    )]
    TooLong { bytes: usize },
    /// `at` begins with a space; it is empty if the refusal names the directory.
    #[error("cannot keep records in{at}: {source}; set EVERSTEP_STATE_DIR to a directory that only you can write")]
    State { at: String, source: io::Error },
    #[error("cannot use {}: {source}; set EVERSTEP_SHM_DIR to a directory that only you can write", path.display())]
    Memory { path: PathBuf, source: io::Error },
}

impl Unusable {
    fn state(path: &Path, source: io::Error) -> Self {
        let named = source.kind() == io::ErrorKind::PermissionDenied;
        Unusable::State { at: if named { String::new() } else { format!(" {}", path.display()) }, source }
    }

    fn memory(path: &Path, source: io::Error) -> Self {
        Unusable::Memory { path: path.into(), source }
    }
}

/// Another user has taken the usual name in a directory that everyone can write. Creates one with
/// an unguessable name, and notes it for the next start.
fn elsewhere(state: &Directory, taken: &Path, why: io::Error) -> Result<(), Unusable> {
    let base = memory_base();
    let mut random = [0u8; 8];
    let drawn = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    drawn.map_err(|e| Unusable::memory(taken, e.into()))?;
    let name = format!("{}-{:016x}", usual_name(), u64::from_le_bytes(random));
    let made = Directory::fresh(&base.join(&name)).and_then(|_| state.write_whole(name_note(&base), name.as_bytes()));
    if made.is_err() {
        return Err(Unusable::memory(taken, why));
    }
    crate::say_warning!("{why}: shared memory is in {} instead", base.join(name).display());
    Ok(())
}

/// Opens the directory of a coordinator's store, creating it if necessary: below [`state`], or the
/// one that `--store` names.
///
/// # Errors
/// Those of the file system, and if others can write there.
pub fn open_store(path: &Path) -> io::Result<Directory> {
    let (state, root) = state_root();
    match path.strip_prefix(&state) {
        Ok(below) => Directory::root(&state, root)?.make(below),
        Err(_) => Directory::root(path, Root::Chosen),
    }
}

/// Returns the directory of the boards and arenas of one node of one job.
pub fn node_memory(job: &str, node: &str) -> PathBuf {
    memory().join(job).join(node)
}

/// Opens the same directory, creating it if necessary, even if everything was removed in the
/// meantime.
///
/// # Errors
/// Those of the file system, and if the directory does not belong to this user alone.
pub fn open_node_memory(job: &str, node: &str) -> io::Result<Directory> {
    Directory::root(&memory(), Root::Named)?.make(Path::new(job).join(node))
}

/// Returns where a node's arenas go if shared memory is too small.
pub fn node_spill(job_name: &str, node: &str) -> PathBuf {
    job(job_name).join("arena").join(node)
}

/// Notes where a job's durable checkpoints are, for `everstep ckpt`.
pub fn remember_checkpoints(name: &str, directory: &str) {
    // A mere convenience: commands that name the directory do not need it.
    let _ = open_job(name).and_then(|job| job.write_whole("checkpoints", directory.as_bytes()));
}

/// Returns the directory noted by [`remember_checkpoints`].
pub fn checkpoints(name: &str) -> Option<PathBuf> {
    let noted = Directory::existing(&job(name), Root::Named).ok()?.read("checkpoints", NOTE_BYTES_MAX).ok()?;
    String::from_utf8(noted).ok().map(|text| from_text(&text))
}

/// A name that must not become part of paths.
#[derive(Debug, thiserror::Error)]
#[error("invalid {what} {name:?}: use 1 to 63 letters, digits, '.', '_' or '-', not starting with '.'")]
pub struct BadName {
    /// What it is the name of.
    what: String,
    name: String,
}

/// Checks a name that becomes part of paths: letters, digits, `.`, `_`, `-`, at most 63.
pub fn check_name(what: &str, name: &str) -> Result<(), BadName> {
    let fits = name.len() <= everstep_wire::limits::NAME_BYTES_MAX;
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if fits && plain && !name.is_empty() && !name.starts_with('.') {
        return Ok(());
    }
    Err(BadName { what: what.into(), name: name.into() })
}

/// Writes a small file into a directory of this user, so that readers see the old or the new one,
/// never half of it.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (parent, name) = path.parent().zip(path.file_name()).ok_or(io::ErrorKind::InvalidInput)?;
    Directory::existing(parent, Root::Chosen)?.write_whole(name, bytes)
}

/// Returns the milliseconds since 1970, by this machine's clock.
pub fn unix_millis() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_home_of_a_user_is_found_by_its_number() {
        let own = geteuid().as_raw();
        let passwd = format!("other:x:{}:1::/home/other:/bin/sh\nme:x:{own}:1::/home/me:/bin/sh\n", own + 1);
        assert_eq!(passwd_home(&passwd), Some("/home/me".into()));
        assert_eq!(passwd_home("other:x:77777777:1::/home/other:/bin/sh"), None);
    }
}
