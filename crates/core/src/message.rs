//! The messages between the coordinator and the agents, as types only: `wire` encodes them.

pub use crate::failure::{Cause, Ended, Extent, Failure, HangEvidence, HowEnded, Outcome, Sign};
use crate::id::{Epoch, Generation, Incarnation, NodeId, Rank, Step};
use crate::node_check::Speed;
pub use crate::shard::{
    Copies, Holding, Keeper, Member, Offer, Offers, Parity, Purpose, Rebuild, Redundancy, Replication, ShardFile,
    Source, Stripe, StripeLeft, Tier,
};
use crate::spec::JobSpec;
use crate::time::Time;
pub use crate::world::{Place, Slot, World};
use serde::{Deserialize, Serialize};

/// The first message on a connection: who the node is, and what the coordinator may have missed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Node id, unique in the job.
    pub node: NodeId,
    /// Life of the agent.
    pub incarnation: Incarnation,
    /// What the job needs; all nodes must present the same spec.
    pub spec: JobSpec,
    /// Host at which other nodes reach this one.
    pub host: String,
    /// Number of workers on this node (`--nproc-per-node`).
    pub workers: u32,
    /// Port of a fresh process-group store, in case this node leads the next world.
    pub store_port: u16,
    /// Port for sending and fetching replicas; 0 for none.
    #[serde(default)]
    pub replica_port: u16,
    /// Nodes with the same failure domain may fail together (`--failure-domain`); empty: unknown.
    #[serde(default)]
    pub domain: String,
    /// Role of the node's workers (`--role`).
    #[serde(default)]
    pub role: String,
    /// Highest generation that this life of the agent has started or fenced.
    pub seen: Generation,
    /// Workers, alive or exited, of the generation that this agent still runs.
    pub running: Option<Running>,
    /// The stop of the job that this agent was asked or ordered to make. A coordinator that has just
    /// started knows of none.
    #[serde(default)]
    pub stop: Option<Stop>,
    /// How long its workers may take to end after a stop (`--shutdown-timeout`).
    #[serde(default)]
    pub shutdown_grace_ms: u64,
}

/// A stop of the job that somebody has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stop {
    /// Number of the signal.
    pub signal: i32,
    /// Step at whose end all ranks stop together; `None`: as soon as possible.
    pub at: Option<Step>,
}

impl Stop {
    /// Returns how a job that was stopped ends: exit code and cause.
    #[must_use]
    pub fn end(self) -> (i32, String) {
        (128 + self.signal, format!("stopped by signal {}", self.signal))
    }
}

/// State of the workers of one generation on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// Generation of the workers.
    pub generation: Generation,
    /// Failures among them, the first one first.
    #[serde(default)]
    pub failures: Vec<Failure>,
    /// The scripts of all workers are over, and so are their processes.
    pub finished: bool,
    /// Some worker has completed a step that it did not restore.
    pub progressed: bool,
    /// Workers whose scripts are over.
    #[serde(default)]
    pub ended: Vec<Ended>,
}

/// A node to test a collective with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partner {
    /// The other node.
    pub node: NodeId,
    /// Host of the store at which the two nodes meet.
    pub host: String,
    /// Port of that store.
    pub port: u16,
    /// This node's ranks come first, and it serves the store.
    pub first: bool,
}

/// The result of one node's part in a round of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checked {
    /// The check, as in [`Order::Check`].
    pub check: Time,
    /// The round, as in [`Order::Check`].
    pub round: u32,
    /// The node's speed, or why its own work failed; `None`: it was not asked to measure itself.
    pub speed: Option<Result<Speed, String>>,
    /// By partner: duration of the collective in microseconds, or `None` if it failed.
    pub pairs: Vec<(NodeId, Option<u64>)>,
    /// Why nothing could be checked, which is no evidence about the machine.
    pub cannot: Option<String>,
}

/// Shards of one node that are sealed and have their replicas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replicated {
    /// Generation that captured them.
    pub generation: Generation,
    /// The step.
    pub step: Step,
    /// Newest step that all workers of this node have sealed.
    pub sealed: Step,
    /// Digest of each rank's state, where all ranks should hold the same.
    pub digests: Vec<(Rank, u64)>,
    /// The round of [`Order::Replicate`], so that a late report is not taken for a current one.
    pub round: u64,
}

