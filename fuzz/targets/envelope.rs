//! Lines between agents and the coordinator (`wire/envelope.rs`, `LineSplitter`). An input is a
//! stream of them. A line may lack its checksum, which mutations would hardly ever get right.
//!
//! The same lines must come out however the stream is cut. Decoding a line must not panic, and a
//! message that was read is written in a form that is read as the same.
#![cfg_attr(fuzzing, no_main)]

use everstep_wire::client::LineSplitter;
use everstep_wire::envelope::{ToAgent, ToCoordinator, decode, decode_first, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

everstep_fuzz::target!(check);

fn check(input: &[u8]) {
    let lines = split(input, input.len().max(1));
    for cut in [1, 7] {
        assert_eq!(split(input, cut), lines);
    }
    for line in &lines {
        assert_stable::<ToCoordinator>(line);
        assert_stable::<ToAgent>(line);
        if let Some(message) = decode_first(line) {
            assert_written(&message);
        }
        if let Some(line) = with_checksum(line) {
            assert_stable::<ToCoordinator>(&line);
            assert_stable::<ToAgent>(&line);
        }
    }
}

fn split(stream: &[u8], cut: usize) -> Vec<Vec<u8>> {
    let mut splitter = LineSplitter::default();
    let lines = stream.chunks(cut).flat_map(|piece| splitter.push(piece)).collect();
    assert!(!splitter.overflowed(), "no input is as long as a line may be");
    lines
}

/// Adds the checksum to a line that is JSON.
fn with_checksum(line: &[u8]) -> Option<Vec<u8>> {
    let json = RawValue::from_string(std::str::from_utf8(line).ok()?.to_owned()).ok()?;
    encode(&json).ok().map(|line| without_newline(&line).to_vec())
}

fn without_newline(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\n").expect("a line ends with a newline")
}

fn assert_stable<T: Serialize + DeserializeOwned>(line: &[u8]) {
    if let Some(message) = decode::<T>(line) {
        assert_written(&message);
    }
}

/// Asserts that a message is written in a form that is read and written as the same.
fn assert_written<T: Serialize + DeserializeOwned>(message: &T) {
    let written = encode(message).expect("what was read can be written");
    let again: T = decode(without_newline(&written)).expect("what was written can be read");
    assert_eq!(encode(&again).expect("what was read can be written"), written);
}
