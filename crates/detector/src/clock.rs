//! Machines' clocks differ, by minutes even. What they say is put on the clock of whoever hears it: the least that a message has taken lately is
//! the difference of the clocks, and next to nothing of the way.

use std::collections::VecDeque;

/// Messages that are remembered.
const KEPT: usize = 60;
/// Milliseconds by which a clock must have been set for what is remembered to be forgotten.
const SET: i64 = 2000;

/// One machine's clock.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    /// Heard minus said, in milliseconds.
    late: VecDeque<i64>,
}

impl Clock {
    /// When something was, by the hearer's clock: it was said to be at `said_ms`, and is heard at `heard_ms`. Never after it was heard.
    pub fn place(&mut self, said_ms: u64, heard_ms: u64) -> u64 {
        let late = (i128::from(heard_ms) - i128::from(said_ms)).clamp(i64::MIN.into(), i64::MAX.into()) as i64;
        let least = self.late.iter().copied().min();
        // Later than ever, all of a sudden, message after message: it was set back. One that is late alone is only late.
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
        let at = i128::from(said_ms) + i128::from(least);
        u64::try_from(at).unwrap_or(0).min(heard_ms)
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
            // Five minutes ahead, with a way of 5 to 300 ms.
            let heard = said - 300_000 + 5 + (second * 7919) % 295;
            let at = clock.place(said, heard);
            if second > 20 {
                assert!(at.abs_diff(said - 300_000) < 60, "{at}");
            }
        }
        // It is put right, and its samples are placed well at once again.
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
