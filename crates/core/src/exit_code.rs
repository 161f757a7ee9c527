//! The exit codes of everstep. A job that a signal has stopped ends with 128 + its number instead.

/// An exit code of a job or of a command. 69, 75 and 78 mean what they mean in `sysexits.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitCode {
    /// The job is done, or a check found nothing.
    Done = 0,
    /// The job failed and is not restarted, a command failed, or a check found something.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// No coordinator could be reached (`EX_UNAVAILABLE`).
    Unavailable = 69,
    /// The job can continue later, or on other machines: requeue it (`EX_TEMPFAIL`).
    Requeue = 75,
    /// Something around the job must be fixed first, such as a directory that another job owns
    /// (`EX_CONFIG`).
    Refused = 78,
    /// The job would fail the same way again: do not requeue it.
    SameAgain = 93,
}

impl ExitCode {
    /// Returns the number that the process ends with.
    #[must_use]
    pub const fn number(self) -> i32 {
        self as i32
    }
}
