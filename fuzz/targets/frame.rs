//! Frames on Unix sockets (`wire/frame.rs`). The first byte of an input is the length of the pieces
//! in which the rest arrives.
//!
//! Taking frames from a buffer and reading them from a stream must find the same messages, however
//! the stream is cut. A frame costs the memory of the bytes that arrive, whatever length it claims.
//! A message that was read is written in a form that is read as the same.
#![cfg_attr(fuzzing, no_main)]

use everstep_fuzz::json::assert_stable;
use everstep_wire::frame;
use serde_json::Value;

everstep_fuzz::target!(check);

fn check(input: &[u8]) {
    let Some((cut, stream)) = input.split_first() else { return };
    let messages = read(stream);
    assert_eq!(taken(stream, usize::from(*cut) + 1), messages);
    for message in messages.iter().filter(|m| !has_fraction(m)) {
        assert_stable(message);
        let frame = frame::encode(message).expect("a message of a frame fits into one");
        assert_eq!(&frame::read::<Value>(&mut frame.as_slice()).expect("what was written can be read"), message);
    }
}

fn read(mut stream: &[u8]) -> Vec<Value> {
    let mut messages = Vec::new();
    while let Ok(message) = frame::read(&mut stream) {
        messages.push(message);
    }
    messages
}

fn taken(stream: &[u8], cut: usize) -> Vec<Value> {
    let (mut buffer, mut messages) = (Vec::new(), Vec::new());
    for piece in stream.chunks(cut) {
        buffer.extend_from_slice(piece);
        loop {
            match frame::take(&mut buffer) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(_) => return messages,
            }
        }
    }
    messages
}

/// Returns whether the last digit of some number may be rounded when it is read. No message has
/// such numbers.
fn has_fraction(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(values) => values.iter().any(has_fraction),
        Value::Object(fields) => fields.values().any(has_fraction),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}
