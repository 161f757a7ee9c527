//! Everything the coordinator may ask of the world: a closed list.

use crate::id::{Generation, JobId, NodeId, PersistId, Rank, Session, Step};
use crate::message::{Failure, Order, Sign, Tier};
use crate::severity::Verdict;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use super::event::Version;
use super::node_check::Found;
use super::remedy::Request;
use super::unlike::Finding;

/// What must hold for a write to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precondition {
    /// The key does not exist.
    Absent,
    /// The key has this version.
    Version(Version),
}

/// An output of [`super::Coordinator::poll`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Say something to an agent. Leaves only when the write named in `after` has returned well;
    /// is discarded when that write failed.
    Send {
        /// the connection
        session: Session,
        /// what
        order: Order,
        /// the write that this promise rests on
        after: Option<PersistId>,
    },
    /// Write to the store; the result comes back as an event.
    Persist {
        /// names this write
        id: PersistId,
        /// the key
        key: String,
        /// the value (JSON)
        value: Vec<u8>,
        /// what must hold
        precondition: Precondition,
    },
    /// Write down a fact for people: the driver stamps the wall-clock time.
    Record {
        /// the job
        job: JobId,
        /// the fact
        fact: Fact,
    },
    /// Have this done about machines: now, and perhaps not for the first time. The answer comes as an event.
    Provision {
        /// the job
        job: JobId,
        /// what
        request: Request,
    },
    /// Another coordinator is active: end this one.
    StepDown {
        /// for the log
        why: String,
    },
}

/// Why the coordinator does what it does, as data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// Too few nodes to form a world.
    WaitingForNodes {
        /// attached
        have: u32,
        /// needed
        need: u32,
    },
    /// Enough nodes, but more may be on their way.
    LastCall {
        /// attached
        have: u32,
        /// wanted
        want: u32,
    },
    /// Workers of the old generation are being ended.
    Fencing {
        /// nodes that have not yet said that they stopped
        waiting: Vec<NodeId>,
    },
    /// Nobody of the old world can confirm that it stopped, so its time must run out first.
    OldWorldUnreachable,
    /// After a coordinator restart: nodes have some time to come back.
    Reattaching {
        /// nodes not back yet
        waiting: Vec<NodeId>,
    },
    /// A write to the store is on its way or will be repeated.
    StoreBusy,
    /// The nodes are being checked.
    Checking {
        /// round of pairs
        round: u32,
    },
    /// Generations fail before their first step: the next one waits for a while.
    BackingOff {
        /// until then
        until: Time,
    },
    /// Training.
    Training,
    /// The job is stopping on request.
    Stopping,
    /// The job is over.
    Over {
        /// exit code
        code: i32,
        /// the cause
        why: String,
    },
}

