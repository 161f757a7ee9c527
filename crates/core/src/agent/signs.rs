//! What the machine tells of itself: passed on once, and remembered for a while, so that a silence can be explained.

use super::Agent;
use crate::failure::{SIGN_BEFORE, SIGNS_KEPT};
use crate::message::{Report, Sign};
use crate::time::Time;
use std::collections::VecDeque;
use std::time::Duration;

/// The same class on the same device is not told again within this.
const AGAIN: Duration = Duration::from_secs(10);

/// What was told lately.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Signs(VecDeque<(Time, Sign)>);

impl Signs {
    /// The latest failure of the machine itself, not much before `progress`.
    pub(super) fn grave_since(&self, progress: Time) -> Option<&Sign> {
        self.0
            .iter()
            .rev()
            .find(|(at, s)| at.after(SIGN_BEFORE) >= progress && s.verdict.is_of_machine())
            .map(|(_, s)| s)
    }
}

impl Agent {
    /// A line of the kernel, an event of a device. A burst is told once.
    pub(super) fn signed(&mut self, now: Time, sign: Sign) {
        let same = |s: &Sign| {
            s.verdict.class == sign.verdict.class
                && s.device == sign.device
                && (s.pid == sign.pid || sign.pid.is_none())
        };
        if self.signs.0.iter().any(|(at, s)| now.since(*at) < AGAIN && same(s)) {
            return;
        }
        self.signs.0.push_back((now, sign.clone()));
        if self.signs.0.len() > SIGNS_KEPT {
            self.signs.0.pop_front();
        }
        self.send(Report::Signed(sign));
    }
}
