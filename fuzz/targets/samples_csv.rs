//! Tables of samples as CSV (`everstep/detect/csv.rs`, `table.rs`). An input is a file.
//!
//! Reading must not panic, and series must have the machines of the table.
#![cfg_attr(fuzzing, no_main)]

use everstep::detect::csv::rows;
use everstep_fuzz::samples;
use std::io::Cursor;

everstep_fuzz::target!(check);

fn check(input: &[u8]) {
    if let Ok(rows) = rows(Cursor::new(input.to_vec())) {
        samples::check(rows);
    }
}
