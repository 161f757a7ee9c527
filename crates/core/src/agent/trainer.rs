//! Judges how training ended behind a launcher script that exits with 0, which may hide what
//! happened to the process that trained in its place.

use super::observation::{Observation, Trainer, TrainerEnd};
use crate::id::Step;
use crate::message::{Extent, Outcome};

/// Python's exit code if its standard streams could not be flushed at the end.
pub(super) const NOT_FLUSHED: i32 = 120;

/// Returns whether a launched process with this outcome may pass on that the process it waited for
/// crashed. A shell exits with 128 and the signal, `sys.exit(subprocess.call(...))` with 256 less
/// it.
fn passes_on_a_crash(outcome: Outcome) -> bool {
    match outcome {
        Outcome::Signal(_) => true,
        Outcome::Code(code) => matches!(code, NOT_FLUSHED | 129..=159 | 225..=254),
    }
}

/// How training ended behind a launched process that exits with 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HiddenEnd {
    /// Nothing contradicts the exit code.
    Normal,
    /// The process that trained vanished before its last step.
    CutShort(u32),
    /// The process that trained vanished, and its last step is not known.
    Unconfirmed(u32),
}

/// A process that vanished and is not known to have completed its training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Vanished {
    pid: u32,
    step: Option<u64>,
    total: Option<u64>,
}

/// The processes that have trained in place of a launched one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Trainers {
    /// The last observation before the latest process claimed the step board.
    before: Option<Observation>,
    /// The latest one has completed a step.
    trained: bool,
    /// An earlier one whose training no later one has completed.
    earlier: Option<Vanished>,
}

impl Trainers {
    /// Records who trains now.
    pub(super) fn note(&mut self, last: Option<&Observation>, seen: &Observation) {
        let pid = |o: &Observation| o.trainer.map(|t| t.pid);
        if let Some(last) = last.filter(|last| pid(last) != pid(seen)) {
            *self = Trainers { before: Some(*last), trained: false, earlier: self.vanished(last) };
        }
        let place = |o: &Observation| (o.step, o.restored);
        self.trained |= seen.new_steps() > 0 && self.before.is_none_or(|before| place(&before) != place(seen));
    }

    /// Returns how training ended if the launched process exits with 0 after this observation.
    pub(super) fn hidden_end(&self, last: Option<&Observation>) -> HiddenEnd {
        match last.and_then(|last| self.vanished(last)) {
            None => HiddenEnd::Normal,
            Some(Vanished { pid, total: Some(_), .. }) => HiddenEnd::CutShort(pid),
            Some(Vanished { pid, total: None, .. }) => HiddenEnd::Unconfirmed(pid),
        }
    }

    /// Returns whether training was over before the launched process ended with this outcome, which
    /// passes on that a crash ended the interpreter of the process that trained.
    pub(super) fn was_over(&self, last: Option<&Observation>, outcome: Outcome) -> bool {
        let over = last.is_some_and(|o| o.trainer.is_some_and(|t| t.end == Some(TrainerEnd::Over)));
        over && passes_on_a_crash(outcome) && self.hidden_end(last) == HiddenEnd::Normal
    }

    /// Returns how far training has come: if an earlier process vanished, and the latest has not
    /// completed what that one left, how far the earlier one had come.
    pub(super) fn extent(&self, last: &Observation) -> Extent {
        let (step, total) = self.vanished(last).map_or((last.step, last.total), |v| (v.step, v.total));
        Extent { step: step.map(Step), total: total.map(Step), passes: last.passes }
    }

    /// Returns the process whose training is not known to be complete, by preference one that is
    /// known not to be.
    fn vanished(&self, last: &Observation) -> Option<Vanished> {
        let latest = self.latest(last);
        let earlier = self.earlier.filter(|earlier| {
            let reached = earlier.total.is_some_and(|total| last.step >= Some(total));
            // It may have stopped early, but it ended as it chose.
            let same = earlier.total.is_none() || last.total == earlier.total;
            let resumed = self.trained && same && latest.is_none();
            !reached && !resumed
        });
        [earlier, latest].into_iter().flatten().max_by_key(|v| v.total.is_some())
    }

    /// Returns the latest process if it vanished and is not known to have completed its training.
    fn latest(&self, last: &Observation) -> Option<Vanished> {
        let Trainer { pid, .. } = last.trainer.filter(|t| t.end == Some(TrainerEnd::Vanished))?;
        let (step, total) = (last.step, last.total);
        let incomplete = match total {
            Some(total) => step.is_none_or(|step| step < total),
            // An evaluation after the training claims the board, too, but completes no step.
            None => step.is_some() && (self.trained || step != self.before.and_then(|before| before.step)),
        };
        incomplete.then_some(Vanished { pid, step, total })
    }
}
