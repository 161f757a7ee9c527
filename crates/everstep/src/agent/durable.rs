//! Shards of this node on their way to durable storage: what is written, what is published, and who waits for it.

use super::Input;
use super::storage::{self, Destination};
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::persist::{self, Target};
use everstep_checkpoint::retain::Policy;
use everstep_core::id::{Generation, Step};
use everstep_core::message::ShardFile;
use everstep_wire::raw::{from_text, to_text};
use everstep_wire::worker::Reply;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc as std_mpsc};
use tokio::sync::{mpsc, oneshot};

/// Steps that failed and can still be asked for.
const FAILED_MAX: usize = 16;

/// One line where a step did not get the name that people look for.
pub fn say_where(to: &Path, step: Step) {
    if let Some(name) = to.file_name().filter(|n| **n != *format!("step-{step}")) {
        crate::say!(
            "step {step} is in {}: step-{step} is another branch's, the user's, or not everstep's, and stays",
            name.display()
        );
    }
}

/// Work that is done one after the other, in the order in which it was given; what was given is done even when the line is dropped.
struct Line(std_mpsc::Sender<Box<dyn FnOnce() + Send>>);

impl Line {
    fn new() -> Self {
        let (sender, work) = std_mpsc::channel::<Box<dyn FnOnce() + Send>>();
        tokio::task::spawn_blocking(move || work.into_iter().for_each(|each| each()));
        Line(sender)
    }

    fn give(&self, work: impl FnOnce() + Send + 'static) {
        // The other side ends only when this one is dropped.
        let _ = self.0.send(Box::new(work));
    }
}

/// One generation's.
#[derive(Default)]
pub struct Durable {
    /// (local rank, step) of shards that are being written, or are and not known to be published. While a step is being published nobody
    /// may write into it: the same step again (the user saves what was saved for recovery) waits here, in its slot.
    under_way: BTreeSet<(u32, u64)>,
    /// Steps that could not be written or published, and why.
    failed: BTreeMap<u64, String>,
    awaiting: Vec<(Step, oneshot::Sender<Reply>)>,
    /// The generation is over: what waits to be written is not, and pins belong to the next one.
    over: Arc<AtomicBool>,
    /// It is to be as if storage were full (`everstep inject`).
    pub full: Arc<AtomicBool>,
    /// By local rank, in order of steps: a step is complete before later ones, unless it is saved once more.
    writes: BTreeMap<u32, Line>,
    /// In order of steps, too: who waits for one takes what is before it for durable.
    publications: Option<Line>,
}

impl Durable {
    /// Writes a pinned slot, unless the same step of the same rank is under way.
    pub fn write(
        &mut self,
        (generation, mark): (Generation, Mark),
        (local_rank, step): (u32, u64),
        slot: PathBuf,
        to: &Destination,
        inbox: &mpsc::UnboundedSender<Input>,
    ) {
        if !self.under_way.insert((local_rank, step)) {
            return;
        }
        self.failed.remove(&step);
        let (inbox, to, over) = (inbox.clone(), to.clone(), self.over.clone());
        let directory = to_text(&to.directory);
        let full = self.full.load(Ordering::Relaxed);
        self.writes.entry(local_rank).or_insert_with(Line::new).give(move || {
            if over.load(Ordering::Acquire) {
                return;
            }
            let result = match full {
                true => storage::refuse_shard(&to, step, &std::io::Error::from_raw_os_error(28)),
                false => storage::write_shard(&slot, &to, &mark, step),
            };
            if !over.load(Ordering::Acquire) {
                storage::release(&slot);
            }
            let _ = inbox.send(Input::Shard { local_rank, generation, step: Step(step), directory, result });
        });
    }

    /// Makes a step visible whose shards are all there, and deletes what `keep` does not name.
    pub fn publish(
        &mut self,
        (generation, step, mark): (Generation, Step, Mark),
        directory: String,
        shards: Vec<ShardFile>,
        (target, keep): (Target, Policy),
        inbox: &mpsc::UnboundedSender<Input>,
    ) {
        let inbox = inbox.clone();
        self.publications.get_or_insert_with(Line::new).give(move || {
            let path = from_text(&directory);
            let result = persist::publish(&path, &mark, step.0, &shards, target)
                .map(|to| say_where(&to, step))
                .map_err(|e| format!("checkpoint of step {step} could not be published in {}: {e}", path.display()));
            // What is published is durable, whatever becomes of older ones.
            if let Err(e) = result.as_ref().map_or(Ok(()), |()| persist::prune(&path, keep, &mark).map(drop)) {
                crate::say!("older checkpoints in {} could not be deleted: {e}", path.display());
            }
            let _ = inbox.send(Input::Published(generation, step, result));
        });
    }

    /// Answers when the step is durable or has failed; at once when that is known. `pinned`: steps in slots that are still to be
    /// written; one may be there that was made durable before (the user saves what was saved for recovery).
    pub fn tell(&mut self, step: Step, known: bool, pinned: &BTreeSet<u64>, answer: oneshot::Sender<Reply>) {
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

    /// The step was published.
    pub fn durable(&mut self, step: Step, pinned: &BTreeSet<u64>) {
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

    /// A shard could not be written, or (`None`) the step not be published: nobody waits for it any longer, and it may be tried
    /// again.
    pub fn fail(&mut self, local_rank: Option<u32>, step: Step, why: &str) {
        crate::say!("{why}");
        self.under_way.retain(|(local, s)| *s != step.0 || local_rank.is_some_and(|l| l != *local));
        self.failed.insert(step.0, why.to_owned());
        if self.failed.len() > FAILED_MAX {
            self.failed.pop_first();
        }
        for (_, answer) in self.awaiting.extract_if(.., |(s, _)| *s == step) {
            let _ = answer.send(Reply::Refused { why: why.to_owned() });
        }
    }

    /// The workers are gone: nobody waits.
    pub fn clear(&mut self) {
        std::mem::take(&mut self.over).store(true, Ordering::Release);
        self.under_way.clear();
        self.writes.clear();
        self.failed.clear();
        self.awaiting.clear();
    }
}
