//! Which of the workers' pinned slots go to durable storage, and which are let go of.

use super::Driver;
use super::persist_queue::PinnedShard;
use super::slot_files::Destination;
use everstep_checkpoint::arena::{Label, Pin, run_label};
use everstep_checkpoint::persist::Target;
use everstep_core::id::{Generation, Step};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The kind of state in slots of a script that saves on its own, with `everstep.dcp`.
const KIND: &str = "/dcp";

/// Returns whether a slot was captured for this directory. A script that saves on its own may use
/// several, any other one has only one.
fn is_for(label: &Label, to: &Destination) -> bool {
    to.target == Target::Branch || label.run == run_label(&format!("{}{KIND}", to.run))
}

/// Returns why a pinned slot will not be written, if so: nothing that it could be a part of becomes
/// complete, and without it, memory would run out of slots.
fn dropped(label: &Label, to: &Destination, generation: Generation, world_size: u64) -> Option<String> {
    let Label { step, world_size: ranks, .. } = *label;
    let (directory, is_left) = (to.directory.display(), label.generation != generation.0);
    if to.target == Target::Branch {
        None
    } else if is_for(label, to) {
        (is_left && ranks != world_size)
            .then(|| format!("discarding step {step}, saved by {ranks} ranks before the restart: it is incomplete"))
    } else if is_left {
        Some(format!(
            "discarding step {step}, saved to another directory before the restart: the job now saves to {directory}"
        ))
    } else {
        // A worker that changes its directory has waited for the end of every save to the one
        // before.
        Some(format!("discarding step {step}, saved to a directory other than {directory}: its save failed"))
    }
}

impl Driver {
    /// Writes the pinned slots of a worker to its directory.
    pub(super) fn persist_pinned(&mut self, generation: Generation, local_rank: u32, to: &Destination) {
        let Some(crew) = &self.crew else { return };
        let (restarts, world_size) = (crew.restarts, u64::from(crew.world_size));
        let mut pinned: Vec<(Generation, u64, PathBuf)> = Vec::new();
        let slots = self.replicas.own().slots(local_rank);
        for slot in slots.iter().filter(|s| s.pinned_for(Pin::Persist)) {
            let Some(label) = slot.label() else { continue };
            let captured = match to.target {
                Target::Branch => generation,
                Target::Exactly => Generation(label.generation),
            };
            let left = Some(captured).filter(|c| *c != generation);
            if self.persist_queue.is_given(local_rank, left, label.step) {
                continue;
            }
            if let Some(why) = dropped(&label, to, generation, world_size) {
                slot.release(Pin::Persist);
                match left {
                    Some(_) => crate::say_warning!("{why}"),
                    None => self.not_durable(Some(local_rank), Step(label.step), &why),
                }
                continue;
            }
            if self.is_to_be_written(&label, to.target) {
                pinned.push((captured, label.step, slot.path().into()));
            }
        }
        // What an earlier generation has left is complete before anything of this one is, whose
        // publication deletes what is not.
        pinned.sort();
        for (captured, step, slot) in pinned {
            let mark = to.mark(captured, restarts);
            self.persist_queue.write(
                PinnedShard { generation, captured, mark, local_rank, step, slot },
                to,
                &self.inbox,
            );
        }
    }

    /// Returns whether this crew captured the slot, or it belongs to the past from which the crew
    /// resumed. What an earlier crew captured after that was abandoned. A script that saves on its
    /// own does not ask for a step to resume from: all that it has saved to its directory counts.
    pub(super) fn is_to_be_written(&self, label: &Label, target: Target) -> bool {
        let Some(crew) = &self.crew else { return false };
        let is_past = || label.run == self.replicas.holder.run() && crew.restored.is_some_and(|r| label.step <= r.0);
        target == Target::Exactly || label.generation == crew.generation.0 || is_past()
    }

    /// Returns the steps in this node's slots that are still to be written.
    pub(super) fn pinned_steps(&self) -> BTreeSet<u64> {
        let Some(crew) = &self.crew else { return BTreeSet::new() };
        let mut steps = BTreeSet::new();
        for (local, worker) in &crew.workers {
            let Some(to) = &worker.destination else { continue };
            let slots = self.replicas.own().slots(*local);
            let labels = slots.iter().filter(|s| s.pinned_for(Pin::Persist)).filter_map(|s| s.label());
            // Nobody waits for numbers of an earlier generation.
            let counts = |l: &Label| to.target == Target::Branch || l.generation == crew.generation.0;
            let labels = labels.filter(|l| counts(l) && is_for(l, to) && self.is_to_be_written(l, to.target));
            steps.extend(labels.map(|l| l.step));
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use everstep_checkpoint::retain::Policy;
    use everstep_core::id::{Rank, RunId};
    use everstep_core::message::Purpose;

    const HERE: RunId = RunId(7);

    fn to(target: Target) -> Destination {
        let keep = Policy { last: 3, every: None, epochs: false, abandoned: false };
        Destination { rank: Rank(0), directory: "/out".into(), run: HERE, epoch: 1, keep, bandwidth: 0, target }
    }

    fn label(run: RunId, generation: u64) -> Label {
        let run = run_label(&format!("{run}/dcp"));
        Label { run, rank: 0, world_size: 2, generation, step: 5, purpose: Purpose::User, shared: false }
    }

    #[test]
    fn only_what_was_saved_to_the_directory_is_written_there() {
        let of = |run, generation| dropped(&label(run, generation), &to(Target::Exactly), Generation(4), 2);
        assert_eq!((of(HERE, 4), of(HERE, 3)), (None, None));
        let text = |run, generation| of(run, generation).expect("it was saved elsewhere");
        assert!(text(RunId(8), 4).ends_with("its save failed"));
        assert!(text(RunId(8), 3).ends_with("the job now saves to /out"));
        assert!(is_for(&label(HERE, 4), &to(Target::Exactly)));
        assert!(!is_for(&label(RunId(8), 4), &to(Target::Exactly)));
    }

    #[test]
    fn what_another_number_of_ranks_has_left_is_dropped() {
        let of = |generation, ranks| dropped(&label(HERE, generation), &to(Target::Exactly), Generation(4), ranks);
        assert!(of(3, 3).expect("it cannot become complete").contains("saved by 2 ranks before the restart"));
        assert_eq!((of(3, 2), of(4, 3)), (None, None));
    }

    #[test]
    fn a_job_that_resumes_by_itself_decides_when_it_does() {
        let of = |run, generation| dropped(&label(run, generation), &to(Target::Branch), Generation(4), 3);
        assert_eq!((of(HERE, 3), of(RunId(8), 3), of(RunId(8), 4)), (None, None, None));
    }
}
