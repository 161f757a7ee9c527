//! Faults that a person injects into a running job, to observe how it reacts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A fault to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Injected {
    /// Kills the worker (SIGKILL).
    Kill,
    /// Stops the worker (SIGSTOP).
    Hang,
    /// Slows the worker, which runs only part of the time.
    Slow {
        /// Percent of the time that it runs, 1 to 99.
        percent: u8,
    },
    /// Kills the worker, and simulates the kernel's log line about running out of memory.
    Oom,
    /// Simulates a kernel log line about a GPU error.
    Xid {
        /// Xid error code.
        code: u32,
    },
    /// Cuts the connection between the agent and the coordinator.
    Netsplit,
    /// Makes durable storage appear full.
    DiskFull,
    /// Flips a bit in the newest replica in the node's memory.
    CorruptReplica,
}

/// A request to inject a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Injection {
    /// The fault.
    pub fault: Injected,
    /// The rank to affect. Faults of a machine affect the node of this rank.
    pub rank: u32,
    /// Duration in milliseconds, for `slow`, `netsplit` and `disk-full`.
    pub milliseconds: u64,
}
