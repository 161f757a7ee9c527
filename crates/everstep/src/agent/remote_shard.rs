//! A shard that is not here, or not whole: copies on other nodes, the code over several of them,
//! durable storage.

use super::pace::STREAMS;
use super::replicas::{Replicas, SLOTS};
use super::slot_files;
use everstep_checkpoint::arena::{Pin, Repair, Slot, State, slot_bytes};
use everstep_checkpoint::erasure::rebuild;
use everstep_checkpoint::format::digest::CHUNK_BYTES;
use everstep_checkpoint::persist::{path_of, read_manifest};
use everstep_checkpoint::replicate::protocol::{Peer, Want};
use everstep_checkpoint::replicate::pull;
use everstep_checkpoint::restore::Shard;
use everstep_core::message::{Holding, Rebuild, Source, StripeLeft};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often to look whether those who read a damaged slot are done.
const REPAIR_POLL: Duration = Duration::from_millis(10);

/// Where else a rank's shard is.
#[derive(Clone, Debug, Default)]
pub struct RemoteShard {
    /// Copies of it: what, and who holds one.
    copies: Option<(Want, Vec<Peer>)>,
    /// How to compute it.
    rebuild: Option<rebuild::Task>,
}

/// The slots of a worker that waits for a shard.
#[derive(Clone, Debug)]
pub struct WaitingSlots {
    pub directories: Vec<PathBuf>,
    pub local: u32,
    /// Held by whoever writes one of them for the worker, also by one of an earlier generation that
    /// has not noticed its end.
    pub filling: Arc<Mutex<()>>,
    /// The worker's generation is over: it does not wait any more, and the next one will write
    /// these slots.
    pub over: Arc<AtomicBool>,
}

impl WaitingSlots {
    /// Fills one of at least `need` bytes that is free for this step, alone.
    fn fill(
        &self,
        need: u64,
        step: u64,
        write: impl FnOnce(&Arc<Slot>) -> io::Result<()>,
    ) -> io::Result<(PathBuf, Arc<Slot>)> {
        let _alone = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        if self.over.load(Ordering::Acquire) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let (path, slot) = slot_files::free_slot(&self.directories, self.local, need, SLOTS, step)?;
        let slot = Arc::new(slot);
        write(&slot)?;
        Ok((path, slot))
    }
}

fn want(of: &Holding) -> Want {
    Want {
        rank: u64::from(of.rank.0),
        world_size: u64::from(of.world_size),
        generation: of.generation.0,
        step: of.step.0,
    }
}

impl Replicas {
    /// Where else a shard is, as the coordinator says.
    pub fn remote_shard(&self, source: &Source) -> RemoteShard {
        let peers = |all: &[Option<String>]| all.iter().map(|a| a.as_deref().map(|a| self.peer(a))).collect();
        let stripe = |left: &StripeLeft| rebuild::Sources {
            stripe: left.number,
            members: left.members.clone(),
            data: peers(&left.data),
            parity: peers(&left.parity),
        };
        let task = |r: &Rebuild| rebuild::Task { want: want(&r.of), stripes: r.stripes.iter().map(stripe).collect() };
        let copies = source.copies.as_ref();
        RemoteShard {
            copies: copies.map(|c| (want(&c.of), c.holders.iter().map(|h| self.peer(h)).collect())),
            rebuild: source.rebuild.as_ref().map(task),
        }
    }
}

impl RemoteShard {
    /// Brings the shard into a free slot of a worker.
    ///
    /// # Errors
    /// Those of the network and of memory; `InvalidData` when too little is good; `Interrupted`
    /// when the generation is over.
    pub fn fetch(&self, into: &WaitingSlots, persist: Option<Pin>) -> io::Result<PathBuf> {
        let copied = self.copies.as_ref().map(|(want, peers)| copy(into, *want, peers));
        let (path, slot) = match (copied, &self.rebuild) {
            (Some(Ok(found)), _) => found,
            (_, Some(task)) => computed(into, task)?,
            (Some(Err(e)), None) => return Err(e),
            (None, None) => return Err(io::ErrorKind::NotFound.into()),
        };
        let _ = slot.pin(Pin::Replicate);
        let _ = persist.is_some_and(|p| slot.pin(p));
        Ok(path)
    }

    /// Makes damaged chunks of a slot good again; true when all are. Waits for those who read the
    /// slot in place, until the generation is over.
    pub fn heal(&self, path: &Path, durable: Option<&Path>, mut chunks: Vec<usize>, over: &AtomicBool) -> bool {
        let Ok(slot) = Slot::open(path) else { return false };
        let Some(slot) = repair(&slot, over) else { return false };
        let Some(label) = slot.label() else { return false };
        let is = |w: &Want| w.is(&label);
        for (want, peer) in
            self.copies.iter().filter(|(w, _)| is(w)).flat_map(|(w, peers)| peers.iter().map(move |p| (*w, p)))
        {
            if let Ok(healed) = pull::heal(&slot, peer, want, &chunks) {
                chunks.retain(|c| !healed.contains(c));
            }
        }
        if let Some(task) = self.rebuild.as_ref().filter(|t| is(&t.want) && !chunks.is_empty())
            && let Ok(healed) = task.heal(&slot, &chunks, over)
        {
            chunks.retain(|c| !healed.contains(c));
        }
        if let Some(directory) = durable.filter(|_| !chunks.is_empty())
            && let Ok(Some(checkpoint)) = path_of(directory, label.step)
        {
            heal_from_file(&slot, &checkpoint, label.rank, &mut chunks);
        }
        chunks.is_empty()
    }
}

