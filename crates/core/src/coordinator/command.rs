//! Everything the coordinator may ask its driver to do: a closed list.

use crate::id::{Generation, Incarnation, JobId, NodeId, PersistId, Rank, Session, Step};
use crate::injection::Injection;
use crate::ledger::Account;
use crate::message::{Failure, Order, Sign, Tier};
use crate::notify::Status;
use crate::severity::Verdict;
use crate::stacks::Stack;
use crate::time::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use super::check_findings::Found;
use super::event::Version;
use super::finding::Finding;
use super::request::Request;

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
    /// Send an order to an agent. It waits until the write in `after` has succeeded, and is
    /// discarded if that write failed.
    Send {
        /// Connection of the agent that gets the order.
        session: Session,
        /// The order to send.
        order: Order,
        /// The write that this order depends on.
        after: Option<PersistId>,
    },
    /// Write to the store; the result comes back as an event.
    Persist {
        /// Number of this write, by which its result is recognized.
        id: PersistId,
        /// Key in the store.
        key: String,
        /// Value to write (JSON).
        value: Vec<u8>,
        /// What must hold for the write.
        precondition: Precondition,
    },
    /// Record a fact for people. The driver adds the wall-clock time.
    Record {
        /// The job.
        job: JobId,
        /// The fact.
        fact: Fact,
    },
    /// Carry out a request about machines, possibly not for the first time. The answer comes back
    /// as an event.
    Provision {
        /// The job.
        job: JobId,
        /// The request.
        request: Request,
    },
    /// Another coordinator is active: end this one.
    StepDown {
        /// The reason, for the log.
        why: String,
    },
}

/// Why a job is in its current phase, as data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Reason {
    /// There are too few nodes to form a world.
    WaitingForNodes {
        /// Number of attached nodes.
        have: u32,
        /// Number of nodes needed.
        need: u32,
    },
    /// There are enough nodes, but more may be on their way.
    LastCall {
        /// Number of attached nodes.
        have: u32,
        /// Number of nodes wanted.
        want: u32,
    },
    /// Workers of the old generation are being ended.
    Fencing {
        /// Nodes that have not yet reported the end of their workers.
        waiting: Vec<NodeId>,
    },
    /// No node of the old world can confirm that it stopped, so its timeout must expire first.
    OldWorldUnreachable,
    /// After a coordinator restart, nodes have some time to come back.
    Reattaching {
        /// Nodes that are not back yet.
        waiting: Vec<NodeId>,
    },
    /// A write to the store is in flight or will be retried.
    StoreBusy,
    /// The nodes are being checked.
    Checking {
        /// Round of the check.
        round: u32,
    },
    /// Generations failed before their first step, so the next one waits for a while.
    BackingOff {
        /// End of the wait.
        until: Time,
    },
    /// The job is training.
    Training,
    /// The job is stopping on request.
    Stopping,
    /// The job is over.
    Over {
        /// Exit code.
        code: i32,
        /// The cause.
        why: String,
    },
}