/// Something worth remembering about a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fact {
    /// The coordinator started or restarted.
    CoordinatorStarted {
        /// its life
        epoch: u64,
    },
    /// A node took part.
    NodeJoined {
        /// which
        node: NodeId,
        /// the same life of its agent came back on a new connection
        again: bool,
    },
    /// A node was lost.
    NodeLost {
        /// which
        node: NodeId,
    },
    /// A failure that ends a generation.
    IncidentOpened {
        /// number within the job, from 1
        incident: u64,
        /// the generation that failed
        generation: Generation,
        /// the node at fault
        node: NodeId,
        /// the worker's failure; `None` when the whole node was lost
        failure: Option<Failure>,
        /// what is done about it
        action: Action,
    },
    /// What a machine has told of itself: a line in the kernel's log, an event of a device.
    Signed {
        /// which
        node: NodeId,
        /// what
        sign: Sign,
    },
    /// All that failed around an incident was heard: whose failure the others follow from.
    Blamed {
        /// the incident
        incident: u64,
        /// the node at fault
        node: NodeId,
        /// what failed first there; `None`: the machine itself
        failure: Option<Box<Failure>>,
        /// what it is held to be
        verdict: Box<Verdict>,
        /// classes of the other failures, and how many of each
        others: BTreeMap<String, u32>,
    },
    /// From now on the job does without a node, as long as enough others are there.
    Excluded {
        /// the incident that shows why
        incident: u64,
        /// the node
        node: NodeId,
        /// what is wrong with it
        verdict: Verdict,
    },
    /// Something is to be done about machines, or was.
    Requested {
        /// the latest incident; 0 for none
        incident: u64,
        /// what, and how far it is
        request: Request,
    },
    /// How many nodes each job is to have after something has happened.
    Planned {
        /// the incident that it is made for; 0 for none
        incident: u64,
        /// what has happened, for people
        change: String,
        /// the plan was there before
        from_table: bool,
        /// nodes by job
        units: BTreeMap<String, u32>,
    },
    /// The nodes were checked.
    Checked {
        /// the latest incident; 0 for none
        incident: u64,
        /// how many
        nodes: u64,
        /// rounds of pairs
        rounds: u32,
        /// what was found
        found: Found,
    },
    /// Workers of a new generation are being started.
    GenerationStarted {
        /// the generation
        generation: Generation,
        /// its size in ranks
        world_size: u32,
        /// restarts used so far
        restarts: u32,
    },
    /// Nodes that wait are being taken in; none: nodes are given away.
    Growing {
        /// the generation that ends for it
        generation: Generation,
        /// the nodes
        nodes: Vec<NodeId>,
    },
    /// Nodes cannot read the job's state, so it goes on without them.
    LeftOut {
        /// the generation that ends for it
        generation: Generation,
        /// the nodes
        nodes: Vec<NodeId>,
    },
    /// The restore step of a generation was decided.
    Restored {
        /// the generation
        generation: Generation,
        /// the step; `None` for a fresh start
        step: Option<Step>,
        /// tier by rank
        tiers: Vec<Tier>,
        /// completed steps that must be computed again
        steps_lost: u64,
        /// nodes that restore it; 0: written down by a version that did not say
        #[serde(default)]
        nodes: u32,
    },
    /// A worker crashed after the end of the training, which counts as finished all the same.
    LateCrash {
        /// the generation
        generation: Generation,
        /// where
        node: NodeId,
        /// the crash
        failure: Failure,
        /// a rank that had ended by itself at the same step; `None`: the worker's own script was over
        with: Option<Rank>,
    },
    /// A rank could not read what it was told to restore: the job restores something else.
    RestoreFailed {
        /// the generation
        generation: Generation,
        /// whose
        rank: Rank,
        /// the step
        step: Step,
        /// where it was to come from
        tier: Tier,
    },
    /// For the first time in a generation, a step is held by all nodes with all its replicas.
    Replicated {
        /// the generation
        generation: Generation,
        /// the step
        step: Step,
        /// copies of each shard on other nodes
        replicas: u32,
    },
    /// The first new step of a generation is complete.
    FirstStep {
        /// the generation
        generation: Generation,
        /// the step
        step: Step,
        /// incident that this ends, if any
        incident: Option<u64>,
        /// the step that the ranks go on from; `None`: not known
        #[serde(default)]
        from: Option<Step>,
        /// the highest step that the job had completed before; `None`: not known
        #[serde(default)]
        had: Option<Step>,
    },
    /// It has become known which step the ranks of a generation go on from.
    Began {
        /// the generation
        generation: Generation,
        /// steps that they have completed by now
        step: Step,
        /// the step
        from: Step,
        /// the highest step that the job had completed before; `None`: not known
        had: Option<Step>,
    },
    /// All ranks are where the job had been before a failure: what it cost is made good.
    CaughtUp {
        /// the generation
        generation: Generation,
        /// the step
        step: Step,
        /// the incident
        incident: u64,
    },
    /// A rank's own work takes longer than the others', who wait for it; or no longer does.
    SlowRank {
        /// which
        rank: Rank,
        /// on which node
        node: NodeId,
        /// its own work per step, in percent of the others'
        percent: u64,
        /// slow, or well again
        slow: bool,
    },
    /// A detector has found machines that behave unlike their peers. Training goes on.
    Unlike {
        /// number within the job, from 1
        incident: u64,
        /// the generation that trains
        generation: Generation,
        /// what was found
        finding: Finding,
    },
    /// A person says whether an incident was named rightly.
    Noted {
        /// the incident
        incident: u64,
        /// it was
        right: bool,
        /// in words
        note: String,
    },
    /// Ranks that should hold the same state do not: silent corruption.
    Diverged {
        /// first step at which it was seen
        step: Step,
        /// the odd ones out, or, where nobody can tell, all that differ
        ranks: Vec<Rank>,
        /// their nodes, in the same order
        nodes: Vec<NodeId>,
        /// most ranks agree, and these do not
        certain: bool,
    },
    /// A durable checkpoint became visible.
    Published {
        /// its step
        step: Step,
    },
    /// The job is over.
    Ended {
        /// exit code
        code: i32,
        /// the cause
        why: String,
    },
}

/// What is done about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Restart the worker processes where they were.
    Restart,
    /// Wait for the node or take another one, then restart.
    Reconfigure,
    /// Give up.
    Fail,
    /// Say it: nothing has failed.
    Tell,
}
