//! Coverage-guided fuzzing of the parsers: everything that reads what another process, another
//! machine or a person has written.
//!
//! Each file in `targets/` is a target: a function that takes arbitrary bytes and panics if
//! something that must hold does not. `make fuzz` calls it with inputs that libFuzzer derives from
//! `corpus/`, and keeps those that reach new code. An ordinary `cargo test` calls it with the files
//! in `corpus/` and `regressions/`. Both abort if one input takes too much memory ([`heap`]).

pub mod coordinator;
pub mod heap;
pub mod json;
pub mod samples;

use std::fs;
use std::path::{Path, PathBuf};

/// The function of a target.
pub type Check = fn(&[u8]);

/// Makes a binary of a function: a fuzzer if the flags of `make fuzz` are given, otherwise a
/// program that takes files with inputs, and a test that replays the inputs that are kept.
/// `memory`: most bytes that an input may take, if the default is not enough.
#[macro_export]
macro_rules! target {
    ($check:ident) => {
        $crate::target!($check, memory = $crate::heap::LIMIT);
    };
    ($check:ident, memory = $limit:expr) => {
        #[cfg(fuzzing)]
        libfuzzer_sys::fuzz_target!(|input: &[u8]| $crate::heap::limited($limit, || $check(input)));

        #[cfg(not(fuzzing))]
        fn main() {
            $crate::replay(std::env::args_os().skip(1).map(Into::into), $limit, $check);
        }

        #[test]
        fn inputs_that_are_kept_pass() {
            let kept = $crate::kept(env!("CARGO_CRATE_NAME"));
            assert!(!kept.is_empty(), "the corpus is missing");
            $crate::replay(kept.into_iter(), $limit, $check);
        }
    };
}

/// Returns the files in the corpus and in the regressions of a target, sorted.
#[must_use]
pub fn kept(target: &str) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let entries = ["corpus", "regressions"].map(|kind| fs::read_dir(root.join(kind).join(target)));
    let mut files: Vec<PathBuf> = entries.into_iter().flatten().flatten().flatten().map(|e| e.path()).collect();
    files.sort();
    files
}

/// Calls `check` with the contents of each file, after printing its name.
///
/// # Panics
/// If a file cannot be read, or if what must hold does not.
pub fn replay(files: impl Iterator<Item = PathBuf>, limit: usize, check: Check) {
    for file in files {
        println!("{}", file.display());
        let input = fs::read(&file).unwrap_or_else(|e| panic!("cannot read {}: {e}", file.display()));
        heap::limited(limit, || check(&input));
    }
}
