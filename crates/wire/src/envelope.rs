//! Lines on the held stream between an agent and the coordinator: a checksum and one JSON object per line.
//!
//! TCP's own checksum misses some flipped bits, and a digest that arrives changed would accuse a healthy rank of
//! silent corruption. A line that does not fit its checksum ends the connection; what matters is said again on the
//! next one.

use everstep_core::id::{Epoch, Generation};
use everstep_core::ledger::Account;
use everstep_core::message::{Hello, Order, Report};
use everstep_core::stacks::Stack;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of everything in this file.
pub const VERSION: u32 = 6;

/// Hexadecimal digits of a line's checksum, and the space behind them.
const SUM_BYTES: usize = 9;

/// A message as a line, with its checksum in front.
///
/// # Errors
/// Those of the encoder.
pub fn encode<T: Serialize>(message: &T) -> serde_json::Result<Vec<u8>> {
    let mut line = vec![b' '; SUM_BYTES];
    serde_json::to_writer(&mut line, message)?;
    let sum = format!("{:08x}", crc32fast::hash(&line[SUM_BYTES..]));
    line[..SUM_BYTES - 1].copy_from_slice(sum.as_bytes());
    line.push(b'\n');
    Ok(line)
}

/// The message of a line without its newline; `None`: the line is damaged, or from something else.
#[must_use]
pub fn decode<T: serde::de::DeserializeOwned>(line: &[u8]) -> Option<T> {
    let (sum, body) = line.split_at_checked(SUM_BYTES)?;
    let given = u32::from_str_radix(std::str::from_utf8(sum).ok()?.strip_suffix(' ')?, 16).ok()?;
    if given != crc32fast::hash(body) {
        return None;
    }
    serde_json::from_slice(body).ok()
}

/// The first line of an agent: one of an everstep whose lines had no checksums is understood as far as its version, to
/// be refused in words.
#[must_use]
pub fn decode_first(line: &[u8]) -> Option<ToCoordinator> {
    let old = || {
        serde_json::from_slice(line)
            .ok()
            .filter(|m| matches!(m, ToCoordinator::Hello { version, .. } if *version < VERSION))
    };
    decode(line).or_else(old)
}

/// What a worker is doing, for status; decisions do not rest on it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Global rank.
    pub rank: u32,
    /// Process id on its node.
    pub pid: u32,
    /// Steps completed, if the worker reports them.
    pub step: Option<u64>,
    /// They are counted since the process started: where the script went on from is not known.
    #[serde(default)]
    pub counted: bool,
    /// Median step time in milliseconds.
    pub step_ms: Option<u64>,
    /// Length of the last step in microseconds.
    #[serde(default)]
    pub step_us: Option<u64>,
    /// The part of it that this rank did not spend waiting for others.
    #[serde(default)]
    pub own_us: Option<u64>,
    /// A process with torch imported is ready to take its place.
    #[serde(default)]
    pub warm: bool,
    /// Newest step sealed in memory.
    pub sealed: Option<u64>,
    /// What it is doing: `starting`, `step`, `section NAME`, `stopped`, `exited`.
    pub doing: String,
}

/// A fault that a person asks for, to see what happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Injected {
    /// The worker is killed.
    Kill,
    /// The worker is stopped (SIGSTOP).
    Hang,
    /// The worker runs a part of the time only.
    Slow {
        /// of the time, 1 to 99
        percent: u8,
    },
    /// The worker is killed, and the kernel's log says that it was for memory.
    Oom,
    /// The kernel's log tells of an error of a GPU.
    Xid {
        /// its number
        code: u32,
    },
    /// Nothing passes between the agent and the coordinator.
    Netsplit,
    /// Durable storage is full.
    DiskFull,
    /// A byte of a copy that the node keeps of another one's shard changes.
    CorruptReplica,
}

/// What is to be broken, where, for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Injection {
    /// What.
    pub fault: Injected,
    /// The rank; faults of a machine happen on the one that it is on.
    pub rank: u32,
    /// For how long, in milliseconds, where it does not last by itself.
    pub milliseconds: u64,
}

/// From an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToCoordinator {
    /// First line on a connection.
    Hello {
        /// [`VERSION`] of the sender.
        version: u32,
        /// Who it is.
        hello: Box<Hello>,
    },
    /// Something happened.
    Report(Report),
    /// Where the workers of this node are.
    Stacks {
        /// their generation
        generation: Generation,
        /// by rank
        stacks: BTreeMap<u32, Stack>,
    },
    /// Where the time of a node's places went: the latest generations, in totals.
    Spent(Vec<Account>),
    /// What a second of this machine was like: metrics by their number in the catalogue, packed.
    Samples {
        /// When, by the sender's clock, in milliseconds since 1970.
        at: u64,
        /// What the workers of this machine do: the same on machines that can be compared; 0: as before.
        #[serde(default, skip_serializing_if = "is_zero")]
        role: u32,
        /// Five bytes each (number, value), as base64.
        packed: String,
    },
    /// What the network has carried lately, at 100 Hz: the answer to [`ToAgent::Burst`].
    Burst(Vec<(u64, u64, u64)>),
    /// Still here.
    Ping(Vec<Progress>),
}

fn is_zero(role: &u32) -> bool {
    *role == 0
}

/// From the coordinator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToAgent {
    /// Something to do.
    Order {
        /// Life of the coordinator.
        epoch: Epoch,
        /// What.
        order: Order,
    },
    /// Break something.
    Inject(Injection),
    /// Say where the workers are.
    Stacks,
    /// Say what the network has carried in the last minute.
    Burst,
    /// Still here.
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
            // The case of a checksum's own digits does not change it.
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
