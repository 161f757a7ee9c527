//! The work that a failure would cost a job: since its last checkpoint, and since its last copy in
//! memory.

use super::policy::Policy;

/// An amount of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Work {
    /// In microseconds of the job.
    pub(super) micros: u64,
    /// In node-microseconds.
    pub(super) nodes: u64,
    /// What was achieved, weighted, in millionths of a node's peak during a microsecond.
    pub(super) value: i128,
}

impl Work {
    fn of(micros: u64, nodes: u64, rate: i64) -> Work {
        Work { micros, nodes: micros * nodes, value: i128::from(rate) * i128::from(micros) }
    }

    fn add(&mut self, more: Work) {
        self.micros += more.micros;
        self.nodes += more.nodes;
        self.value += more.value;
    }

    fn less(&mut self, gone: Work) {
        self.micros -= gone.micros;
        self.nodes -= gone.nodes;
        self.value -= gone.value;
    }
}

/// The work of a job that is not safe yet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UnsavedWork {
    /// Microseconds spent on the checkpoint that is being written.
    writing: u64,
    /// Work since the last checkpoint.
    written: Work,
    /// Work since the last copy.
    copied: Work,
}

impl UnsavedWork {
    /// Runs the job for `micros` microseconds on `nodes` nodes at `rate`. Returns the work done,
    /// and for how long checkpoints stopped it.
    pub(super) fn run(&mut self, policy: &Policy, micros: u64, nodes: u64, rate: i64) -> (Work, u64) {
        let (interval, cycle) = (policy.interval, policy.interval + policy.write);
        if interval == 0 {
            let all = Work::of(micros, nodes, rate);
            self.written.add(all);
            self.copy(policy, all, nodes, rate);
            return (all, 0);
        }
        let before = self.written.micros + self.writing;
        let until = before + micros;
        let (cycles, rest) = (until / cycle, until % cycle);
        let worked = cycles * interval + rest.min(interval) - self.written.micros;
        let all = Work::of(worked, nodes, rate);
        if cycles > 0 {
            self.written = Work::of(rest.min(interval), nodes, rate);
        } else {
            self.written.add(all);
        }
        self.writing = rest.saturating_sub(interval);
        self.copy(policy, all, nodes, rate);
        (all, micros - worked)
    }

    fn copy(&mut self, policy: &Policy, all: Work, nodes: u64, rate: i64) {
        if policy.copy_interval == 0 {
            return;
        }
        let until = self.copied.micros + all.micros;
        if until >= policy.copy_interval {
            self.copied = Work::of(until % policy.copy_interval, nodes, rate);
        } else {
            self.copied.add(all);
        }
    }

    /// Returns the work that a failure loses. `memory` is true if the copies in memory survive.
    pub(super) fn fail(&mut self, policy: &Policy, memory: bool) -> Work {
        self.writing = 0;
        if policy.interval == 0 && policy.copies == 0 {
            return Work::default();
        }
        let copies = policy.copies > 0 && memory;
        let lost = if copies && self.copied.micros <= self.written.micros { self.copied } else { self.written };
        self.written.less(lost);
        self.copied = Work::default();
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(interval: u64, write: u64, copy_interval: u64) -> Policy {
        let copies = if copy_interval > 0 { 2 } else { 0 };
        Policy { interval, write, copies, copy_interval, ..Policy::named("wait").unwrap() }
    }

    #[test]
    fn in_one_go_or_in_pieces_is_the_same() {
        let policy = policy(100, 7, 0);
        for total in [1u64, 99, 100, 103, 107, 108, 500, 1069, 1070] {
            let mut whole = UnsavedWork::default();
            let (all, stopped) = whole.run(&policy, total, 3, 5);
            let (mut pieces, mut sum, mut stops) = (UnsavedWork::default(), 0, 0);
            for _ in 0..total {
                let (work, stopped) = pieces.run(&policy, 1, 3, 5);
                (sum, stops) = (sum + work.nodes, stops + stopped);
            }
            assert_eq!((all.nodes, stopped), (sum, stops), "{total}");
            assert_eq!(whole.fail(&policy, true), pieces.fail(&policy, true), "{total}");
        }
    }

    #[test]
    fn what_was_written_or_copied_is_safe() {
        let none = policy(100, 7, 0);
        let mut unsaved = UnsavedWork::default();
        unsaved.run(&none, 106, 2, 1);
        assert_eq!(unsaved.fail(&none, true).micros, 100, "the checkpoint was not complete");
        unsaved.run(&none, 150, 2, 1);
        assert_eq!(unsaved.fail(&none, true).nodes, 86, "43 microseconds on 2 nodes");
        let copies = policy(100, 0, 10);
        let mut unsaved = UnsavedWork::default();
        unsaved.run(&copies, 57, 2, 1);
        assert_eq!(unsaved.fail(&copies, true).micros, 7);
        assert_eq!(unsaved.fail(&copies, false).micros, 50, "and then the copies are gone, too");
    }
}
