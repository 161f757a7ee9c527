//! `everstep doctor`: is this machine fit, and what did dead jobs leave behind?

use super::Failure;
use crate::places;
use clap::Args;
use everstep_core::spec::Ladder;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Remove what dead jobs left in shared memory
    #[arg(long)]
    clean: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
}

fn bytes_below(path: &Path) -> u64 {
    let children = std::fs::read_dir(path).into_iter().flatten().flatten();
    children.map(|e| if e.path().is_dir() { bytes_below(&e.path()) } else { e.metadata().map_or(0, |m| m.len()) }).sum()
}

/// Arenas whose node has neither an agent nor a guard.
fn leftovers() -> Vec<(PathBuf, u64)> {
    let mut found = Vec::new();
    for job in std::fs::read_dir(places::memory()).into_iter().flatten().flatten().filter(|e| e.path().is_dir()) {
        for node in std::fs::read_dir(job.path()).into_iter().flatten().flatten() {
            let (job_name, node_name) = (job.file_name(), node.file_name());
            let lock =
                places::job(&job_name.to_string_lossy()).join(format!("node-{}.lock", node_name.to_string_lossy()));
            let free = File::open(&lock).map_or(true, |f| flock(&f, FlockOperation::NonBlockingLockExclusive).is_ok());
            if free {
                found.push((node.path(), bytes_below(&node.path())));
            }
        }
    }
    found
}

/// Sockets that nobody listens on any more.
fn remove_dead_sockets() {
    for entry in std::fs::read_dir(places::memory()).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|e| e == "sock") && std::os::unix::net::UnixStream::connect(&path).is_err() {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Prints the findings; exit code 1 when something needs attention.
pub fn run(o: &Options) -> Result<i32, Failure> {
    let memory = places::memory();
    let root = memory.parent().unwrap_or(Path::new("/dev/shm")).to_owned();
    let (total, free) =
        rustix::fs::statvfs(&root).map_or((0, 0), |s| (s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize));
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let left = leftovers();
    let held: u64 = left.iter().map(|(_, b)| b).sum();
    let l = Ladder::from_detect_timeout(Duration::from_secs(2));
    let mut findings = Vec::new();
    if total < 1 << 30 {
        findings.push(format!("{} has only {} MiB; memory checkpoints of larger models will go to disk. In a container, use a larger --shm-size", root.display(), total >> 20));
    }
    if limit.is_some_and(|n| n < 4096) {
        findings.push(format!("only {} open files are allowed; run: ulimit -n 65536", limit.unwrap_or(0)));
    }
    if !left.is_empty() && !o.clean {
        findings.push(format!("{} arenas of jobs that do not run hold {} MiB; they resume a job started again under its name; to remove them: everstep doctor --clean", left.len(), held >> 20));
    }
    if o.clean {
        remove_dead_sockets();
        for (path, _) in &left {
            std::fs::remove_dir_all(path)
                .map_err(|e| Failure { code: 1, why: format!("cannot remove {}: {e}", path.display()) })?;
            if let Some(job) = path.parent() {
                let _ = std::fs::remove_dir(job);
            }
        }
    }
    if o.json {
        let arenas: Vec<_> = left.iter().map(|(p, b)| serde_json::json!({"path": p, "bytes": b})).collect();
        println!(
            "{}",
            serde_json::json!({"version": 1, "shm": {"path": root, "total": total, "free": free}, "open_files": limit, "leftovers": arenas, "cleaned": o.clean, "findings": findings})
        );
    } else {
        println!("shared memory  {}: {} MiB, {} MiB free", root.display(), total >> 20, free >> 20);
        println!("open files     {}", limit.map_or("unlimited".into(), |n| n.to_string()));
        println!("state          {}", places::state().display());
        println!("leftovers      {} arenas, {} MiB{}", left.len(), held >> 20, if o.clean { ", removed" } else { "" });
        println!("timeouts with --detect-timeout 2s:");
        for (name, d) in [
            ("ping", l.ping),
            ("reconnect grace", l.reconnect),
            ("node silent, lost", l.silence),
            ("step silent (or 3 steps)", l.step_silence),
            ("re-attach after coordinator restart", l.reattach),
            ("last call", l.last_call),
            ("TERM to KILL on restart", l.fence_grace),
            ("last words when a failure ends a job", l.last_words),
            ("agent without coordinator", l.orphan),
        ] {
            println!("  {name:<36} {:>7.2} s", d.as_secs_f64());
        }
        for finding in &findings {
            println!("! {finding}");
        }
    }
    Ok(i32::from(!findings.is_empty()))
}
