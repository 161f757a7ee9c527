//! What the coordinator and the agents say to each other. Types only: bytes are `wire`'s business.

pub use crate::failure::{Cause, Ended, Failure, HangEvidence, HowEnded, Outcome, Sign};
use crate::id::{Epoch, Generation, Incarnation, NodeId, Rank, Step};
use crate::node_check::Speed;
pub use crate::shard::{
    Copies, Holding, Keeper, Member, Offer, Offers, Parity, Purpose, Rebuild, Redundancy, Replication, ShardFile,
    Source, Stripe, StripeLeft, Tier,
};
use crate::spec::JobSpec;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// First message on every connection: who this is, and everything the coordinator may have missed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Node id, unique in the job.
    pub node: NodeId,
    /// This life of the agent.
    pub incarnation: Incarnation,
    /// What the job needs; must equal the other nodes' spec.
    pub spec: JobSpec,
    /// Host that other nodes reach this one by.
    pub host: String,
    /// Workers that this node runs (`--nproc-per-node`).
    pub workers: u32,
    /// Port of a fresh process-group store, in case this node leads the next world.
    pub store_port: u16,
    /// Port that replicas are sent to and fetched from; 0 for none.
    #[serde(default)]
    pub replica_port: u16,
    /// Nodes with the same failure domain may fail together (`--failure-domain`); empty: unknown.
    #[serde(default)]
    pub domain: String,
    /// Role of its workers (`--role`).
    #[serde(default)]
    pub role: String,
    /// Highest generation this life of the agent has started or fenced.
    pub seen: Generation,
    /// Workers alive or exited in the generation that this agent still runs.
    pub running: Option<Running>,
}

/// State of the workers of one generation on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// Their generation.
    pub generation: Generation,
    /// First failure among them, if any.
    pub failure: Option<Failure>,
    /// The scripts of all of them are over, and so are their processes.
    pub finished: bool,
    /// Some worker has completed a step that it did not restore.
    pub progressed: bool,
    /// Workers whose script is over.
    #[serde(default)]
    pub ended: Vec<Ended>,
}

/// Whom a node is tested with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partner {
    /// The other node.
    pub node: NodeId,
    /// Host of the store where both meet.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// This node's ranks come first; the store is its own.
    pub first: bool,
}

/// How a node's part of a round of a check went.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checked {
    /// [`Order::Check`]'s.
    pub check: Time,
    /// Its round.
    pub round: u32,
    /// How fast it is, or why it could not even do its own work; `None`: it was not asked.
    pub speed: Option<Result<Speed, String>>,
    /// By partner: microseconds of the collective, `None` when it failed.
    pub pairs: Vec<(NodeId, Option<u64>)>,
    /// Nothing could be checked, which says nothing of the machine.
    pub cannot: Option<String>,
}

