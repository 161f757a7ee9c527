//! `everstep doctor`: checks this machine, and finds what dead jobs left behind.

use super::{Failure, print_json};
use crate::{lock, paths};
use clap::Args;
use everstep_core::coordinator::wording::counted;
use everstep_core::exit_code::ExitCode;
use everstep_core::spec::Ladder;
use everstep_wire::output::{Doctor, FIRST, Leftover, SharedMemory};
use everstep_wire::private::{Directory, Root};
use rustix::fs::FileType;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Args, Clone, Debug)]
pub struct DoctorOptions {
    /// Remove what dead jobs left in shared memory
    #[arg(long)]
    clean: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// An arena that no agent and no guard uses.
struct Arena {
    job: OsString,
    node: OsString,
    bytes: u64,
}

/// What is left in shared memory.
#[derive(Default)]
struct Leftovers {
    dead: Vec<Arena>,
    /// Arenas whose jobs have no records here, and their bytes.
    unknown: Vec<(OsString, u64)>,
    /// Arenas whose locks cannot be tried, and why.
    untried: Vec<String>,
}

/// Whether an arena is in use.
enum Use {
    /// It is not, as long as these locks are held.
    None { _locks: (Directory, File) },
    /// It is.
    Locked,
    /// Its job has no records in this state directory.
    Unknown,
}

/// Returns the directories in `of`, without symbolic links.
fn directories(of: &Directory) -> Vec<(OsString, Directory)> {
    let names = of.names().unwrap_or_default().into_iter().filter(|(_, kind)| *kind == FileType::Directory);
    names.filter_map(|(name, _)| Some((name.clone(), of.below(&name).ok()?))).collect()
}

/// Judges an arena. Shared memory is the same for all of this user's jobs, but their node locks are
/// in their state directories, which may be others (`EVERSTEP_STATE_DIR`, another container).
fn in_use(job: &OsStr, node: &OsStr, arena: Directory) -> io::Result<Use> {
    if !lock::take_directory(&arena)? {
        return Ok(Use::Locked);
    }
    let locks = Directory::existing(&paths::job(&job.to_string_lossy()), Root::Named);
    let node_lock = locks.and_then(|of| lock::take_existing(&of, &format!("node-{}.lock", node.to_string_lossy())));
    match node_lock {
        Ok(Some(node_lock)) => Ok(Use::None { _locks: (arena, node_lock) }),
        Ok(None) => Ok(Use::Locked),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Use::Unknown),
        Err(e) => Err(e),
    }
}

fn leftovers(memory: &Directory) -> Leftovers {
    let mut found = Leftovers::default();
    for (job, nodes) in directories(memory) {
        for (node, arena) in directories(&nodes) {
            let bytes = arena.bytes_below();
            let path = arena.path().display().to_string();
            match in_use(&job, &node, arena) {
                // The locks are released at once: an agent may be starting.
                Ok(Use::None { .. }) => found.dead.push(Arena { job: job.clone(), node, bytes }),
                Ok(Use::Locked) => {}
                Ok(Use::Unknown) => found.unknown.push((job.clone(), bytes)),
                Err(e) => found.untried.push(format!("{path} is left alone: cannot test its lock: {e}")),
            }
        }
    }
    found
}

/// Removes an arena, unless it has come into use. Returns whether it was removed.
fn remove(memory: &Directory, Arena { job, node, .. }: &Arena) -> io::Result<bool> {
    let nodes = memory.below(job)?;
    let unused = in_use(job, node, nodes.below(node)?)?;
    let Use::None { .. } = &unused else { return Ok(false) };
    nodes.remove_tree(node)?;
    memory.remove_if_empty(job);
    Ok(true)
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
        "checkpoint memory of {} in {} ({} MiB) is left alone, because {} has no records of its jobs: {}; run everstep \
         doctor --clean with the EVERSTEP_STATE_DIR of these jobs, or, if a job no longer runs, remove its directory \
         there",
        nodes(unknown.len()),
        memory.display(),
        held >> 20,
        paths::state().display(),
        jobs.join(", ")
    )
}

fn left_behind(number: usize, held: u64) -> String {
    format!(
        "{} MiB of shared memory still hold checkpoints of jobs that are not running ({}); a job started again under \
         the same name resumes from them; to remove them, run everstep doctor --clean",
        held >> 20,
        nodes(number)
    )
}

/// Returns a number of arenas for people: each belongs to one node of a job.
fn nodes(number: usize) -> String {
    counted(number as u64, "node")
}

/// Prints the findings. The exit code is 1 if something needs attention.
pub fn run(o: &DoctorOptions) -> Result<i32, Failure> {
    let memory = paths::memory();
    let root = memory.parent().unwrap_or(Path::new("/dev/shm")).to_owned();
    let (total, free) =
        rustix::fs::statvfs(&root).map_or((0, 0), |s| (s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize));
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let opened = Directory::existing(&memory, Root::Named).ok();
    let Leftovers { dead: mut left, unknown, untried } = opened.as_ref().map(leftovers).unwrap_or_default();
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
        findings.push(left_behind(left.len(), held));
    }
    if !unknown.is_empty() {
        findings.push(not_judged(&memory, &unknown));
    }
    findings.extend(untried);
    if let Some(opened) = opened.as_ref().filter(|_| o.clean) {
        remove_dead_sockets(opened);
        let mut removed = Vec::new();
        for arena in left {
            let done = remove(opened, &arena).map_err(|e| {
                let path = memory.join(&arena.job).join(&arena.node);
                Failure::new(ExitCode::Failed, format!("cannot remove {}: {e}", path.display()))
            })?;
            removed.extend(done.then_some(arena));
        }
        left = removed;
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
        println!("state          {}", paths::state().display());
        let done = if o.clean { ", removed" } else { "" };
        println!("leftovers      checkpoint memory of {}, {} MiB{done}", nodes(left.len()), held >> 20);
        println!("timeouts with --detect-timeout 2s:");
        for (name, d) in [
            ("heartbeat interval", l.ping),
            ("grace to reconnect", l.reconnect),
            ("silence until a node is lost", l.silence),
            ("silence until a step may hang (or 3 steps)", l.step_silence),
            ("re-attach after coordinator restart", l.reattach),
            ("wait for further nodes", l.last_call),
            ("SIGTERM to SIGKILL on restart", l.fence_grace),
            ("time to report errors when a failure ends a job", l.last_words),
            ("grace to reconnect after delayed heartbeats", l.reconnect_late),
            ("agent without coordinator", l.orphan),
        ] {
            println!("  {name:<47} {:>7.2} s", d.as_secs_f64());
        }
        for finding in &findings {
            println!("! {finding}");
        }
    }
    Ok(i32::from(!findings.is_empty()))
}
