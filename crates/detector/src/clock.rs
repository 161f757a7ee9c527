//! Maps timestamps of other machines to the receiver's clock; the clocks may differ by minutes. The
//! smallest delay of the recent messages is the difference of the clocks plus a negligible time in
//! transit.

use std::collections::VecDeque;

/// Number of messages to remember.
const KEPT: usize = 60;
/// Milliseconds by which a clock must have been set back before the older delays are discarded.
const SET: i64 = 2000;

/// A machine's clock, as seen by the receiver.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    /// Receive time minus send time of recent messages, in milliseconds.
    late: VecDeque<i64>,
}

impl Clock {
    /// Returns the receiver's time for `sent_ms`, a timestamp by the sender's clock that arrived at
    /// `received_ms`. It is never later than `received_ms`.
    pub fn place(&mut self, sent_ms: u64, received_ms: u64) -> u64 {
        let late = (i128::from(received_ms) - i128::from(sent_ms)).clamp(i64::MIN.into(), i64::MAX.into()) as i64;
        let least = self.late.iter().copied().min();
        // If the delay jumps and the next message confirms it, the sender's clock was set back. A
        // single late message is only late.
        if least.is_some_and(|least| late.saturating_sub(least) > SET)
            && self.late.back().is_some_and(|last| late.saturating_sub(*last) < SET / 2)
        {
            self.late.retain(|l| late.saturating_sub(*l) <= SET);
        }
        self.late.push_back(late);
        if self.late.len() > KEPT {
            self.late.pop_front();
        }
        let least = self.late.iter().copied().min().unwrap_or(late);
        let at = i128::from(sent_ms) + i128::from(least);
        u64::try_from(at).unwrap_or(0).min(received_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_clock_that_is_minutes_off_is_put_right() {
        let mut clock = Clock::default();
        for second in 0..100u64 {
            let said = 1_000_000 + second * 1000;
            // Five minutes ahead, with 5 to 300 ms in transit.
            let heard = said - 300_000 + 5 + (second * 7919) % 295;
            let at = clock.place(said, heard);
            if second > 20 {
                assert!(at.abs_diff(said - 300_000) < 60, "{at}");
            }
        }
        // The clock is corrected, and its samples are soon placed well again.
        let moved = |n: u64| clock_after(&mut clock.clone(), n);
        assert!(moved(3) < 400);
    }

    fn clock_after(clock: &mut Clock, messages: u64) -> u64 {
        (0..messages)
            .map(|n| clock.place(800_000 + n * 1000, 800_010 + n * 1000).abs_diff(800_010 + n * 1000))
            .last()
            .unwrap_or(0)
    }

    proptest! {
        #[test]
        fn nothing_is_placed_after_it_was_heard(said in prop::collection::vec(any::<u64>(), 1..100), heard in any::<u64>()) {
            let mut clock = Clock::default();
            for said in said {
                prop_assert!(clock.place(said, heard) <= heard);
            }
        }
    }
}