/// From an agent to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// A worker failed.
    WorkerFailed {
        /// its generation
        generation: Generation,
        /// what happened
        failure: Failure,
    },
    /// Something shows that is wrong with the machine; no worker need have failed.
    Signed(Sign),
    /// This node's part of a round of a check is over.
    Checked(Checked),
    /// The script of a worker is over: its interpreter shuts down, or it has exited with 0.
    Ended {
        /// its generation
        generation: Generation,
        /// which worker, and how far it is
        ended: Ended,
    },
    /// The scripts of all workers of this node are over, and so are their processes.
    Finished {
        /// their generation
        generation: Generation,
    },
    /// No worker of this generation or an older one is alive on this node.
    Stopped {
        /// the generation that was fenced
        generation: Generation,
        /// port of a fresh process-group store
        store_port: u16,
        /// steps that every worker of this node had completed
        reached: Option<Step>,
    },
    /// The first new step of a generation is complete on this node; told again when it is known only later from where its workers go on.
    FirstStep {
        /// its generation
        generation: Generation,
        /// the step
        step: Step,
        /// the step that they go on from; `None`: not known
        from: Option<Step>,
    },
    /// What this node's memory holds, told before its ranks' offers.
    Holds {
        /// the generation that is starting
        generation: Generation,
        /// shards: its own ranks', copies of others'
        held: Vec<Holding>,
        /// parity shards
        #[serde(default)]
        parity: Vec<Parity>,
    },
    /// A rank says which shards it could restore.
    Offers {
        /// its generation
        generation: Generation,
        /// whose
        rank: Rank,
        /// which
        offers: Offers,
    },
    /// A rank could not read what it was told to restore.
    RestoreFailed {
        /// its generation
        generation: Generation,
        /// whose
        rank: Rank,
        /// the step
        step: Step,
        /// where it was to come from
        tier: Tier,
    },
    /// All workers of this node have sealed a step: it can be replicated. Also: the step that was named cannot be.
    Sealed {
        /// their generation
        generation: Generation,
        /// newest step that all of them have sealed
        step: Step,
        /// what is to be kept of it beside their own
        wish: Redundancy,
        /// round of the step that cannot be replicated; `None`: this node takes part (again)
        instead: Option<u64>,
    },
    /// All of this node's shards of a step are sealed and have their replicas.
    Replicated {
        /// generation that captured them
        generation: Generation,
        /// the step
        step: Step,
        /// newest step that all workers of this node have sealed
        sealed: Step,
        /// what tells each rank's state from another, where ranks hold the same
        digests: Vec<(Rank, u64)>,
        /// [`Order::Replicate`]'s, so that nothing late is taken for the step at hand
        round: u64,
    },
    /// A rank's shard is on durable storage, not yet published.
    ShardWritten {
        /// its generation
        generation: Generation,
        /// state after this many steps
        step: Step,
        /// directory of the user's checkpoints
        directory: String,
        /// the file
        shard: ShardFile,
    },
    /// A durable checkpoint became visible.
    Published {
        /// generation that wrote it
        generation: Generation,
        /// its step
        step: Step,
    },
    /// The agent was asked to stop (TERM, INT); the whole job should.
    StopRequested {
        /// number of the signal
        signal: i32,
        /// step at whose end all ranks can stop together; `None` when steps are not known
        at: Option<Step>,
    },
    /// A step that no rank will have passed, as asked for.
    StepProposed {
        /// generation that runs
        generation: Generation,
        /// the step; `None` when the workers report no steps
        step: Option<Step>,
    },
    /// Time for a durable checkpoint.
    PersistDue {
        /// generation that asks
        generation: Generation,
        /// step that all ranks can still mark for it
        at: Step,
    },
    /// Snapshots should be so many steps apart.
    SnapshotEvery {
        /// generation that asks
        generation: Generation,
        /// step that no rank has passed
        from: Step,
        /// steps
        every: u64,
    },
}

/// One node's part of a world.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// Which node.
    pub node: NodeId,
    /// Which life of its agent.
    pub incarnation: Incarnation,
    /// Global rank of its local rank 0.
    pub first_rank: Rank,
    /// Number of its workers.
    pub workers: u32,
    /// Host that the others reach it by.
    pub host: String,
    /// Its process-group store for this generation.
    pub store_port: u16,
    /// Role of its workers.
    #[serde(default)]
    pub role: String,
}

impl Slot {
    /// Its ranks.
    #[must_use]
    pub fn ranks(&self) -> Range<u32> {
        self.first_rank.0..self.first_rank.0 + self.workers
    }
}

/// The ranks of one generation, ordered by node id. The first slot leads: it serves the process-group store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct World {
    /// Nodes in rank order.
    pub slots: Vec<Slot>,
}

impl World {
    /// Number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.slots.iter().map(|s| s.workers).sum()
    }

    /// The part of `node`, if it is in this world.
    #[must_use]
    pub fn slot(&self, node: &NodeId) -> Option<&Slot> {
        self.index(node).and_then(|i| self.slots.get(i))
    }

    /// The part that `rank` is in.
    #[must_use]
    pub fn slot_of(&self, rank: Rank) -> Option<&Slot> {
        self.slots.iter().find(|s| s.ranks().contains(&rank.0))
    }

    fn index(&self, node: &NodeId) -> Option<usize> {
        self.slots.binary_search_by(|s| s.node.cmp(node)).ok()
    }

    /// Everything that `node` needs to start its workers, if it is in this world.
    #[must_use]
    pub fn place(&self, node: &NodeId, size: u32) -> Option<Place> {
        let index = self.index(node)?;
        let leader = self.slots.first()?;
        let slot = self.slots.get(index)?;
        let workers = |slots: &[Slot]| slots.iter().filter(|s| s.role == slot.role).map(|s| s.workers).sum();
        Some(Place {
            slot: slot.clone(),
            first_role_rank: workers(self.slots.get(..index)?),
            role_world_size: workers(&self.slots),
            group_rank: u32::try_from(index).unwrap_or(u32::MAX),
            group_world_size: u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
            world_size: size,
            leader_host: leader.host.clone(),
            leader_port: leader.store_port,
        })
    }
}

