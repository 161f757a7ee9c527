//! What must hold of messages that are read from JSON and written as JSON.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// Asserts that a message which was read is written in a form that is read as the same message.
///
/// # Panics
/// If it is not.
pub fn assert_stable<T: Serialize + DeserializeOwned + PartialEq + Debug>(message: &T) {
    let written = serde_json::to_vec(message).expect("what was read can be written");
    let again: T = serde_json::from_slice(&written).expect("what was written can be read");
    assert_eq!(&again, message);
}
