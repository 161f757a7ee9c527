//! What is known of jobs and cluster, and what a job is worth on so many units.

use std::sync::Arc;
use std::time::Duration;

/// Milliseconds.
const HOUR: i64 = 3_600_000;
/// More than seventy million units' peaks during an hour are as good as that.
const GAIN: i64 = 1 << 46;
/// Longest time that a plan is believed in.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// What is best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Jobs that run keep their minimum, then jobs that wait get theirs, by weight; what is left goes where it achieves most.
    #[default]
    Floor,
    /// As the paper has it (equations 2 to 4): below its minimum a job achieves nothing, and may well be given nothing.
    Paper,
    /// As `Floor`, but the square root of what a job achieves counts: more for small ones.
    Fair,
}

/// What it takes a job to go on with other units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Move {
    /// A new process group on what is there.
    pub regroup: Duration,
    /// Beside it, where units join: their state.
    pub state: Duration,
    /// Beside it, where a worker failed: noticing that, and computing again what was lost.
    pub lost: Duration,
}

/// One job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Breaks ties.
    pub id: String,
    /// In thousandths; 1000 is usual (Unicron: 500 to 2000).
    pub weight: u32,
    /// Fewest units it may have.
    pub min: u32,
    /// Units it has; 0: it waits.
    pub current: u32,
    /// One of its workers has failed.
    pub hit: bool,
    /// What it achieves on `k` units, in millionths of one unit's peak; it can use no more units than there are values for.
    /// Shared, so that two problems with the same one are known to be equal at a glance.
    pub achieved: Arc<[i64]>,
    /// What it takes to go on.
    pub moves: Move,
}

/// How often something happens that makes a new plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Mean time to the failure of one unit.
    pub unit_mtbf: Option<Duration>,
    /// Mean time to the next new job.
    pub arrival: Option<Duration>,
    /// Until units that are down are expected back, each.
    pub repairs: Vec<Duration>,
    /// Until jobs are expected to be done, each.
    pub finishes: Vec<Duration>,
    /// A plan is believed in for so long at least: ten transitions, say.
    pub at_least: Duration,
}

/// What is to be planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Units there are.
    pub units: u32,
    /// In any order.
    pub jobs: Vec<Job>,
    /// What is best.
    pub mode: Mode,
    /// How often plans are made.
    pub rates: Rates,
}

/// A rate during so many milliseconds, in the rate's unit times an hour.
fn during(rate: i64, millis: i64) -> i64 {
    match rate.checked_mul(millis) {
        Some(product) => product / HOUR,
        None => i64::try_from(i128::from(rate) * i128::from(millis) / i128::from(HOUR)).unwrap_or(i64::MAX),
    }
}

impl Job {
    /// Until it goes on with `k` units; nothing where nothing changes.
    pub(super) fn transition(&self, k: u32) -> Duration {
        if k == self.current && !self.hit {
            return Duration::ZERO;
        }
        let joins = if k > self.current || self.hit { self.moves.state } else { Duration::ZERO };
        let lost = if self.hit { self.moves.lost } else { Duration::ZERO };
        self.moves.regroup + joins + lost
    }

    /// Weighted, in millionths of a unit's peak (equation 2); nothing below the minimum.
    fn value(&self, k: u32) -> i64 {
        let achieved = self.achieved.get(k as usize).copied().unwrap_or(0);
        let enough = k > 0 && k >= self.min;
        if enough { achieved.max(0).saturating_mul(i64::from(self.weight)) / 1000 } else { 0 }
    }

    /// Most units it can use.
    #[must_use]
    pub fn most(&self) -> u32 {
        u32::try_from(self.achieved.len().saturating_sub(1)).unwrap_or(u32::MAX)
    }
}

impl Problem {
    /// How long a plan on so many units is expected to hold (the paper's `D_running`): until the next failure, arrival, repair or end.
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

    /// What a job is worth on `k` units while a plan holds, in millionths of a unit's peak during an hour (equation 3).
    ///
    /// Outside of `Paper` what is achieved counts from the end of the transition on, instead of what was achieved before being taken off:
    /// a job that begins pays for it, too.
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
