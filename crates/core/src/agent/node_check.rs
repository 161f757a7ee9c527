//! This node's part in a check of the nodes: carried out once, answered as often as the coordinator
//! asks.

use super::Agent;
use super::command::Command;
use crate::message::{Check, Checked, Report};

impl Agent {
    pub(super) fn check(&mut self, check: Check) {
        if self.crew.is_some() || self.over.is_some() {
            return;
        }
        match &self.checked {
            Some((of, answer)) if *of == (check.check, check.round) => {
                let again = answer.clone().map(Report::Checked);
                again.into_iter().for_each(|report| self.send(report));
            }
            _ => {
                self.checked = Some(((check.check, check.round), None));
                self.out.push_back(Command::Check(check));
            }
        }
    }

    pub(super) fn checked(&mut self, answer: Checked) {
        if let Some((_, known)) = self.checked.as_mut().filter(|(of, _)| *of == (answer.check, answer.round)) {
            *known = Some(answer.clone());
            self.send(Report::Checked(answer));
        }
    }
}
