//! What an agent does last when its job ends before it is done: it persists the newest step that
//! all nodes hold in memory. The next attempt may run on other machines, which have no access to
//! this memory.
//!
//! There is no coordinator to ask any more. Each agent writes its shards, with a note for each; the
//! agent that finds the notes of all ranks publishes the checkpoint.

use super::input::Input;
use super::replicas::Own;
use super::storage::{self, Destination};
use super::workers::Crew;
use everstep_checkpoint::arena::{Label, Pin, Slot};
use everstep_checkpoint::persist;
use everstep_core::id::{Generation, Step};
use everstep_core::message::ShardFile;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// The state of the latest crew.
#[derive(Debug, Default)]
pub struct Last {
    world_size: u32,
    restarts: u32,
    /// Where its workers' shards belong, by local rank.
    destinations: BTreeMap<u32, Destination>,
    /// World size and restarts of a crew that has not named its destinations yet.
    begun: Option<(u32, u32)>,
    /// The newest step that all nodes hold, its generation, and the world size.
    held: Option<(Generation, Step, u32)>,
    /// The newest step on durable storage.
    pub durable: Option<Step>,
}

impl Last {
    /// Records that a crew starts. Until it names its destinations, the crew before it counts as
    /// the last.
    pub fn begin(&mut self, crew: &Crew) {
        self.begun = Some((crew.world_size, crew.restarts));
    }

    /// Records where a worker's shards belong.
    pub fn belongs(&mut self, local_rank: u32, to: Destination) {
        if let Some(begun) = self.begun.take() {
            (self.world_size, self.restarts) = begun;
            self.destinations.clear();
        }
        self.destinations.insert(local_rank, to);
    }

    /// Records that all nodes hold a step.
    pub fn holds(&mut self, generation: Generation, step: Step, world_size: u32) {
        self.held = Some((generation, step, world_size));
    }

    /// Records that all ranks resume from a step, or from the beginning. Anything newer is
    /// obsolete.
    pub fn goes_on_from(&mut self, generation: Generation, step: Option<Step>, world_size: u32) {
        self.held = step.map(|step| (generation, step, world_size));
    }

    /// Makes the last step durable, as far as this node can, and reports the result. A further stop
    /// signal ends the wait.
    pub async fn persist(self, (own, run): (Own, u64), asked_again: bool, inputs: &mut mpsc::UnboundedReceiver<Input>) {
        let Some((generation, step, size)) = self.held.filter(|(_, s, _)| self.durable.is_none_or(|d| *s > d)) else {
            return;
        };
        let Some(to) = self.destinations.values().next().filter(|_| size == self.world_size) else { return };
        let directory = to.directory.clone();
        let not_waiting = || crate::say!("not waiting for step {step} to be written to {}", directory.display());
        if asked_again {
            return not_waiting();
        }
        let (done, mut written) = oneshot::channel();
        // Not a thread of the runtime, which would wait for it at the end.
        let write = move || drop(done.send(self.write((&own, run), generation, step)));
        if let Err(e) = std::thread::Builder::new().name("everstep-last".into()).spawn(write) {
            return crate::say!("step {step} stays in memory only, as no thread could be started: {e}");
        }
        loop {
            tokio::select! {
                result = &mut written => {
                    match result {
                        Ok(Ok(true)) => crate::say!("step {step} was in memory only and is now in {}", directory.display()),
                        Ok(Ok(false)) | Err(_) => {}
                        Ok(Err(why)) => crate::say!("{why}"),
                    }
                    return;
                }
                input = inputs.recv() => if let Some(Input::Signal(2 | 3 | 15)) = input {
                    return not_waiting();
                },
            }
        }
    }

    /// Writes this node's shards. Returns whether this agent published the checkpoint.
    fn write(&self, (own, run): (&Own, u64), generation: Generation, step: Step) -> Result<bool, String> {
        let Some(to) = self.destinations.values().next() else { return Ok(false) };
        let mark = to.mark(generation, self.restarts);
        for (local, to) in &self.destinations {
            let slots = own.slots(*local);
            // A restored step keeps the generation that captured it. Of two slots with the same
            // step, the one with the earlier generation was abandoned.
            let is = |l: &Label| l.run == run && l.step == step.0 && l.generation <= generation.0;
            let of = |s: &&Arc<Slot>| s.label().filter(is).map(|l| l.generation);
            let found = slots.iter().filter(|s| of(s).is_some()).max_by_key(of).filter(|s| s.pin(Pin::Persist));
            let slot = found.ok_or_else(|| format!("step {step} of rank {} is not in memory any more", to.rank))?;
            let shard = storage::write_shard(slot.path(), to, &mark, step.0);
            slot.release(Pin::Persist);
            let shard = shard?;
            persist::note(&to.directory, &mark, step.0, &shard)
                .map_err(|e| format!("cannot write to {}: {e}", to.directory.display()))?;
        }
        let shards: Vec<ShardFile> =
            (0..self.world_size).filter_map(|rank| persist::noted(&to.directory, &mark, step.0, rank)).collect();
        if shards.len() < self.world_size as usize {
            return Ok(false);
        }
        let published = persist::publish(&to.directory, &mark, step.0, &shards, to.target)
            .map(|to| super::durable::say_where(&to, step))
            .and_then(|()| persist::prune(&to.directory, to.keep, &mark).map(drop));
        match published {
            // Another agent found all notes at the same time and published first.
            Err(_) if persist::path_of(&to.directory, step.0).is_ok_and(|p| p.is_some()) => Ok(false),
            other => other.map(|()| true).map_err(|e| format!("step {step} could not be published: {e}")),
        }
    }
}
