//! Injects a fault on this node at a person's request (`everstep inject`): the real fault where the
//! agent can cause it, otherwise what the machine would show of it.

use super::{Driver, Input};
use everstep_core::agent::event::Event;
use everstep_core::injection::{Injected, Injection};
use everstep_wire::envelope::ToCoordinator;
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Period of a process that is made to run only part of the time.
const TURN: Duration = Duration::from_millis(20);

/// The stream to the coordinator during an injected network split. Nothing is sent or read, but the
/// stream stays open: it falls silent instead of ending.
pub type Silenced = Option<mpsc::UnboundedSender<ToCoordinator>>;

impl Driver {
    /// Returns the process id of a rank on this node.
    fn pid_of(&self, rank: u32) -> Option<u32> {
        let crew = self.crew.as_ref()?;
        let local = rank.checked_sub(crew.slot.first_rank.0)?;
        crew.workers.get(&local).map(|w| w.pid).filter(|pid| *pid != 0)
    }

    /// Carries out an injection.
    pub(super) async fn inject(&mut self, injection: Injection) {
        let Injection { fault, rank, milliseconds } = injection;
        let lasts = Duration::from_millis(milliseconds);
        crate::say!("injecting {} into rank {rank} (everstep inject)", option(fault));
        let pid = self.pid_of(rank);
        let process = pid.and_then(|p| Pid::from_raw(i32::try_from(p).ok()?));
        match (fault, process) {
            (Injected::Kill, Some(process)) => send(process, Signal::KILL),
            (Injected::Hang, Some(process)) => send(process, Signal::STOP),
            (Injected::Slow { percent }, Some(process)) => slow(process, percent, lasts),
            (Injected::Oom, Some(process)) => {
                let pid = process.as_raw_nonzero();
                self.kernel_says(&format!(
                    "Memory cgroup out of memory: Killed process {pid} (python) total-vm:0kB, anon-rss:0kB (injected)"
                ))
                .await;
                send(process, Signal::KILL);
            }
            (Injected::Xid { code }, _) => {
                let pid = pid.map_or("'<unknown>'".into(), |p| p.to_string());
                self.kernel_says(&format!("NVRM: Xid (PCI:0000:3b:00): {code}, pid={pid}, name=python, (injected)"))
                    .await;
            }
            (Injected::Netsplit, _) => {
                self.silenced = self.link.take();
                self.event(Event::Disconnected).await;
                let inbox = self.inbox.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(lasts).await;
                    let _ = inbox.send(Input::Heard);
                });
            }
            (Injected::DiskFull, _) => {
                let full = self.persist_queue.full.clone();
                full.store(true, Ordering::Relaxed);
                tokio::spawn(async move {
                    tokio::time::sleep(lasts).await;
                    full.store(false, Ordering::Relaxed);
                });
            }
            (Injected::CorruptReplica, _) => self.corrupt(),
            (_, None) => crate::say_warning!("rank {rank} has no process on this node; nothing was injected"),
        }
    }

    /// Handles `line` as if it came from the kernel's log.
    async fn kernel_says(&mut self, line: &str) {
        if let Some(sign) = self.table.sign(line) {
            self.event(Event::Signed(sign)).await;
        }
    }

    /// Flips a bit in the middle of the newest copy of another node's shard.
    fn corrupt(&self) {
        let held = self.replicas.holder.held();
        let Some(newest) = held.iter().filter(|h| h.replica).max_by_key(|h| (h.label.generation, h.label.step)) else {
            return crate::say_warning!("this node has no copy of another node's shard; nothing was injected");
        };
        let flipped = everstep_wire::private::open(&newest.path, rustix::fs::OFlags::RDWR).and_then(|file| {
            let middle = file.metadata()?.len() / 2;
            let mut byte = [0];
            file.read_exact_at(&mut byte, middle)?;
            byte[0] ^= 0x10;
            file.write_all_at(&byte, middle)
        });
        if let Err(e) = flipped {
            crate::say_warning!("cannot change {}: {e}", newest.path.display());
        }
    }
}

/// Returns the name of a fault, as `everstep inject` takes it.
fn option(fault: Injected) -> &'static str {
    match fault {
        Injected::Kill => "kill",
        Injected::Hang => "hang",
        Injected::Slow { .. } => "slow",
        Injected::Oom => "oom",
        Injected::Xid { .. } => "xid",
        Injected::Netsplit => "netsplit",
        Injected::DiskFull => "disk-full",
        Injected::CorruptReplica => "corrupt-replica",
    }
}

/// Sends a signal. A process that has just ended needs none.
fn send(process: Pid, signal: Signal) {
    let _ = kill_process(process, signal);
}

/// Alternately stops and continues a process.
fn slow(process: Pid, percent: u8, lasts: Duration) {
    let runs = TURN * u32::from(percent.clamp(1, 99)) / 100;
    let until = Instant::now() + lasts;
    let turns = move || {
        while Instant::now() < until && kill_process(process, Signal::STOP).is_ok() {
            std::thread::sleep(TURN.saturating_sub(runs));
            if kill_process(process, Signal::CONT).is_err() {
                return;
            }
            std::thread::sleep(runs);
        }
    };
    let _ = std::thread::Builder::new().name("everstep-slow".into()).spawn(turns);
}
