//! Failure tables and what they classify (`core/severity/`). An input is a table as TOML, a zero
//! byte, and a text that a worker or the kernel has written.
//!
//! Reading a table and classifying a text must not panic, and the line that is shown must be one of
//! the text. A table that was read is written in a form that is read as the same, and extends the
//! built-in table by its rows.
#![cfg_attr(fuzzing, no_main)]

use everstep_core::message::{Cause, Outcome};
use everstep_core::severity::Table;
use everstep_fuzz::json::assert_stable;

everstep_fuzz::target!(check);

fn check(input: &[u8]) {
    let Ok(input) = std::str::from_utf8(input) else { return };
    let (written, text) = input.split_once('\0').unwrap_or((input, input));
    classify(Table::built_in(), text);
    let both = Table::built_in().with(written);
    if let Ok(own) = Table::read(written) {
        assert_stable(&own);
        classify(&own, text);
        let both = both.expect("a table that stands alone extends another one");
        assert_eq!(both.rules.len(), own.rules.len() + Table::built_in().rules.len());
    }
}

fn classify(table: &Table, text: &str) {
    if let Some(found) = table.classify(text) {
        assert!(text.lines().any(|line| line.trim() == found.line), "{found:?}");
        assert!(table.class(&found.class.name).is_some(), "{found:?}");
    }
    let verdict = table.judge(&Cause::Exited(Outcome::Code(1)), text);
    assert!(verdict.line.is_empty() || text.contains(&verdict.line), "{verdict:?}");
    // The kernel's log is read line by line.
    if let Some(line) = text.lines().next() {
        let _ = table.sign(line);
    }
}
