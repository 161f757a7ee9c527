//! This node's identity: its id, its directory in shared memory, and the locks that keep a second
//! agent from taking either.

use super::meet::Meet;
use super::{Failure, RunOptions};
use crate::lock::{self, Owner};
use crate::paths;
use everstep_wire::private::{Directory, Root};
use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long to wait for the lock: the guard of an earlier agent may keep it for a moment.
const NODE_LOCK_WAIT: Duration = Duration::from_secs(5);

/// How long to wait for `everstep doctor` to release this node's directory in shared memory.
const MEMORY_WAIT: Duration = Duration::from_secs(5);

/// Takes the lock of a node id. The agent holds it and, after the agent's end, its guard.
fn lock_node(job: &str, node: &str, wait: Duration) -> Result<Result<File, Owner>, Failure> {
    let path = paths::job(job);
    let unusable = |e: std::io::Error| {
        Failure::config(format!(
            "cannot use {}: {e}; set EVERSTEP_STATE_DIR to a directory you can write",
            path.display()
        ))
    };
    let directory = paths::open_job(job).map_err(unusable)?;
    lock::take(&directory, &format!("node-{node}.lock"), wait).map_err(unusable)
}

/// Returns the id of this node in `job`, and its lock.
///
/// # Errors
/// Fails if the id is in use on this machine.
pub fn node_id(o: &RunOptions, meet: &Meet, nodes_max: u32) -> Result<(String, File), Failure> {
    let job = meet.job.as_str();
    let given = meet
        .node
        .clone()
        .or_else(|| o.node_rank.clone())
        .or_else(|| std::env::var("SLURM_NODEID").ok())
        .filter(|n| !n.is_empty());
    let named = given.or_else(|| (nodes_max == 1).then(|| "0".to_owned()));
    if let Some(node) = named {
        paths::check_name("--node-rank", &node).map_err(Failure::usage)?;
        crate::log::set("node", node.as_str());
        let lock = match lock_node(job, &node, Duration::ZERO)? {
            Err(by) => {
                let seconds = NODE_LOCK_WAIT.as_secs();
                crate::say!(
                    "node id {node} of job {job} is in use on this machine by {by}; waiting up to {seconds} s for it to exit"
                );
                lock_node(job, &node, NODE_LOCK_WAIT)?
            }
            free => free,
        };
        let taken = |by: Owner| {
            let remedy = match nodes_max {
                1 => "give this job another name (--name), or end the other one",
                _ => "give each node its own --node-rank, or end the other agent",
            };
            Failure::config(format!("node id {node} of job {job} is already in use on this machine by {by}; {remedy}"))
        };
        return Ok((node.clone(), lock.map_err(taken)?));
    }
    // Several agents may share a machine: each takes the first free id of this host.
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "-");
    for i in 0..256 {
        let node = if i == 0 { host.clone() } else { format!("{host}-{i}") };
        if let Ok(lock) = lock_node(job, &node, Duration::ZERO)? {
            crate::log::set("node", node.as_str());
            return Ok((node, lock));
        }
    }
    Err(Failure::config("256 agents of this job run on this machine; give --node-rank"))
}

/// Creates the directory for this node's step boards and arenas. Returns its path and its handle,
/// whose lock shows that it is in use to those who know of no other: `everstep doctor` and agents
/// with another state directory.
///
/// # Errors
/// Fails if the directory cannot be used, and if such an agent uses it: workers of both would talk
/// to one of the two, and each would replace the other's checkpoints in memory.
pub fn open_memory(job: &str, node: &str) -> Result<(PathBuf, Directory), Failure> {
    let memory = paths::node_memory(job, node);
    let unusable = |e: std::io::Error| {
        Failure::config(format!(
            "cannot use {}: {e}; set EVERSTEP_SHM_DIR to a directory that only you can write",
            memory.display()
        ))
    };
    let start = Instant::now();
    loop {
        let opened = paths::open_node_memory(job, node).map_err(unusable)?;
        let locked = lock::take_directory(&opened).unwrap_or(true);
        // Somebody may be removing what an earlier job left there.
        let there = Directory::existing(&memory, Root::Named).and_then(|d| d.is_same(&opened)).unwrap_or(false);
        if locked && (there || start.elapsed() > MEMORY_WAIT) {
            return Ok((memory, opened));
        }
        if start.elapsed() > MEMORY_WAIT {
            let by = lock::owner_of(&opened);
            return Err(Failure::config(format!(
                "{} is in use by {by}: another job named {job} runs on this machine with other records \
                 (EVERSTEP_STATE_DIR, or another container); give this job another --name, or memory of its own with \
                 EVERSTEP_SHM_DIR",
                memory.display()
            )));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
