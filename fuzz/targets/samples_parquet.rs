//! Tables of samples as Parquet (`everstep/detect/parquet.rs`, `footer.rs`, `table.rs`). An input
//! is a file.
//!
//! Reading must not panic, and series must have the machines of the table. Panics of the `parquet`
//! crate must be caught.
#![cfg_attr(fuzzing, no_main)]

use bytes::Bytes;
use everstep::detect::parquet::rows;
use everstep_fuzz::samples;

/// The format lets a page claim 2 GiB, and the crate reserves them before it unpacks the page.
const MEMORY: usize = 3 << 30;

everstep_fuzz::target!(check, memory = MEMORY);

fn check(input: &[u8]) {
    #[cfg(fuzzing)]
    let_panics_be_caught();
    if let Ok(rows) = rows(Bytes::copy_from_slice(input)) {
        samples::check(rows);
    }
}

/// Replaces the hook of libFuzzer, which ends the process at once. A panic that nobody catches
/// still ends it.
#[cfg(fuzzing)]
fn let_panics_be_caught() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| std::panic::set_hook(Box::new(|_| {})));
}
