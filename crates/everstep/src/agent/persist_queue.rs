//! This node's shards on their way to durable storage: which are being written, which steps are
//! being published, and which requests wait for them.

use super::input::Input;
use super::slot_files::{self, Destination};
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::persist::{self, Target};
use everstep_checkpoint::retain::Policy;
use everstep_core::id::{Generation, Step};
use everstep_core::message::ShardFile;
use everstep_wire::raw::{from_text, to_text};
use everstep_wire::worker::Reply;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{mpsc, oneshot};

/// Number of failed steps that are remembered.
const FAILED_MAX: usize = 16;

/// Reports a step that could not be published as `step-N`.
pub fn say_where(to: &Path, step: Step) {
    if let Some(name) = to.file_name().filter(|n| **n != *format!("step-{step}")) {
        crate::say!(
            "step {step} is saved as {}, because step-{step} already exists and must not be replaced; everstep ckpt ls shows what it is",
            name.display()
        );
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// A queue whose work runs in order, one item at a time. Queued work is done even after the queue
/// is dropped. While the queue is empty it holds no thread: where the system grants only one, all
/// other work of the agent needs it.
#[derive(Clone, Default)]
struct Line(Arc<Mutex<Queue>>);

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    /// There is a [`Turn`], which will do what is added.
    busy: bool,
}

/// Does the queue's work when dropped. A runtime that ends before it found a thread drops what it
/// was given, and the work is done all the same.
struct Turn(Line);

impl Drop for Turn {
    fn drop(&mut self) {
        while let Some(work) = self.0.next() {
            work();
        }
    }
}

impl Line {
    fn give(&self, work: impl FnOnce() + Send + 'static) {
        let mut queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        queue.work.push_back(Box::new(work));
        if !std::mem::replace(&mut queue.busy, true) {
            drop(queue);
            let turn = Turn(self.clone());
            tokio::task::spawn_blocking(move || drop(turn));
        }
    }

    fn next(&self) -> Option<Work> {
        let mut queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        queue.busy = !queue.work.is_empty();
        queue.work.pop_front()
    }
}

/// A pinned slot to write as a shard.
pub struct PinnedShard {
    pub generation: Generation,
    /// See [`everstep_core::message::ShardWritten`].
    pub captured: Generation,
    pub mark: Mark,
    pub local_rank: u32,
    pub step: u64,
    pub slot: PathBuf,
}

/// A step whose shards are all written.
pub struct WrittenStep {
    pub generation: Generation,
    /// See [`everstep_core::message::Publish`].
    pub captured: Generation,
    pub step: Step,
    pub mark: Mark,
    /// The user's directory.
    pub directory: String,
    pub shards: Vec<ShardFile>,
    pub target: Target,
    /// Which published checkpoints to keep.
    pub keep: Policy,
}

/// Why a step is not published.
#[derive(Debug, thiserror::Error)]
#[error("checkpoint of step {step} could not be published in {}: {source}", directory.display())]
pub struct PublishError {
    step: Step,
    directory: PathBuf,
    source: std::io::Error,
}

/// The shards and steps of one generation that are on their way to durable storage.
#[derive(Default)]
pub struct PersistQueue {
    /// Shards (local rank, step) that are being written, or that are written but not known to be
    /// published. Nothing may be written into a step while it is being published. If the same step
    /// comes again (the user saves a step that was already saved for recovery), it waits in its
    /// slot.
    under_way: BTreeSet<(u32, u64)>,
    /// The same of earlier generations, whose scripts number their checkpoints themselves: shards
    /// (local rank, generation, step), and where they go. Nobody waits for them, and each
    /// generation has directories of its own for what is not published, so that nothing mixes with
    /// the same number of this generation.
    left: BTreeMap<(u32, Generation, u64), Destination>,
    /// Steps that could not be written or published, and why.
    failed: BTreeMap<u64, String>,
    awaiting: Vec<(Step, oneshot::Sender<Reply>)>,
    /// Set when the generation is over: queued writes are skipped, and the pins belong to the next
    /// generation.
    over: Arc<AtomicBool>,
    /// Writes fail as if storage were full (`everstep inject`).
    pub full: Arc<AtomicBool>,
    /// One queue per local rank, in the order of steps: a step is complete before later ones,
    /// unless it is saved again.
    writes: BTreeMap<u32, Line>,
    /// The queues of earlier generations. One of them may still write a slot that is left.
    earlier_writes: BTreeMap<u32, Line>,
    /// Also in the order of steps: a worker that waits for one step takes the earlier ones to be
    /// durable.
    publications: Line,
    /// Why older checkpoints could not be deleted, as it was printed last. It is tried again after
    /// each publication.
    undeleted: Arc<Mutex<String>>,
}

impl PersistQueue {
    /// Writes a pinned slot, unless the same step of the same rank is already under way.
    pub fn write(
        &mut self,
        PinnedShard { generation, captured, mark, local_rank, step, slot }: PinnedShard,
        to: &Destination,
        inbox: &mpsc::UnboundedSender<Input>,
    ) {
        let is_left = captured != generation;
        let is_new = match is_left {
            true => self.left.insert((local_rank, captured, step), to.clone()).is_none(),
            false => self.under_way.insert((local_rank, step)),
        };
        if !is_new {
            return;
        }
        if !is_left {
            self.failed.remove(&step);
        }
        let (inbox, to, over) = (inbox.clone(), to.clone(), self.over.clone());
        let directory = to_text(&to.directory);
        let full = self.full.load(Ordering::Relaxed);
        // What is left comes first, behind a write of the same slot into the same directory.
        let earlier = self.earlier_writes.get(&local_rank).filter(|_| is_left);
        let line = self.writes.entry(local_rank).or_insert_with(|| earlier.cloned().unwrap_or_default());
        line.give(move || {
            if over.load(Ordering::Acquire) {
                return;
            }
            let result = match full {
                true => slot_files::refuse_shard(&to, step, std::io::Error::from_raw_os_error(28)),
                false => slot_files::write_shard(&slot, &to, &mark, step),
            };
            if !over.load(Ordering::Acquire) {
                slot_files::release(&slot);
            }
            let _ = inbox.send(Input::Shard { local_rank, generation, captured, step: Step(step), directory, result });
        });
    }

    /// Returns whether a pinned slot was given to a queue, which will let go of it. `captured` is
    /// `None` for a slot that goes to this generation's checkpoint.
    pub fn is_given(&self, local_rank: u32, captured: Option<Generation>, step: u64) -> bool {
        match captured {
            Some(of) => self.left.contains_key(&(local_rank, of, step)),
            None => self.under_way.contains(&(local_rank, step)),
        }
    }

    /// Makes a completely written step visible, and deletes checkpoints that `keep` does not cover.
    pub fn publish(&mut self, written: WrittenStep, inbox: &mpsc::UnboundedSender<Input>) {
        let WrittenStep { generation, captured, step, mark, directory, shards, target, keep } = written;
        let (inbox, undeleted) = (inbox.clone(), self.undeleted.clone());
        self.publications.give(move || {
            let path = from_text(&directory);
            let result = persist::publish(&path, &mark, step.0, &shards, target)
                .map(|to| say_where(&to, step))
                .map_err(|source| PublishError { step, directory: path.clone(), source });
            // A published step is durable, even if older ones cannot be deleted.
            let pruned = result.as_ref().map_or(Ok(()), |()| persist::prune(&path, keep, &mark).map(drop));
            let why = pruned.map_or_else(|e| e.to_string(), |()| String::new());
            let mut said = undeleted.lock().unwrap_or_else(PoisonError::into_inner);
            if *said != why && !why.is_empty() {
                crate::say_warning!("older checkpoints in {} could not be deleted: {why}", path.display());
            }
            *said = why;
            drop(said);
            // Numbers of an earlier generation say nothing of what this one has made durable.
            if captured == generation {
                let _ = inbox.send(Input::Published(generation, step, result));
            } else if let Err(why) = result {
                crate::say_warning!("{why}");
            } else {
                let directory = path.display();
                crate::say!("step {step}, saved before the workers were restarted, is now in {directory}");
            }
        });
    }

    /// Returns where a step of an earlier generation goes, if a shard of it is written here.
    pub fn destination_of_left(&self, captured: Generation, step: Step) -> Option<&Destination> {
        self.left.iter().find(|((_, of, s), _)| *of == captured && *s == step.0).map(|(_, to)| to)
    }

    /// Answers when the step is durable or has failed, at once if that is already known. `pinned`
    /// lists the steps in slots that are still to be written. It may contain a step that was
    /// already durable (the user saves a step that was saved for recovery).
    pub fn await_durable(&mut self, step: Step, known: bool, pinned: &BTreeSet<u64>, answer: oneshot::Sender<Reply>) {
        if known && !self.is_to_come(step, pinned) {
            let _ = answer.send(Reply::Done);
        } else if let Some(why) = self.failed.get(&step.0) {
            let _ = answer.send(Reply::Refused { why: why.clone() });
        } else {
            self.awaiting.push((step, answer));
        }
    }

    fn is_to_come(&self, step: Step, pinned: &BTreeSet<u64>) -> bool {
        pinned.contains(&step.0) || self.under_way.iter().any(|(_, s)| *s == step.0)
    }

    /// Records that the step was published.
    pub fn published(&mut self, step: Step, pinned: &BTreeSet<u64>) {
        self.under_way.retain(|(_, s)| *s != step.0);
        self.failed.retain(|s, _| *s > step.0);
        for (waiting, answer) in std::mem::take(&mut self.awaiting) {
            if waiting <= step && !self.is_to_come(waiting, pinned) {
                let _ = answer.send(Reply::Done);
            } else {
                self.awaiting.push((waiting, answer));
            }
        }
    }

    /// Records that a shard could not be written or, without a `local_rank`, that the step could
    /// not be published. Waiting workers are refused; the step may be tried again.
    pub fn fail(&mut self, local_rank: Option<u32>, step: Step, why: &str) {
        crate::say_warning!("{why}");
        self.under_way.retain(|(local, s)| *s != step.0 || local_rank.is_some_and(|l| l != *local));
        self.failed.insert(step.0, why.to_owned());
        if self.failed.len() > FAILED_MAX {
            self.failed.pop_first();
        }
        for (_, answer) in self.awaiting.extract_if(.., |(s, _)| *s == step) {
            let _ = answer.send(Reply::Refused { why: why.to_owned() });
        }
    }

    /// Forgets everything, once the workers are gone.
    pub fn clear(&mut self) {
        std::mem::take(&mut self.over).store(true, Ordering::Release);
        self.under_way.clear();
        self.left.clear();
        self.earlier_writes.append(&mut self.writes);
        self.failed.clear();
        self.awaiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc as std_mpsc;
    use std::time::Duration;

    fn one_thread() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().expect("a runtime")
    }

    #[test]
    fn queues_share_the_only_thread_and_keep_their_order() {
        let runtime = one_thread();
        let _inside = runtime.enter();
        let (done, all) = std_mpsc::channel();
        let lines = [Line::default(), Line::default()];
        for item in 0..100 {
            for (name, line) in lines.iter().enumerate() {
                let done = done.clone();
                line.give(move || done.send((name, item)).expect("the test waits"));
            }
        }
        drop(tokio::task::spawn_blocking(move || done.send((2, 0)).expect("the test waits")));
        let mut expected = [0, 0, 0];
        for _ in 0..201 {
            let (name, item) = all.recv_timeout(Duration::from_mins(1)).expect("all work is done");
            assert_eq!(item, expected[name], "queue {name} is out of order");
            expected[name] += 1;
        }
    }

    #[test]
    fn a_runtime_that_ends_leaves_no_work_undone() {
        let runtime = one_thread();
        let (done, all) = std_mpsc::channel();
        let (release, held) = std_mpsc::channel::<()>();
        {
            let _inside = runtime.enter();
            drop(tokio::task::spawn_blocking(move || held.recv().is_err()));
            let line = Line::default();
            for item in 0..3 {
                let done = done.clone();
                line.give(move || done.send(item).expect("the test waits"));
            }
        }
        drop(release);
        drop(runtime);
        drop(done);
        assert_eq!(all.into_iter().collect::<Vec<_>>(), [0, 1, 2]);
    }
}
