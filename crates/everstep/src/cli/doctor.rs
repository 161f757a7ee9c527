//! `everstep doctor`: checks this machine, and finds what dead jobs left behind.

use super::{Failure, print_json};
use crate::{lock, places};
use clap::Args;
use everstep_core::exit_code::ExitCode;
use everstep_core::spec::Ladder;
use everstep_wire::output::{Doctor, FIRST, Leftover, SharedMemory};
use everstep_wire::private::{Directory, Root};
use rustix::fs::FileType;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Remove what dead jobs left in shared memory
    #[arg(long)]
    clean: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// An arena, and what shows that nobody uses it: locks, held for as long as this value.
struct Arena {
    job: OsString,
    node: OsString,
    bytes: u64,
    _locks: (Directory, File),
}

/// The arenas that no agent and no guard uses.
#[derive(Default)]
struct Leftovers {
    dead: Vec<Arena>,
    /// Arenas whose jobs cannot be judged from here, and their bytes.
    unknown: Vec<(OsString, u64)>,
}

/// Returns the directories in `of`, without symbolic links.
fn directories(of: &Directory) -> Vec<(OsString, Directory)> {
    let names = of.names().unwrap_or_default().into_iter().filter(|(_, kind)| *kind == FileType::Directory);
    names.filter_map(|(name, _)| Some((name.clone(), of.below(&name).ok()?))).collect()
}

/// Finds arenas that are not in use. Shared memory is the same for all of this user's jobs, but
/// their node locks are in their state directories, which may be others (`EVERSTEP_STATE_DIR`,
/// another container). So an arena without a node lock here is not judged.
fn leftovers(memory: &Directory) -> Leftovers {
    let mut found = Leftovers::default();
    for (job, nodes) in directories(memory) {
        let locks = Directory::existing(&places::job(&job.to_string_lossy()), Root::Named);
        for (node, arena) in directories(&nodes) {
            let name = format!("node-{}.lock", node.to_string_lossy());
            let bytes = arena.bytes_below();
            let no_locks = |_| io::Error::from(io::ErrorKind::NotFound);
            let node_lock = locks.as_ref().map_err(no_locks).and_then(|locks| lock::take_existing(locks, &name));
            match (lock::take_directory(&arena), node_lock) {
                (Ok(true), Ok(Some(node_lock))) => {
                    found.dead.push(Arena { job: job.clone(), node, bytes, _locks: (arena, node_lock) });
                }
                (Ok(false), _) | (_, Ok(None)) => {}
                _ => found.unknown.push((job.clone(), bytes)),
            }
        }
    }
    found
}

/// Removes sockets that no process listens on.
fn remove_dead_sockets(memory: &Directory) {
    for (name, _) in memory.names().unwrap_or_default().into_iter().filter(|(_, kind)| *kind == FileType::Socket) {
        let dead = |path: PathBuf| std::os::unix::net::UnixStream::connect(path).is_err();
        if Path::new(&name).extension().is_some_and(|e| e == "sock") && memory.through(&name).is_ok_and(dead) {
            let _ = memory.remove(name);
        }
    }
}

fn not_judged(memory: &Path, unknown: &[(OsString, u64)]) -> String {
    let held: u64 = unknown.iter().map(|(_, bytes)| bytes).sum();
    let mut jobs: Vec<String> = unknown.iter().map(|(job, _)| job.to_string_lossy().into_owned()).collect();
    jobs.sort();
    jobs.dedup();
    format!(
        "{} arenas in {} hold {} MiB and are left alone, because their jobs have no records in {}: {}; run everstep doctor with the EVERSTEP_STATE_DIR of these jobs, or remove their directories if they no longer run",
        unknown.len(),
        memory.display(),
        held >> 20,
        places::state().display(),
        jobs.join(", ")
    )
}

/// Prints the findings. The exit code is 1 if something needs attention.
pub fn run(o: &Options) -> Result<i32, Failure> {
    let memory = places::memory();
    let root = memory.parent().unwrap_or(Path::new("/dev/shm")).to_owned();
    let (total, free) =
        rustix::fs::statvfs(&root).map_or((0, 0), |s| (s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize));
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let opened = Directory::existing(&memory, Root::Named).ok();
    let Leftovers { dead: left, unknown } = opened.as_ref().map(leftovers).unwrap_or_default();
    let held: u64 = left.iter().map(|l| l.bytes).sum();
    let l = Ladder::from_detect_timeout(Duration::from_secs(2));
    let mut findings = Vec::new();
    if total < 1 << 30 {
        findings.push(format!("{} has only {} MiB; memory checkpoints of larger models will go to disk. In a container, use a larger --shm-size", root.display(), total >> 20));
    }
    if limit.is_some_and(|n| n < 4096) {
        findings.push(format!("only {} open files are allowed; run: ulimit -n 65536", limit.unwrap_or(0)));
    }
    let uid = rustix::process::geteuid().as_raw();
    let user = std::env::var("USER").unwrap_or_else(|_| uid.to_string());
    findings.extend(super::remove_ipc::warning(Path::new("/"), uid, &user, &memory));
    if !left.is_empty() && !o.clean {
        findings.push(format!("{} arenas of jobs that do not run hold {} MiB; they resume a job started again under its name; to remove them: everstep doctor --clean", left.len(), held >> 20));
    }
    if !unknown.is_empty() {
        findings.push(not_judged(&memory, &unknown));
    }
    if let Some(opened) = opened.as_ref().filter(|_| o.clean) {
        remove_dead_sockets(opened);
        for Arena { job, node, .. } in &left {
            opened.below(job).and_then(|of| of.remove_tree(node)).map_err(|e| {
                Failure::new(ExitCode::Failed, format!("cannot remove {}: {e}", memory.join(job).join(node).display()))
            })?;
            opened.remove_if_empty(job);
        }
    }
    if o.json {
        let arena = |l: &Arena| Leftover { path: memory.join(&l.job).join(&l.node).into(), bytes: l.bytes };
        print_json(&Doctor {
            version: FIRST,
            shm: SharedMemory { path: root.into(), total, free },
            open_files: limit,
            leftovers: left.iter().map(arena).collect(),
            cleaned: o.clean,
            findings: findings.clone(),
        })?;
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
            ("reconnect after late lines", l.reconnect_late),
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
