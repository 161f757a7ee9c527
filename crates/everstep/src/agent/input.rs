//! Everything that the agent's driver waits for.

use super::persist_queue::PublishError;
use super::slot_files::{Destination, ShardError};
use crate::guard::protocol::Event as GuardEvent;
use everstep_checkpoint::persist::ClaimError;
use everstep_core::agent::event::{CrewEvent, Event};
use everstep_core::id::{Generation, Step};
use everstep_core::message::ShardFile;
use everstep_core::stacks::Stack;
use everstep_wire::envelope::{ToAgent, ToCoordinator};
use everstep_wire::worker::{Reply, Request};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// Values of a machine by metric, as numbered in the detector's catalogue.
pub type Samples = Vec<(u8, f32)>;

/// The result of claiming a worker's directory.
pub struct Owned {
    /// Generation and local rank of the worker.
    pub who: (Generation, u32),
    /// The directory.
    pub to: Destination,
    /// The epoch in which the job owns the directory.
    pub result: Result<u64, ClaimError>,
    /// Where the worker waits for the answer.
    pub answer: oneshot::Sender<Reply>,
}

/// Everything that reaches the driver.
pub enum Input {
    /// The stream to the coordinator is open.
    Connected(mpsc::UnboundedSender<ToCoordinator>),
    /// A message from the coordinator.
    Line(ToAgent),
    /// The stream to the coordinator ended.
    Disconnected,
    /// An error without a remedy: the agent exits.
    Fatal {
        /// Exit code.
        code: i32,
        /// A sentence for the user.
        why: String,
    },
    /// An event from the guard, or `None` if the guard is gone.
    Guard(Option<GuardEvent>),
    /// A request from a worker.
    Worker(Request, oneshot::Sender<Reply>),
    /// The result of writing a shard.
    Shard {
        /// Worker whose shard this is.
        local_rank: u32,
        /// Generation in which it was written.
        generation: Generation,
        /// See [`everstep_core::message::ShardWritten`].
        captured: Generation,
        /// Step of the shard.
        step: Step,
        /// Checkpoint directory, as the user gave it.
        directory: String,
        /// The file, or a sentence for the user.
        result: Result<ShardFile, ShardError>,
    },
    /// The result of publishing a checkpoint.
    Published(Generation, Step, Result<(), PublishError>),
    /// The result of claiming a worker's directory.
    Owned(Box<Owned>),
    /// A signal arrived.
    Signal(i32),
    /// An injected network split is over.
    Heard,
    /// The stacks of the workers, by rank.
    Stacks(Generation, BTreeMap<u32, Stack>),
    /// One second's samples of this machine: time in milliseconds, kind of machine, values.
    Sampled(u64, Arc<str>, Samples),
    /// An event for the core alone.
    Core(Event),
}

impl Input {
    /// Returns an event of the workers of a generation, for the core alone.
    pub fn crew(generation: Generation, event: CrewEvent) -> Self {
        Input::Core(Event::Crew(generation, event))
    }
}
