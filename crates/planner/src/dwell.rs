//! How long a plan stays before the next one that nobody needs: nodes that come back do not move jobs to and fro.

use super::Problem;
use std::time::Duration;

/// The time until the next change of its kind is at least so many times what a change takes.
const TIMES: u32 = 50;

impl Problem {
    /// So long after a change the next one may be made that is not needed: for a node that joins, never for one that failed. Fifty times what
    /// it takes the slowest job to go on: 2 % of the time at most.
    #[must_use]
    pub fn dwell(&self) -> Duration {
        let slowest = self.jobs.iter().map(|job| job.moves.regroup + job.moves.state).max();
        slowest.unwrap_or_default() * TIMES
    }
}
