//! Why a plan gives each job what it gives it: as data, for people and for tests.

use super::problem::{Job, Mode, Problem};
use super::solve::{Plan, in_order};
use std::time::Duration;

/// What a plan does with a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// It keeps its units.
    Kept,
    /// It begins.
    Started,
    /// It gets more.
    Grown,
    /// It gives some away.
    Shrunk,
    /// It is stopped: others are worth more, or its minimum is not there.
    Stopped,
    /// It waits on: its minimum is not there, or others are worth more.
    Waits,
}

/// What keeps a job from having other units, where the numbers do not say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// It has its minimum, and is given no less.
    Minimum,
    /// It can use no more.
    Most,
    /// Its minimum is more than there is for it.
    Lacks {
        /// how many units it needs
        needs: u32,
    },
}

/// One job in a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    /// Which.
    pub job: String,
    /// Units before and after.
    pub units: (u32, u32),
    /// What is done.
    pub done: Done,
    /// What else there is to say.
    pub limit: Option<Limit>,
    /// How long it takes until it goes on.
    pub transition: Duration,
    /// What it gains while the plan holds, in millionths of a unit's peak during an hour.
    pub gain: i64,
    /// What it would gain as it is now, if that could stay.
    pub before: i64,
    /// What one more unit, and one less, would change about that; `None` where it cannot be.
    pub margin: (Option<i64>, Option<i64>),
}

/// For each job, in the order of their ids.
#[must_use]
pub fn reasons(problem: &Problem, plan: &Plan) -> Vec<Reason> {
    let horizon = problem.horizon();
    let of = |job: &Job| {
        let to = plan.units.get(&job.id).copied().unwrap_or(0);
        let gain = |k: u32| problem.gain(job, k, horizon);
        let floor = if problem.mode == Mode::Paper { 0 } else { job.min };
        let less = to.checked_sub(1).filter(|k| *k >= floor);
        let more = (to < job.most()).then_some(to + 1);
        Reason {
            job: job.id.clone(),
            units: (job.current, to),
            done: match (job.current, to) {
                (0, 0) => Done::Waits,
                (0, _) => Done::Started,
                (_, 0) => Done::Stopped,
                (from, to) if to > from => Done::Grown,
                (from, to) if to < from => Done::Shrunk,
                _ => Done::Kept,
            },
            limit: match to {
                0 if job.min > 0 => Some(Limit::Lacks { needs: job.min }),
                k if k > 0 && k == floor => Some(Limit::Minimum),
                k if k > 0 && k == job.most() => Some(Limit::Most),
                _ => None,
            },
            transition: if to > 0 { job.transition(to) } else { Duration::ZERO },
            gain: gain(to),
            before: gain(job.current),
            margin: (more.map(|k| gain(k) - gain(to)), less.map(|k| gain(k) - gain(to))),
        }
    };
    in_order(problem).into_iter().map(of).collect()
}
