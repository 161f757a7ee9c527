//! Lines to the standard streams. Those of the standard library panic when the reader is gone or the disk is full: a job would end
//! because nobody reads along.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

/// What a shell shows of a program that SIGPIPE ended.
const NOBODY_READS: i32 = 141;

/// To standard error, where there is nobody to tell if that fails.
pub fn err(text: Arguments<'_>) {
    let _ = std::io::stderr().lock().write_fmt(text);
}

/// To standard output: a command whose answer cannot be written has failed.
pub fn out(text: Arguments<'_>) {
    match std::io::stdout().lock().write_fmt(text) {
        Ok(()) => {}
        Err(e) if e.kind() == ErrorKind::BrokenPipe => std::process::exit(NOBODY_READS),
        Err(e) => {
            err(format_args!("everstep: cannot write to standard output: {e}\n"));
            std::process::exit(1);
        }
    }
}

// These names hide the standard library's in the whole program.
macro_rules! eprintln {
    ($text:literal $($rest:tt)*) => { $crate::print::err(format_args!("{}\n", format_args!($text $($rest)*))) };
}
macro_rules! print {
    ($($text:tt)*) => { $crate::print::out(format_args!($($text)*)) };
}
macro_rules! println {
    ($text:literal $($rest:tt)*) => { $crate::print::out(format_args!("{}\n", format_args!($text $($rest)*))) };
}
