//! Judges how training ended behind a launcher script that exits with 0, which may hide what happened
//! to the process that trained in its place.

use super::observation::{Observation, Trainer};
use crate::id::Step;
use crate::message::Extent;

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
    /// The last look before the latest one claimed the step board.
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
        let Trainer { pid, .. } = last.trainer.filter(|t| t.vanished)?;
        let (step, total) = (last.step, last.total);
        let incomplete = match total {
            Some(total) => step.is_none_or(|step| step < total),
            // An evaluation after the training claims the board, too, but completes no step.
            None => step.is_some() && (self.trained || step != self.before.and_then(|before| before.step)),
        };
        incomplete.then_some(Vanished { pid, step, total })
    }
}