/// An entry in the history of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Fact {
    /// The coordinator started or restarted.
    CoordinatorStarted {
        /// Its epoch.
        epoch: u64,
    },
    /// A node joined.
    NodeJoined {
        /// The node.
        node: NodeId,
        /// Whether the same life of its agent came back on a new connection.
        again: bool,
    },
    /// A node was lost.
    NodeLost {
        /// The node.
        node: NodeId,
    },
    /// A failure ended a generation.
    IncidentOpened {
        /// Number of the incident within the job, from 1.
        incident: u64,
        /// The generation that failed.
        generation: Generation,
        /// The node that reported the failure or was lost.
        node: NodeId,
        /// The worker's failure; `None`: the whole node was lost.
        failure: Option<Failure>,
        /// The action taken.
        action: Action,
    },
    /// A machine reported a problem: a line in the kernel log, or an event of a device.
    Signed {
        /// The node.
        node: NodeId,
        /// The problem.
        sign: Sign,
    },
    /// The first cause of an incident, settled after all failures around it were heard.
    Blamed {
        /// The incident.
        incident: u64,
        /// The node at fault.
        node: NodeId,
        /// What failed there first; `None`: the machine itself.
        failure: Option<Box<Failure>>,
        /// The class of the failure.
        verdict: Box<Verdict>,
        /// Number of other failures, by class.
        others: BTreeMap<String, u32>,
    },
    /// The job excludes a node from now on, as long as there are enough others.
    Excluded {
        /// The incident that led to it.
        incident: u64,
        /// The node.
        node: NodeId,
        /// What is wrong with it.
        verdict: Verdict,
    },
    /// A request about machines was made, or its stage changed.
    Requested {
        /// The latest incident; 0 for none.
        incident: u64,
        /// The request and its stage.
        request: Request,
    },
    /// Something happened, and a plan divides the nodes among the jobs.
    Planned {
        /// The incident that the plan is for; 0 for none.
        incident: u64,
        /// What happened, for people.
        change: String,
        /// Whether the plan existed in advance.
        from_table: bool,
        /// Number of nodes, by job.
        units: BTreeMap<String, u32>,
    },
    /// The nodes were checked.
    Checked {
        /// The latest incident; 0 for none.
        incident: u64,
        /// Number of nodes.
        nodes: u64,
        /// Number of rounds.
        rounds: u32,
        /// What was found.
        found: Found,
    },
    /// Workers of a new generation are being started.
    GenerationStarted {
        /// The generation.
        generation: Generation,
        /// Number of ranks.
        world_size: u32,
        /// Restarts used so far.
        restarts: u32,
    },
    /// The world changes size without a failure: waiting nodes are taken in, or members leave.
    Growing {
        /// The generation that ends for it.
        generation: Generation,
        /// The waiting nodes; none: members leave.
        nodes: Vec<NodeId>,
    },
    /// Nodes cannot read the job's state, so it continues without them.
    LeftOut {
        /// The generation that ends for it.
        generation: Generation,
        /// The nodes.
        nodes: Vec<NodeId>,
    },
    /// The restore step of a generation was decided.
    Restored {
        /// The generation.
        generation: Generation,
        /// The step; `None` for a fresh start.
        step: Option<Step>,
        /// Tier of each rank's shard, by rank.
        tiers: Vec<Tier>,
        /// Completed steps that must be computed again.
        steps_lost: u64,
        /// Number of nodes that restore it; 0: recorded by a version without this field.
        #[serde(default)]
        nodes: u32,
    },
    /// A worker crashed after the end of training, so it counts as finished.
    LateCrash {
        /// The generation.
        generation: Generation,
        /// Node of the worker.
        node: NodeId,
        /// The crash.
        failure: Failure,
        /// A rank that had ended normally at the same step; `None`: the worker's own script was
        /// over.
        with: Option<Rank>,
    },
    /// A launched process exited with 0, but the process that trained in its place had ended
    /// without Python's normal exit: whether the training had finished is not known.
    EndUnconfirmed {
        /// The generation.
        generation: Generation,
        /// Node of the worker.
        node: NodeId,
        /// Its rank.
        rank: Rank,
        /// Process id of the one that trained.
        pid: u32,
        /// Steps that it had completed; `None`: not known.
        step: Option<Step>,
    },
    /// A rank could not read what it was told to restore, so the job restores something else.
    RestoreFailed {
        /// The generation.
        generation: Generation,
        /// The rank.
        rank: Rank,
        /// The step.
        step: Step,
        /// The tier it was to be read from.
        tier: Tier,
    },
    /// For the first time in a generation, all nodes hold a step with all its replicas.
    Replicated {
        /// The generation.
        generation: Generation,
        /// The step.
        step: Step,
        /// Number of copies of each shard on other nodes.
        replicas: u32,
    },
    /// The first new step of a generation is complete.
    FirstStep {
        /// The generation.
        generation: Generation,
        /// Steps completed.
        step: Step,
        /// The incident that ends with this, if any.
        incident: Option<u64>,
        /// The step that the ranks continue from; `None`: not known.
        #[serde(default)]
        from: Option<Step>,
        /// The highest step that the job had completed before; `None`: not known.
        #[serde(default)]
        had: Option<Step>,
    },
    /// The step that the ranks of a generation continue from became known.
    Began {
        /// The generation.
        generation: Generation,
        /// Steps completed by now.
        step: Step,
        /// The step that they continue from.
        from: Step,
        /// The highest step that the job had completed before; `None`: not known.
        had: Option<Step>,
    },
    /// All ranks are where the job was before a failure, so its cost is recovered.
    CaughtUp {
        /// The generation.
        generation: Generation,
        /// The step.
        step: Step,
        /// The incident.
        incident: u64,
    },
    /// How far the job is, recorded from time to time and before whatever ends a generation.
    Progress {
        /// The generation.
        generation: Generation,
        /// The lowest step that any rank has completed.
        step: Step,
        /// Median duration of the ranks' last steps, in microseconds.
        step_us: u64,
    },
    /// A rank holds the others up because its own work takes longer than theirs, or no longer does.
    SlowRank {
        /// The rank.
        rank: Rank,
        /// Its node.
        node: NodeId,
        /// Its own work per step, in percent of the others'.
        percent: u64,
        /// Whether it is slow now; false: it keeps up again.
        slow: bool,
    },
    /// A detector found machines that behave unlike their peers. Training continues.
    Unlike {
        /// Number of the incident within the job, from 1.
        incident: u64,
        /// The generation that is training.
        generation: Generation,
        /// What was found.
        finding: Finding,
    },
    /// A person judged whether an incident was named correctly.
    Noted {
        /// The incident.
        incident: u64,
        /// Whether it was.
        right: bool,
        /// The person's comment.
        note: String,
    },
    /// Ranks that should hold the same state do not: silent corruption.
    Diverged {
        /// The first step at which it was detected.
        step: Step,
        /// The ranks that differ from the majority; without a majority, all ranks.
        ranks: Vec<Rank>,
        /// Their nodes, in the same order.
        nodes: Vec<NodeId>,
        /// Whether most ranks agree, and these do not agree with them.
        certain: bool,
    },
    /// A durable checkpoint became visible.
    Published {
        /// Its step.
        step: Step,
    },
    /// A node reported where its time went.
    Spent {
        /// The node.
        node: NodeId,
        /// The incarnation of its agent.
        incarnation: Incarnation,
        /// The account of one generation, which replaces any earlier one of that generation.
        account: Account,
    },
    /// A node reported the stacks of its workers.
    Stacks {
        /// Their generation.
        generation: Generation,
        /// Stacks by rank.
        stacks: BTreeMap<u32, Stack>,
    },
    /// A node reported its network traffic, sampled at 100 Hz, because the coordinator requested
    /// it.
    Burst {
        /// The node.
        node: NodeId,
        /// The samples: time in milliseconds since 1970, total bytes received, total bytes sent.
        looks: Vec<(u64, u64, u64)>,
    },
    /// A person injected a fault.
    Injected {
        /// The node that it was sent to.
        node: NodeId,
        /// The fault.
        injection: Injection,
    },
    /// People were notified of an incident: every route has accepted the notification or was given
    /// up.
    Notified {
        /// The incident.
        incident: u64,
        /// The state of the incident in the notification.
        status: Status,
        /// When the run of the incident began, in microseconds since 1970; 0: recorded by a version
        /// without this field.
        #[serde(default)]
        run: u64,
    },
    /// The job is over.
    Ended {
        /// Exit code.
        code: i32,
        /// The cause.
        why: String,
    },
}

/// The action taken after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Action {
    /// Restart the worker processes where they were.
    Restart,
    /// Wait for the node or take another one, then restart.
    Reconfigure,
    /// Give up.
    Fail,
    /// Only report it: nothing has failed.
    Tell,
}
