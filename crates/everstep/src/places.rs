//! Where everstep keeps things on a machine.

use rustix::process::getuid;
use std::path::{Path, PathBuf};

/// Records, logs, tokens: `$EVERSTEP_STATE_DIR`, else `$XDG_STATE_HOME/everstep`, else `~/.local/state/everstep`.
pub fn state() -> PathBuf {
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    var("EVERSTEP_STATE_DIR")
        .or_else(|| var("XDG_STATE_HOME").map(|d| d.join("everstep")))
        .or_else(|| var("HOME").map(|d| d.join(".local/state/everstep")))
        .unwrap_or_else(|| std::env::temp_dir().join(format!("everstep-state-{}", getuid().as_raw())))
}

/// What one job keeps under [`state`].
pub fn job(name: &str) -> PathBuf {
    state().join("jobs").join(name)
}

/// Shared memory of all jobs of this user: `$EVERSTEP_SHM_DIR`, else `/dev/shm`.
pub fn memory() -> PathBuf {
    let root = std::env::var_os("EVERSTEP_SHM_DIR").filter(|v| !v.is_empty()).map_or("/dev/shm".into(), PathBuf::from);
    root.join(format!("everstep-{}", getuid().as_raw()))
}

/// Boards and arenas of one node of one job.
pub fn node_memory(job: &str, node: &str) -> PathBuf {
    memory().join(job).join(node)
}

/// Where a node's arenas go when shared memory is too small.
pub fn node_spill(job_name: &str, node: &str) -> PathBuf {
    job(job_name).join("arena").join(node)
}

/// Notes where a job's durable checkpoints are, for `everstep ckpt`.
pub fn remember_checkpoints(name: &str, directory: &str) {
    // Only a convenience: who gives the directory does not need it.
    let _ = write_whole(&job(name).join("checkpoints"), directory.as_bytes());
}

/// What [`remember_checkpoints`] has noted.
pub fn checkpoints(name: &str) -> Option<PathBuf> {
    std::fs::read_to_string(job(name).join("checkpoints")).ok().map(PathBuf::from)
}

/// Names become parts of paths: letters, digits, `.`, `_`, `-`, at most 63.
pub fn check_name(what: &str, name: &str) -> Result<(), String> {
    let fits = name.len() <= everstep_wire::limits::NAME_BYTES_MAX;
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if fits && plain && !name.is_empty() && !name.starts_with('.') {
        return Ok(());
    }
    Err(format!("{what} {name:?} cannot be used: take 1 to 63 letters, digits, '.', '_' or '-', not starting with '.'"))
}

/// Writes a small file so that readers see the old or the new one, never half of it.
pub fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension(format!("tmp-{}", std::process::id()));
    std::fs::write(&temporary, bytes)?;
    std::fs::rename(temporary, path)
}

/// Milliseconds since 1970, by this machine's clock.
pub fn unix_millis() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(0))
}
