//! Messages between a worker and its agent (`wire/worker.rs`). An input is the JSON of one.
//!
//! Decoding and checking must not panic. A message that was read is written in a form that is read
//! as the same. A request that passes its check asks for an amount of memory that can be computed.
#![cfg_attr(fuzzing, no_main)]

use everstep_fuzz::json::assert_stable;
use everstep_wire::frame;
use everstep_wire::worker::{Ask, Reply, Request};
use serde::de::DeserializeOwned;

everstep_fuzz::target!(check);

fn check(input: &[u8]) {
    if let Some(request) = framed::<Request>(input) {
        assert_stable(&request);
        if let (Ok(()), Ask::Reserve { slot_bytes, slots }) = (request.ask.check(), &request.ask) {
            assert!(slot_bytes.checked_mul(u64::from(*slots)).is_some(), "{request:?}");
        }
    }
    if let Some(reply) = framed::<Reply>(input) {
        assert_stable(&reply);
    }
}

/// Reads a message as it arrives: in a frame.
fn framed<T: DeserializeOwned>(json: &[u8]) -> Option<T> {
    let length = u32::try_from(json.len()).ok()?;
    frame::read(&mut [length.to_le_bytes().as_slice(), json].concat().as_slice()).ok()
}