/// A message from an agent to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// A worker failed.
    WorkerFailed {
        /// Generation of the worker.
        generation: Generation,
        /// What happened.
        failure: Failure,
    },
    /// The machine shows a problem; no worker need have failed.
    Signed(Sign),
    /// This node's part of a round of a check is over.
    Checked(Checked),
    /// A worker's script is over: its interpreter is shutting down, or it has exited with 0.
    Ended {
        /// Generation of the worker.
        generation: Generation,
        /// The worker, and how far its end has come.
        ended: Ended,
    },
    /// The scripts of all workers of this node are over, and so are their processes.
    Finished {
        /// Generation of the workers.
        generation: Generation,
    },
    /// No worker of this generation or an older one is alive on this node.
    Stopped {
        /// The generation that was fenced.
        generation: Generation,
        /// Port of a fresh process-group store.
        store_port: u16,
        /// Steps that every worker of this node had completed.
        reached: Option<Step>,
    },
    /// The first new step of a generation is complete on this node. Sent again if the step that the
    /// workers continue from becomes known only later.
    FirstStep {
        /// Generation of the workers.
        generation: Generation,
        /// Steps completed.
        step: Step,
        /// The step that the workers continue from; `None`: not known.
        from: Option<Step>,
    },
    /// The contents of this node's memory, sent before the offers of its ranks.
    Holds {
        /// The generation that is starting.
        generation: Generation,
        /// Shards of its own ranks, and copies of others'.
        held: Vec<Holding>,
        /// Parity shards.
        #[serde(default)]
        parity: Vec<Parity>,
    },
    /// The shards that a rank could restore.
    Offers {
        /// Generation of the rank.
        generation: Generation,
        /// The rank.
        rank: Rank,
        /// Its offers.
        offers: Offers,
    },
    /// A rank could not read the shard that it was told to restore.
    RestoreFailed {
        /// Generation of the rank.
        generation: Generation,
        /// The rank.
        rank: Rank,
        /// The step to restore.
        step: Step,
        /// The tier it was to be read from.
        tier: Tier,
    },
    /// All workers of this node have sealed a step, so that it can be replicated; or the step that
    /// the coordinator named cannot be.
    Sealed {
        /// Generation of the workers.
        generation: Generation,
        /// Newest step that all of them have sealed.
        step: Step,
        /// The redundancy wanted in addition to each rank's own shard.
        wish: Redundancy,
        /// Round of the step that cannot be replicated; `None`: this node takes part (again).
        instead: Option<u64>,
    },
    /// All of this node's shards of a step are sealed and have their replicas.
    Replicated(Replicated),
    /// A rank's shard is on durable storage, but not yet published.
    ShardWritten {
        /// Generation of the rank.
        generation: Generation,
        /// State after this many steps.
        step: Step,
        /// Directory of the user's checkpoints.
        directory: String,
        /// The shard's file.
        shard: ShardFile,
    },
    /// A durable checkpoint became visible.
    Published {
        /// Generation that wrote it.
        generation: Generation,
        /// Step of the checkpoint.
        step: Step,
    },
    /// The agent received a signal to stop (TERM, INT); the whole job should stop.
    StopRequested(Stop),
    /// Something outside refuses this job, such as a checkpoint directory that another job owns. No
    /// restart helps: the whole job ends.
    Refused {
        /// Exit code.
        code: i32,
        /// A sentence for the user.
        why: String,
    },
    /// A step that no rank will have passed, in answer to [`Order::ProposeStep`].
    StepProposed {
        /// Generation of the workers.
        generation: Generation,
        /// The step; `None` if the workers report no steps.
        step: Option<Step>,
    },
    /// A durable checkpoint is due.
    PersistDue {
        /// Generation that asks.
        generation: Generation,
        /// Step that all ranks can still mark for it.
        at: Step,
    },
    /// The interval between snapshots should change.
    SnapshotEvery {
        /// Generation that asks.
        generation: Generation,
        /// Step that no rank has passed.
        from: Step,
        /// New interval, in steps.
        every: u64,
    },
}

