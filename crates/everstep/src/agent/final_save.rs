//! What an agent does last when its job ends before it is done: it persists the newest step that
//! all nodes hold in memory. The next attempt may run on other machines, which have no access to
//! this memory.
//!
//! Each agent writes its shards, with a note for each; the agent that finds the notes of all ranks
//! publishes the checkpoint. Which step that is, [`FinalStep`] chooses.

use super::crew::Crew;
use super::input::Input;
use super::own_slots::Own;
use super::slot_files::{self, Destination, ShardError};
use crate::slow_storage;
use everstep_checkpoint::arena::{Label, Pin, Slot};
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::persist;
use everstep_core::agent::final_step::{FinalStep, HeldStep};
use everstep_core::id::{Generation, Rank, Step};
use everstep_core::message::ShardFile;
use everstep_core::stacks::ranges;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// How long an agent that has written its shards waits for the others to write theirs.
const OTHERS: Duration = Duration::from_secs(10);
/// When it first looks whether they have. Each wait is twice as long as the one before, because all
/// agents read the directory, to which one of them is still writing.
const FIRST_LOOK: Duration = Duration::from_millis(250);

/// How writing the last step ended.
#[derive(Debug, PartialEq, Eq)]
enum Written {
    /// This agent has published it.
    Here,
    /// Another agent has, or there is nothing to write.
    Elsewhere,
    /// Nobody has published it so far.
    Incomplete {
        /// Ranks whose shards are not there.
        missing: Vec<u32>,
    },
}

/// Explains why a step is not published.
fn incomplete(step: Step, missing: &[u32], directory: &Path) -> String {
    let ranks = format!("rank{} {}", if missing.len() == 1 { "" } else { "s" }, ranges(missing));
    let directory = directory.display();
    let waited = OTHERS.as_secs();
    match missing {
        [] => format!(
            "step {step} is written to {directory}, but not published after {waited} s; the console of the node that \
             wrote the last shard shows why"
        ),
        _ => format!(
            "step {step} is not published: this node has written its shards to {directory}, but after {waited} s those of {ranks} are missing; if no other node writes them, training resumes from an earlier checkpoint"
        ),
    }
}

/// The last step, and where it belongs.
#[derive(Debug, Default)]
pub struct FinalSave {
    step: FinalStep,
    /// Where the workers' shards belong, by local rank.
    destinations: BTreeMap<u32, Destination>,
}

impl FinalSave {
    /// See [`FinalStep::begin`].
    pub fn begin(&mut self, crew: &Crew) {
        self.step.begin(crew.generation, crew.world_size, crew.restarts);
    }

    /// Records where a worker's shards belong.
    pub fn belongs(&mut self, local_rank: u32, to: Destination) {
        if self.step.named(local_rank) {
            self.destinations.clear();
        }
        self.destinations.insert(local_rank, to);
    }

    /// See [`FinalStep::held_by_all`].
    pub fn held_by_all(&mut self, generation: Generation, step: Step) {
        self.step.held_by_all(generation, step);
    }

    /// See [`FinalStep::goes_on_from`]. `persist`: the step is in memory only.
    pub fn goes_on_from(&mut self, generation: Generation, step: Option<Step>, persist: bool, world_size: u32) {
        self.step.goes_on_from(generation, world_size, step, persist);
    }

    /// See [`FinalStep::durable`].
    pub fn durable(&mut self, step: Step) {
        self.step.durable(step);
    }

    /// Makes the last step durable, as far as this node can, and reports the result. A further stop
    /// signal ends the wait. Returns false if one did.
    pub async fn persist(
        self,
        own: Own,
        run: u64,
        asked_again: bool,
        inputs: &mut mpsc::UnboundedReceiver<Input>,
    ) -> bool {
        let Some(HeldStep { generation, step, .. }) = self.step.choose(|of, local| sealed(&own, run, of, local)) else {
            return true;
        };
        let Some(to) = self.destinations.values().next() else { return true };
        let directory = to.directory.clone();
        let not_waiting = || {
            crate::say!("not waiting for step {step} to be written to {}", directory.display());
            false
        };
        if asked_again {
            return not_waiting();
        }
        let (done, mut written) = oneshot::channel();
        // Not a thread of the runtime, which would wait for it at the end.
        let write = move || drop(done.send(self.write(&own, run, generation, step)));
        if let Err(e) = std::thread::Builder::new().name("everstep-save".into()).spawn(write) {
            crate::say_warning!("step {step} stays in memory only: cannot start a thread to write it: {e}");
            return true;
        }
        let mut reminder = slow_storage::reminder();
        loop {
            tokio::select! {
                result = &mut written => {
                    match result {
                        Ok(Ok(Written::Here)) => crate::say!("step {step} was in memory only and is now in {}", directory.display()),
                        Ok(Ok(Written::Incomplete { missing })) => {
                            crate::say_warning!("{}", incomplete(step, &missing, &directory));
                        }
                        Ok(Ok(Written::Elsewhere)) | Err(_) => {}
                        Ok(Err(why)) => crate::say_warning!("{why}"),
                    }
                    return true;
                }
                input = inputs.recv() => if let Some(Input::Signal(2 | 3 | 15)) = input {
                    return not_waiting();
                },
                _ = reminder.tick() => crate::say!(
                    "writing step {step}, which is in memory only, to {}; Ctrl-C stops waiting for it",
                    directory.display()
                ),
            }
        }
    }

