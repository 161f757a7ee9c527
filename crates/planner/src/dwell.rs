//! The minimum time between plans that are not urgent, so that returning nodes do not move jobs
//! back and forth.

use super::Problem;
use std::time::Duration;

/// Minimum time until the next change that is not urgent, in multiples of the time a change takes.
const TIMES: u32 = 50;

impl Problem {
    /// Returns the time after a change until the next one that is not urgent: for a node that
    /// joins, never for one that failed. It is fifty times as long as the slowest job takes to
    /// continue, so changes take at most 2 % of the time.
    #[must_use]
    pub fn dwell(&self) -> Duration {
        let slowest = self.jobs.iter().map(|job| job.moves.regroup + job.moves.state).max();
        slowest.unwrap_or_default() * TIMES
    }
}