/// An order from the coordinator to an agent. Its envelope contains the sender's epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// The connection is accepted.
    Welcome {
        /// Life of the coordinator.
        epoch: Epoch,
    },
    /// This agent may not take part.
    Refused {
        /// A sentence for the user.
        why: String,
        /// Exit code.
        code: i32,
    },
    /// Start the workers of a generation.
    Start {
        /// The generation.
        generation: Generation,
        /// This node's part in it.
        place: Place,
        /// Restarts used so far (`TORCHELASTIC_RESTART_COUNT`).
        restarts: u32,
        /// Restarts allowed (`TORCHELASTIC_MAX_RESTARTS`).
        max_restarts: u32,
    },
    /// End every worker of this generation and older ones, then report [`Report::Stopped`].
    Fence {
        /// The newest generation to end.
        generation: Generation,
        /// Collect the workers' stacks first.
        #[serde(default)]
        stacks: bool,
    },
    /// Pass a signal to the workers and let them finish: the job is stopping.
    Signal {
        /// The generation meant.
        generation: Generation,
        /// The stop.
        stop: Stop,
    },
    /// Persist the snapshot of this step.
    PersistAt {
        /// The generation meant.
        generation: Generation,
        /// The step.
        step: Step,
    },
    /// From this step on, capture the steps that are multiples of `every`.
    SnapshotEvery {
        /// The generation meant.
        generation: Generation,
        /// First step.
        from: Step,
        /// Interval in steps.
        every: u64,
    },
    /// The world is about to change: propose a step that no rank will have passed.
    ProposeStep {
        /// The generation meant.
        generation: Generation,
    },
    /// Persist the snapshot of this step, and wait there for the next world.
    HoldAt {
        /// The generation meant.
        generation: Generation,
        /// The step; `None`: continue, the world stays as it is.
        step: Option<Step>,
    },
    /// All ranks restore this step (`None`: there is none that all ranks can restore).
    Restore {
        /// The generation meant.
        generation: Generation,
        /// The step.
        step: Option<Step>,
        /// Sources to read it from, for each rank of this node; empty if `step` is `None`.
        sources: Vec<Source>,
        /// The step exists only in memory: ranks that have restored it also make it durable.
        persist: bool,
        /// Highest step that all ranks had completed before.
        #[serde(default)]
        best: Option<Step>,
        /// Some rank has found checkpoints: without a step, the ranks fail instead of starting
        /// fresh.
        #[serde(default)]
        found: bool,
    },
    /// Replicate the first step from `next` on that all workers of this node have sealed.
    Replicate {
        /// The generation meant.
        generation: Generation,
        /// The nodes to send replicas to and to receive them from.
        plan: Replication,
        /// First step that qualifies.
        next: Step,
        /// Counts the steps named in this generation.
        round: u64,
    },
    /// All nodes hold a step with all its replicas, so older versions may be dropped. Then continue
    /// as for [`Order::Replicate`].
    Committed {
        /// The generation meant.
        generation: Generation,
        /// The committed step.
        step: Step,
        /// First step that qualifies for the next round.
        next: Step,
        /// As in [`Order::Replicate`].
        round: u64,
    },
    /// All shards of a step are written: write the manifest and make the checkpoint visible.
    Publish {
        /// Generation that wrote the shards.
        generation: Generation,
        /// The step.
        step: Step,
        /// The user's directory.
        directory: String,
        /// One file per rank.
        shards: Vec<ShardFile>,
    },
    /// A checkpoint is visible on durable storage: release its slots and those who wait for it.
    Durable {
        /// Generation that wrote it.
        generation: Generation,
        /// The step.
        step: Step,
    },
    /// The world has no place for this node now, but may have one soon: be ready.
    StandBy,
    /// No workers run here: test this machine, alone and together with others.
    Check {
        /// The check, named by the time at which it began.
        check: Time,
        /// Round of the check.
        round: u32,
        /// Measure this machine first.
        measure: bool,
        /// Nodes to test with, all at the same time.
        partners: Vec<Partner>,
    },
    /// This node has no part in the world.
    Idle {
        /// Whether the node is excluded.
        excluded: bool,
    },
    /// A message for people on this node's console.
    Notice {
        /// A sentence.
        what: String,
    },
    /// The job is over: end the remaining workers, clean up and exit.
    End {
        /// Exit code of `everstep run`.
        code: i32,
        /// What happened, for the user, cause first.
        why: String,
    },
}
