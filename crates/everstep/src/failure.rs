//! An error that ends a command.

use everstep_core::exit_code::ExitCode;

/// An error that ends a command: its exit code, and a sentence that names the remedy.
pub struct Failure {
    pub code: i32,
    pub why: String,
}

impl Failure {
    pub fn new(code: ExitCode, why: impl std::fmt::Display) -> Self {
        Failure { code: code.number(), why: why.to_string() }
    }

    /// Wrong arguments.
    pub fn usage(why: impl std::fmt::Display) -> Self {
        Failure::new(ExitCode::Usage, why)
    }

    /// Something on this machine that the command cannot work with.
    pub fn config(why: impl std::fmt::Display) -> Self {
        Failure::new(ExitCode::Refused, why)
    }

    /// Prints the sentence and returns the exit code.
    pub fn end(self) -> i32 {
        tracing::error!("{}", self.why);
        self.code
    }
}
