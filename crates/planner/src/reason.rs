//! Why a plan gives each job its number of units, as data for people and for tests.

use super::problem::{Job, Mode, Problem};
use super::solve::{Plan, in_order};
use std::time::Duration;

/// What a plan does with a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// The job keeps its units.
    Kept,
    /// The job starts.
    Started,
    /// The job gets more units.
    Grown,
    /// The job gives up some units.
    Shrunk,
    /// The job is stopped: other jobs are worth more, or its minimum is not available.
    Stopped,
    /// The job keeps waiting: its minimum is not available, or other jobs are worth more.
    Waits,
}

/// What keeps a job from having other units, where the numbers do not show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The job has its minimum, and is not given less.
    Minimum,
    /// The job cannot use more units.
    Most,
    /// The minimum of the job is not available.
    Lacks {
        /// Number of units that it needs.
        needs: u32,
    },
}

/// The explanation for one job in a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    /// Id of the job.
    pub job: String,
    /// Units before and after.
    pub units: (u32, u32),
    /// What the plan does with it.
    pub done: Done,
    /// What limits its units, if anything.
    pub limit: Option<Limit>,
    /// Time until the job continues.
    pub transition: Duration,
    /// Gain while the plan holds, in millionths of a unit's peak during an hour.
    pub gain: i64,
    /// Gain with its current units, if it could keep them.
    pub before: i64,
    /// Change of the gain with one more and with one fewer unit; `None` where that is impossible.
    pub margin: (Option<i64>, Option<i64>),
}

/// Explains a plan for each job, in the order of their ids.
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
