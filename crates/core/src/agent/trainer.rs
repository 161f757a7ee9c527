//! Judges how training ended behind a launcher script that exits with 0, which may hide what happened
//! to the process that trained in its place.

use super::observation::{Observation, Trainer};

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

/// The processes that have trained in place of a launched one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Trainers {
    /// The latest one, and the step to which an earlier one had trained and then ended normally.
    latest: Option<(u32, Option<u64>)>,
}

impl Trainers {
    /// Records who trains now.
    pub(super) fn note(&mut self, last: Option<&Observation>, seen: &Observation) {
        let Some(Trainer { pid, .. }) = seen.trainer else { return };
        if self.latest.is_none_or(|(known, _)| known != pid) {
            let earlier = last.filter(|o| o.trainer.is_some_and(|t| !t.vanished));
            self.latest = Some((pid, earlier.and_then(|o| o.step)));
        }
    }

    /// Returns how training ended if the launched process exits with 0 after this observation.
    pub(super) fn hidden_end(&self, last: Option<&Observation>) -> HiddenEnd {
        let vanished = last.and_then(|o| Some((o, o.trainer.filter(|t| t.vanished)?.pid)));
        let Some((Observation { step, total, .. }, pid)) = vanished else { return HiddenEnd::Normal };
        let before = self.latest.filter(|(of, _)| *of == pid).and_then(|(_, step)| step);
        match total {
            Some(total) if step.is_none_or(|step| step < *total) => HiddenEnd::CutShort(pid),
            Some(_) => HiddenEnd::Normal,
            // An evaluation after the training claims the board, too, but completes no step.
            None if step.is_none() || *step == before => HiddenEnd::Normal,
            None => HiddenEnd::Unconfirmed(pid),
        }
    }
}
