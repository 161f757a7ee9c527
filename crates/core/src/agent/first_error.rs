//! Which worker's error an agent ends with: its exit code, and the error file that is passed on.

use crate::message::Outcome;

/// The worker of this node that failed first in an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstError {
    /// Number of restarts before the attempt.
    pub restarts: u32,
    /// Its rank on this node.
    pub local_rank: u32,
    /// Its exit code; negative for a signal.
    pub code: i32,
}

/// A worker process that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EndedWorker {
    /// Number of restarts before its attempt.
    pub restarts: u32,
    /// Its rank on this node.
    pub local_rank: u32,
    /// Exit code or signal of the process.
    pub outcome: Outcome,
    /// Whether it has reported an uncaught exception.
    pub raised: bool,
}

impl FirstError {
    /// Returns the first error after a worker has ended. The latest attempt counts, and within it
    /// the first failure.
    pub(super) fn after(known: Option<FirstError>, ended: EndedWorker) -> Option<FirstError> {
        let EndedWorker { restarts, local_rank, outcome, raised } = ended;
        let code = match outcome {
            Outcome::Code(0) => return known,
            // An uncaught exception is exit code 1, even if the shutdown had to be cut short.
            _ if raised => 1,
            Outcome::Code(code) => code,
            Outcome::Signal(signal) => -signal,
        };
        known.filter(|first| first.restarts == restarts).or(Some(FirstError { restarts, local_rank, code }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(restarts: u32, local_rank: u32, outcome: Outcome) -> EndedWorker {
        EndedWorker { restarts, local_rank, outcome, raised: false }
    }

    /// Returns the attempt, worker and exit code that count after these ends.
    fn first(ends: &[EndedWorker]) -> Option<(u32, u32, i32)> {
        let first = ends.iter().fold(None, |known, ended| FirstError::after(known, *ended));
        first.map(|of| (of.restarts, of.local_rank, of.code))
    }

    #[test]
    fn the_first_failure_of_the_latest_attempt_counts() {
        let (code, signal) = (ended(0, 3, Outcome::Code(7)), ended(0, 1, Outcome::Signal(9)));
        assert_eq!(first(&[code, signal]), Some((0, 3, 7)));
        assert_eq!(first(&[signal, code]), Some((0, 1, -9)));
        assert_eq!(
            first(&[code, signal, ended(1, 2, Outcome::Code(4)), ended(1, 0, Outcome::Code(5))]),
            Some((1, 2, 4))
        );
    }

    #[test]
    fn a_worker_that_ends_well_is_no_error() {
        let well = ended(1, 0, Outcome::Code(0));
        assert_eq!(first(&[well]), None);
        assert_eq!(first(&[ended(0, 1, Outcome::Code(2)), well]), Some((0, 1, 2)));
    }

    #[test]
    fn an_uncaught_exception_is_exit_code_1_however_the_process_ends() {
        for outcome in [Outcome::Signal(15), Outcome::Code(120)] {
            assert_eq!(first(&[EndedWorker { raised: true, ..ended(0, 0, outcome) }]), Some((0, 0, 1)));
        }
    }
}
