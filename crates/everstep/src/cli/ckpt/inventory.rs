//! Finds checkpoints: in durable directories, in this machine's slots, and in the slots of a
//! running job's other nodes.

use crate::cli::{Failure, runtime, status};
use crate::coordinator::EndpointFile;
use crate::paths;
use everstep_checkpoint::arena::job_hash;
use everstep_checkpoint::objects::is_url;
use everstep_checkpoint::persist;
use everstep_checkpoint::replicate::protocol::{Answer, Ask, Peer, SlotRow, Stream};
use everstep_checkpoint::replicate::replica_holder::rows;
use everstep_core::message::Purpose;
use everstep_wire::output::{CheckpointRow, ForeignEntry};
use everstep_wire::raw::Raw;
use everstep_wire::token::Token;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Prefix of the state of a checkpoint that cannot be read.
pub const UNREADABLE: &str = "unreadable: ";

/// The checkpoints found, newest step first.
#[derive(Debug, Default)]
pub struct Inventory {
    pub rows: Vec<CheckpointRow>,
    pub foreign: Vec<ForeignEntry>,
    directories: BTreeSet<PathBuf>,
}

impl Inventory {
    /// Finds the checkpoints of a directory, of a job, or of all jobs with anything on this
    /// machine.
    ///
    /// # Errors
    /// Fails if `target` is neither a directory nor a job that ran here.
    pub fn of(target: Option<&str>) -> Result<Self, Failure> {
        let mut found = Inventory::default();
        match target {
            Some(path) if Path::new(path).is_dir() || is_url(Path::new(path)) => found.directory(Path::new(path))?,
            Some(job) => {
                let known = paths::job(job).is_dir() || paths::memory().join(job).is_dir();
                if !known && let Some(what) = super::instead_of_directory(Path::new(job)) {
                    return Err(Failure::usage(format!("{job} {what}; give the directory that holds step-N")));
                }
                if paths::check_name("the job", job).is_err() || !known {
                    return Err(Failure::usage(format!("{job} is neither a directory nor a job that ran here")));
                }
                found.job(job)?;
            }
            None => {
                for name in names() {
                    found.job(&name)?;
                }
            }
        }
        found.rows.sort_by(|a, b| b.step.cmp(&a.step).then_with(|| (a.tier, &a.holder).cmp(&(b.tier, &b.holder))));
        Ok(found)
    }

    /// Returns the directories of durable checkpoints among those found.
    pub fn directories(&self) -> impl Iterator<Item = &Path> {
        self.directories.iter().map(PathBuf::as_path)
    }

    fn job(&mut self, job: &str) -> Result<(), Failure> {
        let running = runtime()?.block_on(status::jobs(Some(job)));
        let mut here: Vec<String> = Vec::new();
        for node in std::fs::read_dir(paths::memory().join(job)).into_iter().flatten().flatten() {
            let node = node.file_name().to_string_lossy().into_owned();
            let directories = vec![paths::node_memory(job, &node), paths::node_spill(job, &node)];
            self.slots(job, &node, rows(&directories, None), true);
            here.push(node);
        }
        for (of, node) in running.iter().flat_map(|of| of.status.nodes.iter().map(move |node| (of, node))) {
            let Some(address) = &node.replicas else { continue };
            if !here.contains(&node.node.0) {
                // A node that does not answer has nothing to list at the moment.
                let slots = ask(job, address, of.store.as_ref()).unwrap_or_default();
                self.slots(job, &node.node.0, slots, false);
            }
        }
        match paths::checkpoints(job) {
            // If the object store is unreachable, the checkpoints in memory are still listed.
            Some(url) if is_url(&url) => {
                if let Err(e) = self.directory(&url) {
                    crate::say_warning!("{}", e.why);
                }
            }
            Some(directory) if directory.is_dir() => self.directory(&directory)?,
            _ => {}
        }
        Ok(())
    }

