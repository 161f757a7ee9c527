//! The time of one worker, from its start to its end, read from its step board.

use super::{Category, Spent};
use crate::median::median;
use std::collections::VecDeque;

/// Number of steps from which the usual duration is computed.
const WINDOW: usize = 1000;

/// A worker's counters since its start. Times are in microseconds and only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Steps completed; `None` while the worker reports none.
    pub step: Option<u64>,
    /// Step that the worker continues from.
    pub restored: u64,
    /// Both are the training's own numbers; false: steps are counted since the process started.
    pub numbered: bool,
    /// Time since the last step was complete.
    pub since_step: u64,
    /// Time spent waiting for data.
    pub data: u64,
    /// Time in sections of the script: evaluation, or anything with a name.
    pub eval: u64,
    /// Time in checkpoints: captures, and waiting for slots.
    pub stall: u64,
    /// Time spent reading a checkpoint.
    pub restore: u64,
}

impl Reading {
    /// Returns the steps completed beyond the one that the worker continues from.
    #[must_use]
    pub fn new_steps(&self) -> u64 {
        self.step.unwrap_or(0).saturating_sub(self.restored)
    }
}

/// What the job had completed before a worker started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Before {
    /// The highest completed step.
    pub best: u64,
    /// Whether any step was completed: a worker whose steps have no numbers may repeat it.
    pub some: bool,
}

/// One worker's time. Time spent on an incomplete step is pending: its completion decides the
/// category.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meter {
    at: u64,
    last: Reading,
    spent: Spent,
    pending: u64,
    /// The first step since this start is complete.
    warm: bool,
}

/// The usual duration of steps on this node, over several starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usual {
    times: VecDeque<u64>,
    median: u64,
    since: usize,
}

impl Usual {
    /// Returns the median duration of the latest steps, in microseconds; 0 while none is known.
    pub fn median(&self) -> u64 {
        self.median
    }

    fn saw(&mut self, each: u64, steps: u64) {
        // Steps completed between two observations count as that many equal steps, up to 16.
        for _ in 0..steps.min(16) {
            self.times.push_back(each);
            self.since += 1;
        }
        while self.times.len() > WINDOW {
            self.times.pop_front();
        }
        if self.since >= self.times.len().min(32) {
            self.since = 0;
            self.median = median(self.times.iter().copied()).unwrap_or(0);
        }
    }
}

impl Meter {
    /// Creates the meter of a worker that starts at `at` (microseconds on the agent's clock).
    #[must_use]
    pub fn new(at: u64) -> Self {
        Meter { at, ..Meter::default() }
    }

    /// Records a sample of the worker's board, taken at `at`.
    pub fn look(&mut self, at: u64, seen: Reading, of: Before, usual: &mut Usual) {
        let mut left = at.saturating_sub(self.at);
        self.at = self.at.max(at);
        let counted = [
            (Category::Restore, seen.restore, self.last.restore),
            (Category::CheckpointStall, seen.stall, self.last.stall),
            (Category::Eval, seen.eval, self.last.eval),
            (Category::DataStall, seen.data, self.last.data),
        ];
        for (category, now, before) in counted {
            let more = now.saturating_sub(before);
            let within = more.min(left);
            self.spent.put(category, within);
            left -= within;
            // A section counted only at its end began before the last observation, when it was
            // taken for a part of a step.
            let earlier = (more - within).min(self.pending);
            self.pending -= earlier;
            self.spent.put(category, earlier);
        }
        let known = |r: &Reading| r.step.map(|s| s.max(r.restored));
        match (known(&self.last), known(&seen)) {
            (_, None) => self.spent.put(Category::Init, left),
            (None, Some(step)) => {
                // The worker's first report: the time so far was setup, or already its first step.
                if step > seen.restored {
                    self.pending += left;
                    self.stepped(seen.restored, step, seen.numbered, of, usual);
                } else {
                    self.spent.put(Category::Init, left);
                }
            }
            (Some(_), Some(step)) => {
                // The number of a step may become known after the first ones.
                let before = seen.restored + self.last.new_steps();
                self.pending += left;
                if step > before {
                    // Time after the end of the last step belongs to the next one.
                    let next = seen.since_step.min(self.pending);
                    self.pending -= next;
                    self.stepped(before, step, seen.numbered, of, usual);
                    self.pending = next;
                }
            }
        }
        self.last = seen;
    }

    /// Records that steps `before + 1` to `step` are complete.
    fn stepped(&mut self, before: u64, step: u64, numbered: bool, of: Before, usual: &mut Usual) {
        let steps = step - before;
        let mut time = std::mem::take(&mut self.pending);
        let d = usual.median();
        if std::mem::replace(&mut self.warm, true) {
            usual.saw(time / steps, steps);
        } else {
            // The first step compiles, allocates and connects.
            let first = (time - time / steps * (steps - 1)).saturating_sub(d);
            self.spent.put(Category::Warmup, first);
            time -= first;
        }
        if of.some && !numbered {
            // These steps may be new, or repeated.
            return self.spent.put(Category::Unknown, time);
        }
        let again = of.best.min(step).saturating_sub(before);
        let recompute = (u128::from(time) * u128::from(again) / u128::from(steps)) as u64;
        self.spent.put(Category::Recompute, recompute);
        time -= recompute;
        let expected = if d == 0 { time } else { d.saturating_mul(steps - again) };
        self.spent.put(Category::Productive, time.min(expected));
        self.spent.put(Category::Degraded, time.saturating_sub(expected));
    }

    /// Ends the meter: pending time goes into `category`.
    #[must_use]
    pub fn close(mut self, at: u64, category: Category) -> Spent {
        self.pending += at.saturating_sub(self.at);
        self.spent.put(category, self.pending);
        self.spent
    }

    /// Returns the time spent by category, and the pending time.
    #[must_use]
    pub fn spent(&self, at: u64) -> (Spent, u64) {
        (self.spent, self.pending + at.saturating_sub(self.at))
    }
}
