//! `everstep memory`: how much memory a job will need per node, and which failures its copies
//! survive.

use super::ckpt::size;
use super::{Failure, print_json};
use crate::paths;
use clap::Args;
use everstep_checkpoint::arena::slot_bytes;
use everstep_checkpoint::persist;
use everstep_core::placement::Scheme;
use everstep_core::survival::{Code, survival, survival_of_code, wasted_seconds};
use everstep_wire::output::{FIRST, MemoryNeed};
use std::path::{Path, PathBuf};

/// Slots per worker: one being written and two complete (`SLOTS` in `agent/replicas.rs`). A persist
/// may occupy one more for long.
const OWN_SLOTS: u64 = 3;
/// Slots per replica kept for another node: one complete, one in transfer.
const PEER_SLOTS: u64 = 2;
/// Slack in a slot for its tensors, and for its index (see `slots.py`).
const SLACK: u64 = 256 << 10;
const INDEX_SLACK: u64 = 64 << 10;
/// Largest accepted state of one rank, in bytes.
const STATE_BYTES_MAX: u64 = 1 << 50;
/// Resident memory of agent and guard; they share the pages of the program.
const AGENT: u64 = 10 << 20;

#[derive(Args, Clone, Debug)]
pub struct MemoryOptions {
    /// Directory of checkpoints; the size of the state is read from the newest
    directory: Option<PathBuf>,
    /// State of one rank (parameters and optimizer), such as 14G, 800M or a number of bytes
    #[arg(long, value_parser = bytes, conflicts_with = "directory")]
    state: Option<u64>,
    /// Number of workers per node
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=4096))]
    workers: u64,
    /// Number of nodes
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    nodes: u64,
    /// What other nodes keep of each step: a number of copies, or a code such as 4+2 (replicas= of
    /// CheckpointManager)
    #[arg(long, default_value = "1", value_parser = redundancy)]
    replicas: Redundancy,
    /// All ranks hold the same state (DDP), so no copies are sent
    #[arg(long)]
    replicated: bool,
    /// Nothing is written to durable storage (persist=0)
    #[arg(long)]
    no_persist: bool,
    /// Seconds per step, to estimate the time that a failure wastes
    #[arg(long)]
    step_time: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What other nodes keep of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Redundancy {
    Copies(u64),
    /// Data shards, parity shards.
    Code(u64, u64),
}

fn redundancy(text: &str) -> Result<Redundancy, String> {
    let number = |t: &str| t.parse::<u64>().ok().filter(|n| *n < 100);
    let found = match text.split_once('+') {
        None => number(text).map(Redundancy::Copies),
        Some((data, parity)) => {
            let some = |t| number(t).filter(|n| *n > 0);
            some(data).zip(some(parity)).map(|(data, parity)| Redundancy::Code(data, parity))
        }
    };
    found.ok_or_else(|| "give a number of copies, or a code such as 4+2 (any two of six nodes may be lost)".into())
}

/// Returns the bytes that a node keeps for others per slot, their composition, and the
/// probabilities of surviving 1, 2, … lost nodes.
fn kept(o: &MemoryOptions, slot: u64) -> (u64, String, Vec<(u64, f64)>) {
    let odds = |p: &dyn Fn(u64) -> f64| (1..=6.min(o.nodes)).map(|f| (f, p(f))).collect();
    match o.replicas {
        // Identical ranks amount to as many copies as there are nodes.
        _ if o.replicated => (0, "0 copies".into(), odds(&|f| survival(o.nodes, o.nodes, f, Scheme::Mixed))),
        Redundancy::Copies(n) => {
            let copies = n.min(o.nodes - 1);
            (copies * slot, format!("{copies} copies"), odds(&|f| survival(o.nodes, copies + 1, f, Scheme::Mixed)))
        }
        Redundancy::Code(data, parity) => {
            // The smallest group has the fewest shards to share its parity.
            let group = (data + parity).min(o.nodes);
            let parity = parity.min(group - 1);
            let data = group - parity;
            let bytes = slot * parity / data.max(1);
            let what = format!("{parity} parity of 1/{data}");
            (bytes, what, odds(&|f| survival_of_code(o.nodes, Code { data, parity }, f)))
        }
    }
}

const SIZE: &str = "give a size such as 14G or 800M, or a number of bytes";

