//! The time of one worker, from its start to its end, read off its step board.

use super::{Category, Spent};
use std::collections::VecDeque;

/// Steps that say what a step usually takes.
const WINDOW: usize = 1000;

/// What a worker has counted since it started: microseconds, growing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Steps completed; `None` while it tells of none.
    pub step: Option<u64>,
    /// Step that it goes on from.
    pub restored: u64,
    /// Both are the training's own numbers; false: steps are counted since the process started.
    pub numbered: bool,
    /// Since the last one was complete.
    pub since_step: u64,
    /// Waiting for data.
    pub data: u64,
    /// In sections of the script: evaluation, anything with a name.
    pub eval: u64,
    /// In checkpoints: captures, and waiting for room.
    pub stall: u64,
    /// Reading a checkpoint.
    pub restore: u64,
}

impl Reading {
    /// Steps completed beyond the one that it goes on from.
    #[must_use]
    pub fn new_steps(&self) -> u64 {
        self.step.unwrap_or(0).saturating_sub(self.restored)
    }
}

/// What the job had done before a worker started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Before {
    /// The highest step that it had completed.
    pub best: u64,
    /// It had completed some: a worker whose steps have no numbers may do them again.
    pub some: bool,
}

/// One worker's time. What is spent on a step that is not complete is pending: a step decides what it was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meter {
    at: u64,
    last: Reading,
    spent: Spent,
    pending: u64,
    /// The first step of this start is complete.
    warm: bool,
}

/// What steps usually take here, over several starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usual {
    times: VecDeque<u64>,
    median: u64,
    since: usize,
}

impl Usual {
    /// Median of the latest steps, in microseconds; 0 while none is known.
    pub fn median(&self) -> u64 {
        self.median
    }

    fn saw(&mut self, each: u64, steps: u64) {
        // Steps that were completed between two looks count as one look's worth of equal ones.
        for _ in 0..steps.min(16) {
            self.times.push_back(each);
            self.since += 1;
        }
        while self.times.len() > WINDOW {
            self.times.pop_front();
        }
        if self.since >= self.times.len().min(32) {
            self.since = 0;
            let mut sorted: Vec<u64> = self.times.iter().copied().collect();
            sorted.sort_unstable();
            self.median = sorted.get(sorted.len() / 2).copied().unwrap_or(0);
        }
    }
}

impl Meter {
    /// A worker that starts at `at` (microseconds on the agent's clock).
    #[must_use]
    pub fn new(at: u64) -> Self {
        Meter { at, ..Meter::default() }
    }

    /// The worker's board says so, now.
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
            // What was counted at its end began before the last look: it was taken for a part of a step.
            let earlier = (more - within).min(self.pending);
            self.pending -= earlier;
            self.spent.put(category, earlier);
        }
        let known = |r: &Reading| r.step.map(|s| s.max(r.restored));
        match (known(&self.last), known(&seen)) {
            (_, None) => self.spent.put(Category::Init, left),
            (None, Some(step)) => {
                // It began to tell: until here it set itself up, or this was its first step already.
                if step > seen.restored {
                    self.pending += left;
                    self.stepped((seen.restored, step), seen.numbered, of, usual);
                } else {
                    self.spent.put(Category::Init, left);
                }
            }
            (Some(_), Some(step)) => {
                // What the number of a step is may become known after the first ones.
                let before = seen.restored + self.last.new_steps();
                self.pending += left;
                if step > before {
                    // What came after the last one's end is of the next.
                    let next = seen.since_step.min(self.pending);
                    self.pending -= next;
                    self.stepped((before, step), seen.numbered, of, usual);
                    self.pending = next;
                }
            }
        }
        self.last = seen;
    }

    /// Steps `before + 1` to `step` are complete.
    fn stepped(&mut self, (before, step): (u64, u64), numbered: bool, of: Before, usual: &mut Usual) {
        let steps = step - before;
        let mut time = std::mem::take(&mut self.pending);
        let d = usual.median();
        if !std::mem::replace(&mut self.warm, true) {
            // The first one compiles, allocates, connects.
            let first = (time - time / steps * (steps - 1)).saturating_sub(d);
            self.spent.put(Category::Warmup, first);
            time -= first;
        } else {
            usual.saw(time / steps, steps);
        }
        if of.some && !numbered {
            // New ones, or the same again.
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

    /// It is over: what was pending went into `category`.
    #[must_use]
    pub fn close(mut self, at: u64, category: Category) -> Spent {
        self.pending += at.saturating_sub(self.at);
        self.spent.put(category, self.pending);
        self.spent
    }

    /// All but what is pending, and that.
    #[must_use]
    pub fn spent(&self, at: u64) -> (Spent, u64) {
        (self.spent, self.pending + at.saturating_sub(self.at))
    }
}