    /// Writes this node's shards. The agent that writes the last note publishes the checkpoint; the
    /// others wait for that.
    fn write(&self, own: &Own, run: u64, generation: Generation, step: Step) -> Result<Written, FinalSaveError> {
        let Some(to) = self.destinations.values().next() else { return Ok(Written::Elsewhere) };
        let mark = to.mark(generation, self.step.restarts());
        for (local, to) in &self.destinations {
            let slots = own.slots(*local);
            // A restored step keeps the generation that captured it. Of two slots with the same
            // step, the one with the earlier generation was abandoned.
            let is = |l: &Label| l.run == run && l.step == step.0 && l.generation <= generation.0;
            let of = |s: &&Arc<Slot>| s.label().filter(is).map(|l| l.generation);
            let found = slots.iter().filter(|s| of(s).is_some()).max_by_key(of).filter(|s| s.pin(Pin::Persist));
            let slot = found.ok_or(FinalSaveError::Gone { step, rank: to.rank })?;
            let shard = slot_files::write_shard(slot.path(), to, &mark, step.0);
            slot.release(Pin::Persist);
            let shard = shard?;
            persist::note(&to.directory, &mark, step.0, &shard)
                .map_err(|source| FinalSaveError::Unnoted { directory: to.directory.clone(), source })?;
        }
        match self.noted(to, &mark, step) {
            Ok(shards) => publish(to, &mark, step, &shards),
            Err(_) if others_publish(to, &mark, step) => Ok(Written::Elsewhere),
            Err(_) => Ok(Written::Incomplete { missing: self.noted(to, &mark, step).err().unwrap_or_default() }),
        }
    }

    /// Returns the shards that are noted, if they are all there, or the ranks that lack a note.
    fn noted(&self, to: &Destination, mark: &Mark, step: Step) -> Result<Vec<ShardFile>, Vec<u32>> {
        let noted = |rank| persist::noted(&to.directory, mark, step.0, rank).ok_or(rank);
        let (shards, missing): (Vec<_>, Vec<_>) = (0..self.step.world_size()).map(noted).partition(Result::is_ok);
        let missing: Vec<u32> = missing.into_iter().filter_map(Result::err).collect();
        if missing.is_empty() { Ok(shards.into_iter().flatten().collect()) } else { Err(missing) }
    }
}

/// Returns the steps of a generation that the worker with this local rank has sealed.
fn sealed(own: &Own, run: u64, generation: Generation, local_rank: u32) -> BTreeSet<Step> {
    let of_crew = |l: &Label| l.run == run && l.generation == generation.0;
    own.slots(local_rank).iter().filter_map(|s| s.label()).filter(of_crew).map(|l| Step(l.step)).collect()
}

/// Why the last step stays in memory only.
#[derive(Debug, thiserror::Error)]
enum FinalSaveError {
    #[error("step {step} of rank {rank} is not in memory any more")]
    Gone { step: Step, rank: Rank },
    #[error(transparent)]
    Shard(#[from] ShardError),
    #[error("cannot write to {}: {source}", directory.display())]
    Unnoted { directory: PathBuf, source: io::Error },
    #[error("step {step} could not be published: {source}")]
    Unpublished { step: Step, source: io::Error },
}

fn publish(to: &Destination, mark: &Mark, step: Step, shards: &[ShardFile]) -> Result<Written, FinalSaveError> {
    let published = persist::publish(&to.directory, mark, step.0, shards, to.target)
        .map(|to| super::persist_queue::say_where(&to, step))
        .and_then(|()| persist::prune(&to.directory, to.keep, mark).map(drop));
    match published {
        // Another agent found all notes at the same time and published first.
        Err(_) if is_published(to, mark, step) => Ok(Written::Elsewhere),
        other => other.map(|()| Written::Here).map_err(|source| FinalSaveError::Unpublished { step, source }),
    }
}

/// Waits until another agent has published the step. Returns false if none has in time.
fn others_publish(to: &Destination, mark: &Mark, step: Step) -> bool {
    let since = Instant::now();
    let mut pause = FIRST_LOOK;
    loop {
        std::thread::sleep(pause.min(OTHERS.saturating_sub(since.elapsed())));
        let published = is_published(to, mark, step);
        if published || since.elapsed() >= OTHERS {
            return published;
        }
        pause *= 2;
    }
}

/// Returns whether an agent has published what this generation wrote of a step.
fn is_published(to: &Destination, mark: &Mark, step: Step) -> bool {
    let same = |writer: Mark| writer.run == mark.run && writer.turn() == mark.turn();
    let found = persist::list(&to.directory).unwrap_or_default();
    found.into_iter().any(|(s, _, m)| s == step.0 && m.is_ok_and(|m| m.writer.is_some_and(same)))
}
