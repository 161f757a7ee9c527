//! Signs of the machine: passed on once, and remembered for a while, so that they can explain a
//! silence.

use super::Agent;
use crate::failure::{SIGN_BEFORE, SIGNS_KEPT};
use crate::message::{Report, Sign};
use crate::time::Time;
use std::collections::VecDeque;
use std::time::Duration;

/// The same class on the same device is not reported again within this time.
const AGAIN: Duration = Duration::from_secs(10);

/// Recent signs, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Signs(VecDeque<(Time, Sign)>);

impl Signs {
    /// Returns the latest failure of the machine itself, if it came after `progress` or shortly
    /// before.
    pub(super) fn grave_since(&self, progress: Time) -> Option<&Sign> {
        self.0
            .iter()
            .rev()
            .find(|(at, s)| at.after(SIGN_BEFORE) >= progress && s.verdict.is_of_machine())
            .map(|(_, s)| s)
    }
}

impl Agent {
    /// Passes on a sign: a line of the kernel log, or an event of a device. A burst is passed on
    /// once.
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
