//! A parser with a planted bug, for the control arm of the figure `house-fuzz`: it believes the
//! length that a record claims. To reach the bug, an input needs six particular bytes. Random
//! inputs do not have them; a fuzzer that sees which inputs get further finds them one by one.
#![cfg_attr(fuzzing, no_main)]

everstep_fuzz::target!(check);

fn check(input: &[u8]) {
    let Some(record) = after(input, b'r') else { return };
    let Some(record) = after(record, b'e') else { return };
    let Some(record) = after(record, b'c') else { return };
    let Some(record) = after(record, b'o') else { return };
    let Some(record) = after(record, b'r') else { return };
    let Some(record) = after(record, b'd') else { return };
    let Some((length, name)) = record.split_first() else { return };
    // The bug. It should be `get`, as everywhere else.
    std::hint::black_box(&name[..usize::from(*length)]);
}

/// Returns what follows `byte`. It is not inlined, because the compiler would compare all bytes at
/// once.
#[inline(never)]
fn after(input: &[u8], byte: u8) -> Option<&[u8]> {
    input.split_first().filter(|(first, _)| **first == byte).map(|(_, rest)| rest)
}