    fn directory(&mut self, directory: &Path) -> Result<(), Failure> {
        // Several jobs may have saved into one directory.
        if !self.directories.insert(directory.canonicalize().unwrap_or_else(|_| directory.into())) {
            return Ok(());
        }
        let listed = persist::reach(directory)
            .and_then(|()| persist::list(directory))
            .map_err(|e| Failure::config(format!("cannot read {}: {e}", directory.display())))?;
        let trouble = |e| Failure::config(format!("cannot read {}: {e}", directory.display()));
        let foreign = persist::foreign(directory).map_err(trouble)?;
        self.foreign
            .extend(foreign.into_iter().map(|f| ForeignEntry { path: directory.join(f.name).into(), why: f.why }));
        let line: BTreeSet<PathBuf> =
            persist::line(directory).map_err(trouble)?.into_iter().map(|(_, p, _)| p).collect();
        for (step, path, manifest) in listed {
            let holder = directory.display().to_string();
            let row = match manifest {
                Ok(m) => {
                    let kept = match m.purpose() {
                        Purpose::Recovery => "durable",
                        Purpose::Epoch => "durable, end of an epoch",
                        Purpose::User => "durable, saved by the user",
                    };
                    let ranks = format!("0-{} of {}", m.world_size.saturating_sub(1), m.world_size);
                    let (bytes, saved_at) = (m.bytes(), m.saved_at);
                    let other = if line.contains(&path) { "" } else { ", of another branch" };
                    let (state, paths) = (format!("{kept}{other}"), vec![path.into()]);
                    CheckpointRow { step, tier: "disk", job: None, holder, ranks, bytes, saved_at, state, paths }
                }
                Err(why) => CheckpointRow {
                    step,
                    tier: "disk",
                    job: None,
                    holder,
                    ranks: "-".into(),
                    bytes: 0,
                    saved_at: 0,
                    state: format!("{UNREADABLE}{why}"),
                    paths: vec![path.into()],
                },
            };
            self.rows.push(row);
        }
        Ok(())
    }

    fn slots(&mut self, job: &str, node: &str, slots: Vec<SlotRow>, here: bool) {
        let mut groups: BTreeMap<(u64, u64, &str), Vec<SlotRow>> = BTreeMap::new();
        for slot in slots {
            let tier = match (slot.parity, slot.replica) {
                (true, _) => "parity",
                (false, true) => "peer",
                (false, false) => "local",
            };
            groups.entry((slot.label.step, slot.label.generation, tier)).or_default().push(slot);
        }
        for ((step, _, tier), group) in groups {
            let world = group.iter().map(|s| s.label.world_size).max().unwrap_or(0);
            let ranks: Vec<u64> = group.iter().map(|s| s.label.rank).collect();
            let copies = group.iter().map(|s| s.replicas).min().unwrap_or(0);
            let mut state = "in memory".to_owned();
            if copies > 0 && tier == "local" {
                state = format!("replicated ×{copies}");
            }
            if group.iter().all(|s| s.durable) {
                state += ", durable";
            }
            self.rows.push(CheckpointRow {
                step,
                tier,
                job: Some(job.to_owned()),
                holder: format!("node {node}"),
                // Parity is counted in stripes, not ranks.
                ranks: if tier == "parity" {
                    format!("{} stripes", group.len())
                } else {
                    format!("{} of {world}", runs(ranks))
                },
                bytes: group.iter().map(|s| s.bytes).sum(),
                saved_at: group.iter().map(|s| s.sealed_at).max().unwrap_or(0),
                state,
                paths: if here { group.iter().map(|s| Raw::from(&s.path)).collect() } else { Vec::new() },
            });
        }
    }
}

/// Returns the names of the jobs with anything on this machine.
fn names() -> Vec<String> {
    let below = |p: PathBuf| std::fs::read_dir(p).into_iter().flatten().flatten().filter(|e| e.path().is_dir());
    let all = below(paths::state().join("jobs")).chain(below(paths::memory()));
    let mut names: Vec<String> = all.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names.dedup();
    names
}

fn ask(job: &str, address: &str, store: &Path) -> Option<Vec<SlotRow>> {
    let token = Token::read(EndpointFile::read(store)?.token_file.as_ref()).ok()?;
    let peer = Peer { address: address.into(), token: token.reveal().into(), job: job_hash(job) };
    match Stream::open(&peer).ok()?.ask(&Ask::List).ok()? {
        Answer::Slots(rows) => Some(rows),
        _ => None,
    }
}

/// Formats ranks as in `0-3,6`.
fn runs(mut ranks: Vec<u64>) -> String {
    ranks.sort_unstable();
    ranks.dedup();
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let text = |(a, b): &(u64, u64)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.iter().map(text).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::runs;

    #[test]
    fn ranks_are_written_as_runs() {
        assert_eq!(runs(vec![3, 0, 1, 7, 1]), "0-1,3,7");
        assert_eq!(runs(vec![]), "");
    }
}
