//! Lines on the long-lived stream between an agent and the coordinator. Each line is a checksum and
//! a JSON object.
//!
//! TCP's own checksum misses some flipped bits, and a digest that changed in transit would accuse a
//! healthy rank of silent corruption. A line that does not match its checksum ends the connection;
//! whatever matters is repeated on the next one.

use everstep_core::id::{Epoch, Generation};
use everstep_core::injection::Injection;
use everstep_core::ledger::Account;
use everstep_core::message::{Hello, Order, Report};
use everstep_core::progress::RankProgress;
use everstep_core::stacks::Stack;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of the messages in this module.
pub const VERSION: u32 = 12;

/// Length of a line's prefix: the checksum in hexadecimal digits, and a space.
const SUM_BYTES: usize = 9;

/// Encodes a message as a line, with its checksum in front.
///
/// # Errors
/// Errors of the JSON encoder.
pub fn encode<T: Serialize>(message: &T) -> serde_json::Result<Vec<u8>> {
    let mut line = vec![b' '; SUM_BYTES];
    serde_json::to_writer(&mut line, message)?;
    let sum = format!("{:08x}", crc32fast::hash(&line[SUM_BYTES..]));
    line[..SUM_BYTES - 1].copy_from_slice(sum.as_bytes());
    line.push(b'\n');
    Ok(line)
}

/// Decodes a line without its newline. Returns `None` if it is damaged or not such a message.
#[must_use]
pub fn decode<T: serde::de::DeserializeOwned>(line: &[u8]) -> Option<T> {
    let (sum, body) = line.split_at_checked(SUM_BYTES)?;
    let given = u32::from_str_radix(std::str::from_utf8(sum).ok()?.strip_suffix(' ')?, 16).ok()?;
    if given != crc32fast::hash(body) {
        return None;
    }
    serde_json::from_slice(body).ok()
}

/// Decodes the first line of an agent. Older versions sent lines without checksums; their greeting
/// is still understood, so that they can be refused with a message.
#[must_use]
pub fn decode_first(line: &[u8]) -> Option<ToCoordinator> {
    let old = || {
        serde_json::from_slice(line)
            .ok()
            .filter(|m| matches!(m, ToCoordinator::Hello { version, .. } if *version < VERSION))
    };
    decode(line).or_else(old)
}

/// A message from an agent to the coordinator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToCoordinator {
    /// The first line of a connection.
    Hello {
        /// [`VERSION`] of the sender.
        version: u32,
        /// The agent's node, spec and state.
        hello: Box<Hello>,
    },
    /// An event on the agent's node.
    Report(Report),
    /// Stacks of the node's workers.
    Stacks {
        /// Generation of the workers.
        generation: Generation,
        /// Stacks by global rank.
        stacks: BTreeMap<u32, Stack>,
    },
    /// Where the time of the node's places went: the totals of the latest generations.
    Spent(Vec<Account>),
    /// One second of samples from this machine: values by their metric's index in the catalogue.
    Samples {
        /// Time by the sender's clock, in milliseconds since 1970.
        at: u64,
        /// What the workers of this machine do: equal on machines that can be compared. 0:
        /// unchanged.
        #[serde(default, skip_serializing_if = "is_zero")]
        role: u32,
        /// The samples in base64, five bytes each: index and value.
        packed: String,
    },
    /// The answer to [`ToAgent::Burst`]: network traffic at 100 Hz, each sample being the time in
    /// milliseconds since 1970 and the bytes received and sent so far.
    Burst(Vec<(u64, u64, u64)>),
    /// Keep-alive, with the progress of the workers of this generation.
    Ping {
        /// Generation of the workers.
        generation: Generation,
        /// Progress of each rank.
        ranks: Vec<RankProgress>,
    },
}

fn is_zero(role: &u32) -> bool {
    *role == 0
}

/// A message from the coordinator to an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToAgent {
    /// An order to carry out.
    Order {
        /// The coordinator's epoch: one life of the coordinator.
        epoch: Epoch,
        /// The order to carry out.
        order: Order,
    },
    /// Injects a fault.
    Inject(Injection),
    /// Requests the stacks of the workers.
    Stacks,
    /// Requests the network traffic of the last minute.
    Burst,
    /// Keep-alive; it is not answered.
    Ping,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_a_flipped_bit_is_not_read() {
        let line = encode(&ToCoordinator::Burst(vec![(1, 22, 333), (4, 55, 666)])).unwrap();
        let line = line.strip_suffix(b"\n").unwrap();
        assert!(matches!(decode::<ToCoordinator>(line), Some(ToCoordinator::Burst(looks)) if looks.len() == 2));
        for bit in 0..line.len() * 8 {
            let mut damaged = line.to_vec();
            damaged[bit / 8] ^= 1 << (bit % 8);
            // The case of a checksum's own digits does not matter.
            let same = damaged.eq_ignore_ascii_case(line) && bit / 8 < SUM_BYTES;
            assert_eq!(decode::<ToCoordinator>(&damaged).is_some(), same, "bit {bit}");
        }
    }

    #[test]
    fn lines_without_a_checksum_are_read_of_other_versions_only() {
        let line = |version: u32| format!("{{\"Ping\":[{version}]}}").into_bytes();
        assert!(decode_first(&line(5)).is_none() && decode::<ToCoordinator>(b"[]").is_none());
    }
}
