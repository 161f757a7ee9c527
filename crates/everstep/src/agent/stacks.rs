//! Asks this node's workers for their stacks. `worker.py` registers Python's `faulthandler` for a
//! signal; its answer needs neither the interpreter nor its lock. A stopped process does not
//! answer.

use super::{Driver, Input};
use everstep_checkpoint::step_board::Word;
use everstep_core::stacks::{Stack, main_thread};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// `SIGRTMIN` + 6 in glibc.
const SIGNAL: i32 = 40;
/// How long the workers get to write their answers.
const ANSWER: Duration = Duration::from_millis(100);

/// Returns what was written after the first `from` bytes.
fn written(path: &Path, from: u64) -> Option<String> {
    let mut file = File::open(path).ok()?;
    file.seek(SeekFrom::Start(from)).ok()?;
    let mut bytes = Vec::new();
    file.take(1 << 20).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns whether a process has a handler for the signal. Without one it would die of it: the
/// process that trains may have replaced itself with another program (`exec`), or may not be there
/// yet.
fn catches(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (SIGNAL - 1) & 1 == 1)
}

impl Driver {
    /// Asks all workers. Their answers go to the coordinator a moment later.
    pub(super) fn ask_for_stacks(&self) {
        let Some(crew) = &self.crew else { return };
        let generation = crew.generation;
        let mut asked: BTreeMap<u32, (PathBuf, u64)> = BTreeMap::new();
        for (local, worker) in crew.workers.iter().filter(|(_, w)| w.pid != 0 && w.board.get(Word::Stacks) == 1) {
            let path = self.template.streams.stacks(crew.restarts, *local);
            let size = std::fs::metadata(&path).map_or(0, |m| m.len());
            // The word is set by the process that trains. A launcher in front of it would die of
            // the signal.
            let trains = (worker.board.worker_lives() == Some(true)).then(|| worker.board.worker());
            let pid =
                trains.filter(|pid| catches(*pid)).and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
            // SAFETY: a real-time signal that neither libc nor this process gives a meaning to.
            let signal = unsafe { Signal::from_raw_unchecked(SIGNAL) };
            if pid.is_some_and(|pid| kill_process(pid, signal).is_ok()) {
                asked.insert(crew.slot.first_rank.0 + local, (path, size));
            }
        }
        let silent = crew.slot.ranks().map(|rank| (rank, Stack::new()));
        let mut stacks: BTreeMap<u32, Stack> = silent.collect();
        let inbox = self.inbox.clone();
        tokio::spawn(async move {
            tokio::time::sleep(ANSWER).await;
            for (rank, (path, from)) in asked {
                stacks.insert(rank, written(&path, from).map_or(Stack::new(), |text| main_thread(&text)));
            }
            let _ = inbox.send(Input::Stacks(generation, stacks));
        });
    }
}
