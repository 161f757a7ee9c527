//! The jobs and the cluster to plan for, and the value of a job on a number of units.

use std::sync::Arc;
use std::time::Duration;

/// One hour in milliseconds.
const HOUR: i64 = 3_600_000;
/// Limit for gains: more than seventy million units' peaks during an hour make no difference.
const GAIN: i64 = 1 << 46;
/// Longest time for which a plan is assumed to hold.
const LONGEST: Duration = Duration::from_hours(24);

/// The objective of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Running jobs keep their minimum, then waiting jobs get theirs, by weight. The remaining
    /// units go where they add most.
    #[default]
    Floor,
    /// The paper's objective (equations 2 to 4): below its minimum a job has no throughput, and it
    /// may be given no units.
    Paper,
    /// Like `Floor`, but with the square root of each job's throughput, which favors small jobs.
    Fair,
}

/// The times a job needs to continue with other units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Move {
    /// Time to form a new process group from existing units.
    pub regroup: Duration,
    /// Additional time if units join: to copy the state to them.
    pub state: Duration,
    /// Additional time if a worker failed: to detect the failure, and to repeat lost steps.
    pub lost: Duration,
}

/// One job to plan for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Unique id, which also breaks ties.
    pub id: String,
    /// Weight in thousandths; usually 1000 (Unicron: 500 to 2000).
    pub weight: u32,
    /// Minimum number of units.
    pub min: u32,
    /// Current number of units; 0: the job waits.
    pub current: u32,
    /// One of its workers has failed.
    pub hit: bool,
    /// Throughput on `k` units, in millionths of one unit's peak. The job cannot use more units
    /// than there are values. Shared, so that problems with the same values compare quickly.
    pub achieved: Arc<[i64]>,
    /// Times to continue with other units.
    pub moves: Move,
}

/// The rates of the events that lead to a new plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Mean time between failures of one unit.
    pub unit_mtbf: Option<Duration>,
    /// Mean time until the next new job.
    pub arrival: Option<Duration>,
    /// Expected time until each unit under repair is back.
    pub repairs: Vec<Duration>,
    /// Expected time until each job is done.
    pub finishes: Vec<Duration>,
    /// Minimum time for which a plan is assumed to hold, such as ten transitions.
    pub at_least: Duration,
}

/// A planning problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Number of units available.
    pub units: u32,
    /// The jobs, in any order.
    pub jobs: Vec<Job>,
    /// The objective.
    pub mode: Mode,
    /// The rates of events that lead to a new plan.
    pub rates: Rates,
}

/// Integrates a rate over some milliseconds, in the rate's unit times an hour.
fn during(rate: i64, millis: i64) -> i64 {
    match rate.checked_mul(millis) {
        Some(product) => product / HOUR,
        None => i64::try_from(i128::from(rate) * i128::from(millis) / i128::from(HOUR)).unwrap_or(i64::MAX),
    }
}

impl Job {
    /// Returns the time until the job continues with `k` units; zero if nothing changes for it.
    pub(super) fn transition(&self, k: u32) -> Duration {
        if k == self.current && !self.hit {
            return Duration::ZERO;
        }
        let joins = if k > self.current || self.hit { self.moves.state } else { Duration::ZERO };
        let lost = if self.hit { self.moves.lost } else { Duration::ZERO };
        self.moves.regroup + joins + lost
    }

    /// Returns the weighted throughput in millionths of a unit's peak (equation 2); zero below the
    /// minimum.
    fn value(&self, k: u32) -> i64 {
        let achieved = self.achieved.get(k as usize).copied().unwrap_or(0);
        let enough = k > 0 && k >= self.min;
        if enough { achieved.max(0).saturating_mul(i64::from(self.weight)) / 1000 } else { 0 }
    }

    /// Returns the largest number of units that the job can use.
    #[must_use]
    pub fn most(&self) -> u32 {
        u32::try_from(self.achieved.len().saturating_sub(1)).unwrap_or(u32::MAX)
    }
}

impl Problem {
    /// Returns how long a plan is expected to hold (the paper's `D_running`): until the next
    /// failure, arrival, repair or end of a job.
    #[must_use]
    pub fn horizon(&self) -> Duration {
        let r = &self.rates;
        // Events in 2^80 microseconds.
        let per = |mean: &Duration| (1u128 << 80) / mean.as_micros().max(1);
        let failures = r.unit_mtbf.as_ref().map_or(0, |m| per(m).saturating_mul(self.units.into()));
        let events = [failures, r.arrival.as_ref().map_or(0, per)].into_iter();
        let all: u128 = events.chain(r.repairs.iter().map(per)).chain(r.finishes.iter().map(per)).sum();
        let micros = (1u128 << 80).checked_div(all).unwrap_or(u128::MAX);
        let expected = Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX));
        expected.min(LONGEST).max(r.at_least)
    }

    /// Returns the gain of a job on `k` units while a plan holds, in millionths of a unit's peak
    /// during an hour (equation 3).
    ///
    /// Except in `Paper`, the throughput counts from the end of the transition on, instead of
    /// subtracting the previous throughput for its duration: a starting job pays for its
    /// transition, too.
    #[must_use]
    pub fn gain(&self, job: &Job, k: u32, horizon: Duration) -> i64 {
        let millis = |of: Duration| i64::try_from(of.as_millis()).unwrap_or(i64::MAX);
        let (lasts, takes) = (millis(horizon), millis(job.transition(k)));
        let left = lasts.saturating_sub(takes).max(0);
        let gain = match self.mode {
            Mode::Paper => during(job.value(k), lasts).saturating_sub(during(job.value(job.current), takes)),
            Mode::Floor => during(job.value(k), left),
            Mode::Fair => {
                let root = job.value(k).unsigned_abs().saturating_mul(1_000_000).isqrt();
                during(i64::try_from(root).unwrap_or(i64::MAX), left)
            }
        };
        gain.clamp(-GAIN, GAIN)
    }
}
