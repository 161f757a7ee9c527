//! The messages between the coordinator and the agents, as types only: `wire` encodes them.
//!
//! A message about the workers of one generation is a [`CrewReport`] or a [`CrewOrder`], and the
//! generation is part of its envelope. The payloads are in the files beside this one. The agent's
//! events and commands, and the workers' requests, contain the same payloads.

mod durable;
mod ending;
mod joining;
mod lifetime;
mod node_check;
mod replication;
mod restoring;

pub use crate::failure::{Cause, Ended, Extent, Failure, HangEvidence, HowEnded, Outcome, Sign};
use crate::id::{Epoch, Generation, Incarnation, Rank, Step};
pub use crate::shard::{
    Copies, Holding, Keeper, Member, Offer, Offers, Parity, Purpose, Rebuild, Redundancy, Replication, ShardFile,
    Source, Stripe, StripeLeft, Tier,
};
pub use crate::world::{Place, Slot, World};
pub use durable::{Publish, ShardWritten, SnapshotEvery, SnapshotInterval};
pub use ending::{ExitReason, Stop};
pub use joining::{Hello, Running};
pub use lifetime::{FirstStep, Start, Stopped};
pub use node_check::{Check, Checked, Partner};
pub use replication::{Replicated, Round, Sealed};
pub use restoring::{Holdings, RankOffers, Restore, Unreadable};
use serde::{Deserialize, Serialize};

/// A message from an agent to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// A report about the workers of this generation.
    Crew(Generation, CrewReport),
    /// The machine shows a problem; no worker need have failed.
    Signed(Sign),
    /// This node's part of a round of a check is over.
    Checked(Checked),
    /// The agent received a signal to stop (TERM, INT); the whole job should stop.
    StopRequested(Stop),
    /// Something outside refuses this job, such as a checkpoint directory that another job owns. No
    /// restart helps: the whole job ends.
    Refused(ExitReason),
}

/// A report about the workers of one generation on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CrewReport {
    /// A worker failed.
    WorkerFailed(Failure),
    /// A worker's script is over: its interpreter is shutting down, or it has exited with 0.
    Ended(Ended),
    /// The scripts of all workers of this node are over, and so are their processes.
    Finished,
    /// No worker of this generation or an older one is alive on this node.
    Stopped(Stopped),
    /// The first new step is complete on this node. Sent again if the step that the workers
    /// continue from becomes known only later.
    FirstStep(FirstStep),
    /// The contents of this node's memory, sent before the offers of its ranks.
    Holds(Holdings),
    /// The shards that a rank could restore.
    Offers(RankOffers),
    /// A rank could not read the shard that it was told to restore.
    RestoreFailed(Rank, Unreadable),
    /// The shard that a rank was told to restore could not be fetched now, and may be intact: its
    /// holder does not answer, or this node has too little memory for it.
    FetchFailed(Rank, Unreadable),
    /// All workers of this node have sealed a step, so that it can be replicated; or the step that
    /// the coordinator named cannot be.
    Sealed(Sealed),
    /// All of this node's shards of a step are sealed and have their replicas.
    Replicated(Replicated),
    /// A rank's shard is on durable storage, but not yet published.
    ShardWritten(ShardWritten),
    /// The durable checkpoint of this step became visible.
    Published(Step),
    /// A step that no rank will have passed, in answer to [`CrewOrder::ProposeStep`]; `None` if the
    /// workers report no steps.
    StepProposed(Option<Step>),
    /// A durable checkpoint is due: this is a step that all ranks can still mark for it.
    PersistDue(Step),
    /// The interval between snapshots should change.
    SnapshotEvery(SnapshotEvery),
}

/// An order from the coordinator to an agent. Its envelope contains the sender's epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// An order about the workers of this generation.
    Crew(Generation, CrewOrder),
    /// The connection is accepted.
    Welcome {
        /// Epoch of the coordinator: one life of it.
        epoch: Epoch,
        /// The agent that began this run of the job, which identifies the run.
        began: Incarnation,
    },
    /// This agent may not take part.
    Refused(ExitReason),
    /// The world has no place for this node now, but may have one soon: be ready.
    StandBy,
    /// No workers run here: test this machine, alone and together with others.
    Check(Check),
    /// This node has no part in the world.
    Idle {
        /// Whether the node is excluded.
        excluded: bool,
    },
    /// A message for people on this node's console.
    Notice {
        /// One sentence for people.
        what: String,
    },
    /// The job is over: end the remaining workers, clean up and exit.
    End(ExitReason),
    /// The job continues without this node: clean up and exit.
    Leave(ExitReason),
}

/// An order about the workers of one generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CrewOrder {
    /// Start the workers.
    Start(Start),
    /// End every worker of this generation and older ones, then report [`CrewReport::Stopped`].
    Fence {
        /// Collect the workers' stacks first.
        #[serde(default)]
        stacks: bool,
    },
    /// Pass a signal to the workers and let them finish: the job is stopping.
    Signal(Stop),
    /// Persist the snapshot of this step.
    PersistAt(Step),
    /// Change the interval between snapshots.
    SnapshotEvery(SnapshotEvery),
    /// The world is about to change: propose a step that no rank will have passed.
    ProposeStep,
    /// Persist the snapshot of this step, and wait there for the next world; `None`: continue, the
    /// world stays as it is.
    HoldAt(Option<Step>),
    /// All ranks restore this step.
    Restore(Restore),
    /// Replicate the step of a round.
    Replicate {
        /// The nodes to send replicas to and to receive them from.
        plan: Replication,
        /// Number of the round, and the step to replicate in it.
        round: Round,
        /// The newest step that all nodes have. A node may have missed the order that committed it.
        committed: Option<Step>,
    },
    /// All nodes hold a step with all its replicas, so older versions may be dropped. Then continue
    /// as for [`CrewOrder::Replicate`], with the same plan.
    Committed {
        /// Step that is now committed.
        step: Step,
        /// Number of the next round, and its step.
        round: Round,
    },
    /// All shards of a step are written: write the manifest and make the checkpoint visible.
    Publish(Publish),
    /// The checkpoint of this step is visible on durable storage: release its slots and those who
    /// wait for it.
    Durable(Step),
}
