//! The server of torch's timers (`torch.distributed.elastic.timer.FileTimerServer`). It runs if the
//! user sets `TORCHELASTIC_ENABLE_FILE_TIMER=1`. Through a named pipe, a worker announces the
//! deadline of a block of code. If the block has not ended by then, the server sends the process
//! the signal that the worker named.

use rustix::fs::{CWD, FileType, Mode, mkfifoat};
use rustix::process::{Pid, Signal, getuid, kill_process};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

/// How often expired timers are looked for, as in torch.
const LOOK: Duration = Duration::from_millis(100);
/// Longest request: what a pipe accepts in one piece (`PIPE_BUF`).
const REQUEST_BYTES_MAX: usize = 4096;
/// Largest number of timers at a time.
const TIMERS_MAX: usize = 65_536;

/// Enables the server, in the environment of the launcher.
pub const ENABLED: &str = "TORCHELASTIC_ENABLE_FILE_TIMER";
/// Names the pipe, for the server and the workers.
pub const FILE: &str = "TORCHELASTIC_TIMER_FILE";

/// A request of `FileTimerClient`. A negative time releases the timer.
#[derive(Debug, Deserialize)]
struct Request {
    pid: i32,
    scope_id: String,
    expiration_time: f64,
    signal: i32,
}

/// Running timers, by process and scope.
#[derive(Default)]
struct Timers(BTreeMap<(i32, String), (f64, i32)>);

impl Timers {
    fn take(&mut self, request: Request) {
        let key = (request.pid, request.scope_id);
        if request.expiration_time < 0.0 {
            self.0.remove(&key);
        } else if self.0.len() < TIMERS_MAX || self.0.contains_key(&key) {
            self.0.insert(key, (request.expiration_time, request.signal));
        }
    }

    /// Returns the processes with an expired timer, each with the scope and signal of the first
    /// expired timer that has a signal. Forgets all timers of a process with an expired one.
    fn expired(&mut self, now: f64) -> Vec<(i32, String, i32)> {
        let mut due: Vec<_> =
            self.0.iter().filter(|(_, (at, _))| *at <= now).map(|(k, v)| (v.0, k.clone(), v.1)).collect();
        due.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut found: BTreeMap<i32, (String, i32)> = BTreeMap::new();
        for (_, (pid, scope), signal) in due {
            self.0.retain(|(p, _), _| *p != pid);
            if signal > 0 {
                found.entry(pid).or_insert((scope, signal));
            }
        }
        found.into_iter().map(|(pid, (scope, signal))| (pid, scope, signal)).collect()
    }
}

/// Returns the path of the pipe if timers are enabled: `own`, unless the user names another.
pub fn wanted(own: &Path) -> Option<PathBuf> {
    let enabled = std::env::var_os(ENABLED).is_some_and(|v| v == "1");
    enabled.then(|| std::env::var_os(FILE).map_or_else(|| own.to_path_buf(), PathBuf::from))
}

/// Serves timers of processes below `guard` until the runtime ends.
///
/// # Errors
/// Fails if the pipe cannot be created. A file at `path` is left alone unless it is a pipe of this
/// user.
pub fn serve(path: &Path, guard: u32) -> std::io::Result<()> {
    if let Ok(there) = std::fs::symlink_metadata(path) {
        if !there.file_type().is_fifo() || there.uid() != getuid().as_raw() {
            let why = format!("{} exists and is not a pipe of yours; set {FILE} to another path", path.display());
            return Err(std::io::Error::new(std::io::ErrorKind::AlreadyExists, why));
        }
        std::fs::remove_file(path)?;
    }
    mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR)?;
    // Also open for writing, so that the pipe never reads as ended while no worker has it open.
    let pipe = pipe::OpenOptions::new().read_write(true).open_receiver(path)?;
    debug_assert!(FileType::from_raw_mode(std::fs::symlink_metadata(path)?.mode()) == FileType::Fifo);
    tokio::spawn(run(pipe, guard));
    Ok(())
}

async fn run(mut pipe: pipe::Receiver, guard: u32) {
    let (mut timers, mut buffer) = (Timers::default(), Vec::new());
    let mut look = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            read = pipe.read_buf(&mut buffer) => {
                if read.is_err() {
                    return;
                }
                take_lines(&mut buffer, &mut timers);
            }
            _ = look.tick() => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
                for (pid, scope, signal) in timers.expired(now) {
                    end(pid, &scope, signal, guard);
                }
            }
        }
    }
}

fn take_lines(buffer: &mut Vec<u8>, timers: &mut Timers) {
    while let Some(end) = buffer.iter().position(|b| *b == b'\n') {
        let line: Vec<u8> = buffer.drain(..=end).collect();
        if let Ok(request) = serde_json::from_slice(&line) {
            timers.take(request);
        }
    }
    if buffer.len() > REQUEST_BYTES_MAX {
        buffer.clear();
    }
}

fn end(pid: i32, scope: &str, signal: i32, guard: u32) {
    let (Some(process), Some(named)) = (Pid::from_raw(pid), Signal::from_named_raw(signal)) else { return };
    if !is_below(pid, guard) {
        return;
    }
    crate::say_warning!("the timer {scope:?} of process {pid} has expired; sending it signal {signal}");
    let _ = kill_process(process, named);
}

/// Returns whether the process is a worker or was started by one. The guard adopts orphans, so
/// every such process has the guard as an ancestor.
fn is_below(pid: i32, guard: u32) -> bool {
    let mut pid = i64::from(pid);
    for _ in 0..64 {
        if pid == i64::from(guard) {
            return true;
        }
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        match parent {
            Some(parent) if parent > 1 => pid = parent,
            _ => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(pid: i32, scope: &str, at: f64, signal: i32) -> String {
        format!(
            "{{\"version\":1,\"pid\":{pid},\"scope_id\":\"{scope}\",\"expiration_time\":{at},\"signal\":{signal}}}\n"
        )
    }

    #[test]
    fn a_timer_expires_unless_it_is_released() {
        let mut timers = Timers::default();
        let mut buffer =
            [request(7, "a", 10.0, 9), request(7, "b", 5.0, 0), request(8, "a", 5.0, 15), request(8, "a", -1.0, 0)]
                .concat()
                .into_bytes();
        take_lines(&mut buffer, &mut timers);
        assert!(timers.expired(4.9).is_empty());
        assert!(timers.expired(6.0).is_empty(), "its timer has no signal");
        let mut buffer =
            [request(7, "a", 10.0, 9), request(7, "c", 9.0, 15), "nonsense\n".into()].concat().into_bytes();
        take_lines(&mut buffer, &mut timers);
        assert_eq!(timers.expired(11.0), [(7, "c".into(), 15)], "the first one");
        assert!(timers.expired(99.0).is_empty(), "its other timers are gone with it");
    }
}