/// One node's place in a world. Of constant size: a world of N nodes costs N short messages, not N copies of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The node's own part.
    pub slot: Slot,
    /// Position of the node, `0..group_world_size`.
    pub group_rank: u32,
    /// Number of nodes.
    pub group_world_size: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// Number, among the ranks with the same role, of the node's local rank 0
    /// (`SimpleElasticAgent._assign_worker_ranks` in torch).
    pub first_role_rank: u32,
    /// Number of ranks with the same role.
    pub role_world_size: u32,
    /// Host of the first node, which serves the process-group store.
    pub leader_host: String,
    /// Its port.
    pub leader_port: u16,
}

/// From the coordinator to an agent. All orders carry the epoch of their sender in the envelope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// The connection is accepted.
    Welcome {
        /// life of the coordinator
        epoch: Epoch,
    },
    /// This agent may not take part.
    Refused {
        /// a sentence for the user
        why: String,
        /// exit code
        code: i32,
    },
    /// Start the workers of a generation.
    Start {
        /// the generation
        generation: Generation,
        /// this node's part
        place: Place,
        /// restarts used so far (`TORCHELASTIC_RESTART_COUNT`)
        restarts: u32,
        /// restarts allowed (`TORCHELASTIC_MAX_RESTARTS`)
        max_restarts: u32,
    },
    /// End every worker of this generation and older ones, then report [`Report::Stopped`].
    Fence {
        /// the newest generation to end
        generation: Generation,
        /// first ask the workers where they are
        #[serde(default)]
        stacks: bool,
    },
    /// Pass a signal to the workers and let them finish (the job is stopping).
    Signal {
        /// the generation meant
        generation: Generation,
        /// number of the signal
        signal: i32,
        /// stop at the end of this step; `None`: as soon as possible
        at: Option<Step>,
    },
    /// Persist the snapshot of this step.
    PersistAt {
        /// the generation meant
        generation: Generation,
        /// the step
        step: Step,
    },
    /// From this step on, capture those that are multiples of `every`.
    SnapshotEvery {
        /// the generation meant
        generation: Generation,
        /// first step
        from: Step,
        /// steps
        every: u64,
    },
    /// The world is about to change: name a step that no rank will have passed.
    ProposeStep {
        /// the generation meant
        generation: Generation,
    },
    /// Persist the snapshot of this step, and wait there for the next world.
    HoldAt {
        /// the generation meant
        generation: Generation,
        /// the step; `None`: go on, the world stays as it is
        step: Option<Step>,
    },
    /// All ranks restore this step (`None`: nothing to restore, a fresh start).
    Restore {
        /// the generation meant
        generation: Generation,
        /// the step
        step: Option<Step>,
        /// where to read it, for each rank of the node that is told; empty when `step` is `None`
        sources: Vec<Source>,
        /// it is in memory only: whoever has just come back makes it durable, too
        persist: bool,
        /// highest step that all ranks had completed before
        #[serde(default)]
        best: Option<Step>,
    },
    /// Replicate the first step from `next` on that all workers of this node have sealed.
    Replicate {
        /// the generation meant
        generation: Generation,
        /// to and from whom
        plan: Replication,
        /// the step
        next: Step,
        /// counts the steps that were named in this generation
        round: u64,
    },
    /// A step is held by all nodes with all its replicas: older versions may go. Then as [`Order::Replicate`].
    Committed {
        /// the generation meant
        generation: Generation,
        /// the step
        step: Step,
        /// the step after it
        next: Step,
        /// as in [`Order::Replicate`]
        round: u64,
    },
    /// All shards of a step are written: write the manifest and make the checkpoint visible.
    Publish {
        /// generation that wrote the shards
        generation: Generation,
        /// its step
        step: Step,
        /// the user's directory
        directory: String,
        /// one per rank
        shards: Vec<ShardFile>,
    },
    /// A checkpoint is visible on durable storage: its slots may be reused, whoever waits for it may go on.
    Durable {
        /// generation that wrote it
        generation: Generation,
        /// its step
        step: Step,
    },
    /// There is no place in the world for this node now, but there may be one soon: be ready.
    StandBy,
    /// No workers run here: show that this machine works, by itself and with others.
    Check {
        /// which check
        check: Time,
        /// its round
        round: u32,
        /// measure itself first
        measure: bool,
        /// whom to test with, at the same time
        partners: Vec<Partner>,
    },
    /// This node has no part in the world.
    Idle {
        /// it is left out
        excluded: bool,
    },
    /// Something for people to read on this node's console.
    Notice {
        /// a sentence
        what: String,
    },
    /// The job is over: stop what is left, clean up and exit.
    End {
        /// exit code of `everstep run`
        code: i32,
        /// what happened, for the user, cause first
        why: String,
    },
}