/// Begins to repair a slot, as soon as nobody reads it in place. `None` if it is not sealed, or if
/// the generation is over before that.
fn repair<'a>(slot: &'a Slot, over: &AtomicBool) -> Option<Repair<'a>> {
    while slot.state() == State::Sealed && !over.load(Ordering::Acquire) {
        match slot.repair() {
            // Somebody is writing it to durable storage, most likely.
            None => std::thread::sleep(REPAIR_POLL),
            begun => return begun,
        }
    }
    None
}

/// A copy that other nodes hold.
fn copy(into: &WaitingSlots, want: Want, peers: &[Peer]) -> io::Result<(PathBuf, Arc<Slot>)> {
    let mut trouble = io::Error::from(io::ErrorKind::NotFound);
    let mut found = Vec::new();
    for peer in peers {
        match pull::find(peer, want) {
            Ok(f) => found.push((peer, f)),
            Err(e) => trouble = e,
        }
    }
    let Some((_, first)) = found.first() else { return Err(trouble) };
    let need = slot_bytes(first.region, first.json.len() as u64 + 4096);
    let streams = if found.len() == 1 { STREAMS } else { 1 };
    // SAFETY: the worker waits for this shard and does not write its slots, and the next
    // generation's does not before this has ended. Within the agent only one writes them at a time.
    into.fill(need, want.step, |slot| unsafe { pull::fill(slot, found, want, streams, &into.over) })
}

/// The shard as several other nodes' memory says that it was.
fn computed(into: &WaitingSlots, task: &rebuild::Task) -> io::Result<(PathBuf, Arc<Slot>)> {
    let outline = rebuild::outline(task)?;
    let need = slot_bytes(outline.region, outline.json.len() as u64 + 4096);
    // SAFETY: as for a copy.
    into.fill(need, task.want.step, |slot| unsafe { task.fill(slot, &outline, &into.over) })
}

/// The same step on durable storage, if its bytes are the same.
fn heal_from_file(slot: &Repair<'_>, checkpoint: &Path, rank: u64, chunks: &mut Vec<usize>) {
    let entry = read_manifest(checkpoint).ok().and_then(|m| m.shards.into_iter().find(|s| u64::from(s.rank.0) == rank));
    let shard = entry.and_then(|e| Shard::from_file(checkpoint, &e).ok());
    let (Some(shard), Ok((_, index))) = (shard, slot.inspect()) else { return };
    if shard.index().tensors() != index.tensors() {
        return;
    }
    chunks.retain(|chunk| {
        let expected = index.crcs().get(*chunk);
        if expected.is_none() || shard.index().crcs().get(*chunk) != expected {
            return true;
        }
        let (from, bytes) = ((*chunk * CHUNK_BYTES) as u64, index.bytes());
        let good = shard.fetch(from, (CHUNK_BYTES as u64).min(bytes - from)).ok();
        let written = good.map(|bytes| slot.store(from as usize, &bytes));
        !matches!(written, Some(Ok(())))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(node: &Path, filling: &Arc<Mutex<()>>) -> WaitingSlots {
        WaitingSlots { directories: vec![node.into()], local: 0, filling: filling.clone(), over: Arc::default() }
    }

    #[test]
    fn a_slot_is_filled_after_what_was_fetched_for_an_earlier_generation() {
        let node = tempfile::tempdir().expect("a directory");
        let filling = Arc::default();
        let (old, new) = (waiting(node.path(), &filling), waiting(node.path(), &filling));
        let still_written = AtomicBool::new(true);
        let bytes = slot_bytes(4096, 4096);
        std::thread::scope(|scope| {
            let old = old.fill(bytes, 7, |_| {
                scope.spawn(|| {
                    let next = |_: &Arc<Slot>| {
                        assert!(!still_written.load(Ordering::Acquire), "two fill the slots of one worker");
                        Ok(())
                    };
                    new.fill(bytes, 8, next).expect("there is room");
                });
                // The other thread has every chance to begin too early.
                std::thread::sleep(Duration::from_millis(50));
                still_written.store(false, Ordering::Release);
                Ok(())
            });
            old.expect("there is room");
        });
    }

    #[test]
    fn nothing_is_filled_for_a_generation_that_is_over() {
        let node = tempfile::tempdir().expect("a directory");
        let slots = waiting(node.path(), &Arc::default());
        slots.over.store(true, Ordering::Release);
        let filled = slots.fill(slot_bytes(4096, 4096), 7, |_| panic!("the next generation writes this slot"));
        assert_eq!(filled.expect_err("nobody waits for it").kind(), io::ErrorKind::Interrupted);
    }
}