fn bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()));
    let shift = match unit.trim_end_matches("iB").trim_end_matches('B').to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(SIZE.into()),
    };
    let value: f64 = number.parse().map_err(|_| SIZE.to_owned())?;
    let bytes = value * (1u64 << shift) as f64;
    // Sums over all workers of a node must not overflow.
    if bytes > STATE_BYTES_MAX as f64 {
        return Err("a rank's state cannot be larger than 1024T".into());
    }
    Ok(bytes as u64)
}

/// Returns the largest shard and the number of ranks of the newest checkpoint.
fn measured(directory: &Path) -> Result<(u64, u64), Failure> {
    let newest = persist::list(directory).ok().and_then(|all| all.into_iter().find_map(|(_, _, m)| m.ok()));
    let newest = newest.ok_or_else(|| {
        Failure::usage(format!("{} holds no checkpoint; give --state SIZE instead", directory.display()))
    })?;
    let largest = newest.shards.iter().map(|s| s.bytes).max().unwrap_or(0);
    Ok((largest, u64::from(newest.world_size)))
}

/// Prints what is needed. The exit code is 1 if it does not fit.
pub fn run(o: &MemoryOptions) -> Result<i32, Failure> {
    let state = match (&o.directory, o.state) {
        (Some(directory), _) => measured(directory)?.0,
        (None, Some(state)) => state,
        (None, None) => return Err(Failure::usage("give --state SIZE (of one rank) or a directory of checkpoints")),
    };
    if o.nodes == 0 || o.workers == 0 {
        return Err(Failure::usage("--nodes and --workers must be at least 1"));
    }
    let chunks = state.div_ceil(1 << 20);
    let slot = slot_bytes(state + SLACK, 2 * chunks * 21 + INDEX_SLACK);
    let (kept, what, odds) = kept(o, slot);
    let slots = OWN_SLOTS + u64::from(!o.no_persist);
    let own = o.workers * slots * slot;
    let peers = o.workers * PEER_SLOTS * kept;
    let need = own + peers + AGENT;
    let root = paths::memory();
    let root = root.parent().unwrap_or(Path::new("/dev/shm"));
    let free = rustix::fs::statvfs(root).map_or(0, |s| s.f_bavail * s.f_frsize);
    let wasted = o.step_time.map(|t| wasted_seconds(t, t, t, 0.0));
    if o.json {
        print_json(&MemoryNeed {
            version: FIRST,
            slot_bytes: slot,
            own_bytes: own,
            replica_bytes: peers,
            need_bytes: need,
            free_bytes: free,
            fits: need <= free,
            survival: odds,
            wasted_seconds: wasted,
        })?;
        return Ok(i32::from(need > free));
    }
    println!("per node, in shared memory ({}):", root.display());
    println!("  own steps      {:>10}   {} workers × {slots} slots of {}", size(own), o.workers, size(slot));
    println!("  others' steps  {:>10}   {} workers × {what} × {PEER_SLOTS} slots", size(peers), o.workers);
    println!("  agent          {:>10}", size(AGENT));
    println!("  needed         {:>10}   free here {}", size(need), size(free));
    println!("probability that every step survives the loss of this many of {} nodes at once:", o.nodes);
    for (lost, p) in &odds {
        println!("  {lost}  {p:.4}");
    }
    if let Some(wasted) = wasted {
        println!(
            "a failure from which memory can be restored wastes {wasted:.1} s on average (the step in progress and \
             half an interval)"
        );
    }
    if need > free {
        eprintln!(
            "it does not fit: use fewer replicas or a code (--replicas 4+2), or set EVERSTEP_SHM_DIR to a larger tmpfs (mount -t tmpfs -o size=…,huge=always)"
        );
    }
    Ok(i32::from(need > free))
}

#[cfg(test)]
mod tests {
    use super::{Redundancy, bytes, redundancy};

    #[test]
    fn copies_and_codes() {
        assert_eq!(redundancy("2"), Ok(Redundancy::Copies(2)));
        assert_eq!(redundancy("4+2"), Ok(Redundancy::Code(4, 2)));
        assert!(["4+", "+2", "0+2", "4+0", "x", "-1", "4+2+1"].iter().all(|t| redundancy(t).is_err()));
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(bytes("800M"), Ok(800 << 20));
        assert_eq!(bytes("1.5GiB"), Ok(3 << 29));
        assert_eq!(bytes("77"), Ok(77));
        assert!(bytes("lots").is_err());
    }
}
