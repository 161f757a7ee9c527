//! Output to the standard streams. The standard library's macros panic if the reader is gone or the
//! disk is full, and a job must not end because its output is not read.

use everstep_core::exit_code::ExitCode;
use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

/// The exit code that a shell shows for a program ended by SIGPIPE.
const NOBODY_READS: i32 = 141;

/// Writes to standard error. If that fails, there is nowhere to report it.
pub fn err(text: Arguments<'_>) {
    let _ = std::io::stderr().lock().write_fmt(text);
}

/// Writes to standard output. A command whose answer cannot be written has failed.
pub fn out(text: Arguments<'_>) {
    match std::io::stdout().lock().write_fmt(text) {
        Ok(()) => {}
        Err(e) if e.kind() == ErrorKind::BrokenPipe => std::process::exit(NOBODY_READS),
        Err(e) => {
            tracing::error!("cannot write to standard output: {e}");
            crate::log::flush();
            std::process::exit(ExitCode::Failed.number());
        }
    }
}

// These names shadow the standard library's in the whole program.
macro_rules! eprintln {
    ($text:literal $($rest:tt)*) => { $crate::print::err(format_args!("{}\n", format_args!($text $($rest)*))) };
}
macro_rules! print {
    ($($text:tt)*) => { $crate::print::out(format_args!($($text)*)) };
}
macro_rules! println {
    ($text:literal $($rest:tt)*) => { $crate::print::out(format_args!("{}\n", format_args!($text $($rest)*))) };
}
