//! The coordinator's data. [`JobRecord`] is kept in the store; everything else is rebuilt from what
//! agents report when they come back.

use super::blame::Inquiry;
use super::command::Reason;
use super::ending::Ending;
use super::event::Version;
use super::exclusion::Exclusion;
use super::growth::Growth;
use super::network::Charge;
use super::node_check::Checking;
use super::remedy::Request;
use super::replication::Replicas;
use crate::id::{Generation, Incarnation, NodeId, PersistId, Rank, Session, Step};
use crate::message::{Hello, Holding, Offers, Parity, ShardFile, Sign, Source, Tier, World};
use crate::progress::ProgressWatch;
use crate::spec::JobSpec;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// The value of a job's key in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// What the user asked for.
    pub spec: JobSpec,
    /// Newest generation; it never decreases, not even when the job runs again.
    pub generation: Generation,
    /// World of that generation.
    pub world: World,
    /// Where the job stands.
    pub stage: Stage,
    /// Restarts used by this run of the job.
    pub restarts: u32,
    /// Times of the latest restarts (at most [`RECENT`]), for the daily budget.
    pub recent: Vec<Time>,
    /// Restarts of the last day that the network caused: not in the daily budget.
    #[serde(default)]
    pub network: Vec<Time>,
    /// Whether some worker has completed an optimizer step.
    pub progressed: bool,
    /// Whether the script uses checkpoints: the memory of the job is worth keeping together.
    #[serde(default)]
    pub checkpointed: bool,
    /// The steps that the latest generations (at most [`RECENT`]) restored: a later step captured
    /// by an earlier generation belongs to a past that did not happen.
    #[serde(default)]
    pub restored: Vec<(Generation, Step)>,
    /// Number of incidents so far.
    pub incidents: u64,
    /// The error of the latest failed worker, with its step, to recognize it if it comes again.
    #[serde(default)]
    pub last_error: Option<(String, Step)>,
    /// Newest published durable checkpoint.
    pub durable: Option<Step>,
    /// Nodes that the job excludes.
    #[serde(default)]
    pub excluded: Vec<Exclusion>,
    /// Nodes blamed for failures (at most [`RECENT`]), and when.
    #[serde(default)]
    pub blamed: Vec<(NodeId, Incarnation, Time)>,
    /// Largest number of nodes in a world of this run.
    #[serde(default)]
    pub largest: u32,
    /// Requests about machines (at most [`RECENT`]).
    #[serde(default)]
    pub requests: Vec<Request>,
    /// Whether the nodes of this run were checked.
    #[serde(default)]
    pub checked: bool,
}

/// Maximum number of entries in each history of a record.
pub const RECENT: usize = 64;

/// Where a job stands, as far as the store needs to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// There is no world yet.
    Forming,
    /// The record's world was promised to its nodes.
    Training,
    /// The job is over.
    Ended {
        /// Exit code.
        code: i32,
        /// The cause.
        why: String,
        /// Agents attached at the end: they belong to this run, whether or not they have heard of
        /// its end.
        #[serde(default)]
        attached: Vec<Incarnation>,
    },
}

/// A node that is attached, or was a moment ago.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its connection; `None` while it may come back.
    pub session: Option<Session>,
    /// When the connection was lost.
    pub lost_at: Option<Time>,
    /// What it last reported about itself.
    pub hello: Hello,
    /// Whether no worker is alive there.
    pub clean: bool,
    /// When it joined.
    pub joined_at: Time,
    /// When it was told to end its workers; after a while, nobody waits for it any more.
    pub fenced_at: Option<Time>,
    /// When a message from it last came late.
    pub late: Option<Time>,
    /// Until then, it gets longer to reconnect, because its messages keep coming late.
    pub bad_network_until: Time,
}

/// What a job is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It waits for nodes, for fenced workers to be gone, or for others to join.
    Forming {
        /// When this phase began.
        since: Time,
        /// When the last node joined; `None`: the nodes are known, so nobody else is waited for.
        last_join: Option<Time>,
    },
    /// Workers run.
    Training {
        /// Nodes whose workers are all over.
        finished: BTreeSet<NodeId>,
        /// After a coordinator restart: until when nodes may come back.
        reattach_until: Option<Time>,
    },
    /// The job was asked to stop: workers have received the signal and may finish.
    Stopping {
        /// Nodes whose workers are gone.
        done: BTreeSet<NodeId>,
        /// When the job stops waiting for the others.
        deadline: Time,
        /// The signal.
        signal: i32,
    },
    /// The job is over.
    Over {
        /// Exit code.
        code: i32,
        /// The cause.
        why: String,
    },
}

impl Phase {
    /// Returns the end of a job that was asked to stop.
    #[must_use]
    pub fn stopped_by(signal: i32) -> Self {
        Phase::Over { code: 128 + signal, why: format!("stopped by signal {signal}") }
    }
}

/// The world that may still be training while the next one forms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OldWorld {
    /// Its nodes and the lives of their agents.
    pub members: BTreeMap<NodeId, Incarnation>,
    /// Whether one of them has no workers left: a collective job cannot train without it.
    pub confirmed: bool,
}

/// A write to the job's key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Write {
    /// The write in flight.
    pub in_flight: Option<PersistId>,
    /// Whether the record changed after that write left.
    pub dirty: bool,
    /// When to retry after a failure, and the pause before that.
    pub retry: Option<(Time, Duration)>,
    /// Whether the write in flight carries a promise that must be made again if it fails.
    pub announces: bool,
    /// Whether the next write carries a promise.
    pub announce_next: bool,
    /// The pause before the latest retry, to be doubled by the next one.
    pub last_pause: Option<Duration>,
}

impl Write {
    /// Returns what a promise that depends on the current record must wait for: `Some(None)` for
    /// nothing, `Some(Some(id))` for the write in flight, `None` if that write has not left yet.
    #[must_use]
    pub fn promise(&self) -> Option<Option<PersistId>> {
        match self.in_flight {
            _ if self.announce_next => None,
            Some(id) if self.announces => Some(Some(id)),
            None if self.announces => None,
            _ => Some(None),
        }
    }
}

/// A shard that was found unreadable: its rank, step and tier.
pub type Unreadable = (Rank, Step, Tier);

/// Shards of one generation on their way to and from storage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Durability {
    /// What each rank could restore, and whether all ranks hold the same.
    pub offers: BTreeMap<Rank, Offers>,
    /// Contents of each node's memory.
    pub holds: BTreeMap<NodeId, Vec<Holding>>,
    /// Parity shards in each node's memory.
    pub parity: BTreeMap<NodeId, Vec<Parity>>,
    /// The decision, kept for ranks that ask again.
    pub decision: Option<(Option<Step>, Vec<Source>)>,
    /// Written shards by step.
    pub written: BTreeMap<Step, (String, BTreeMap<Rank, ShardFile>)>,
}

/// One job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The record that the store has, or will have.
    pub record: JobRecord,
    /// Version of the key; `None` while it does not exist.
    pub version: Option<Version>,
    /// State of the write.
    pub write: Write,
    /// Nodes by id.
    pub nodes: BTreeMap<NodeId, Node>,
    /// What the job is doing.
    pub phase: Phase,
    /// Why.
    pub reason: Reason,
    /// The previous world.
    pub old: OldWorld,
    /// Shards of the current generation.
    pub durability: Durability,
    /// Replicas of the current generation.
    pub replication: Replicas,
    /// Shards that were found unreadable in this life of the coordinator.
    pub unreadable: BTreeSet<Unreadable>,
    /// Steps that every rank had completed before the last failure.
    pub high_water: Option<Step>,
    /// The highest step that every rank had completed before the current generation.
    pub highest: Option<Step>,
    /// Like `high_water`, while it is collected from nodes that stop.
    pub reached: Option<Step>,
    /// The incident that the current generation should end.
    pub open_incident: Option<u64>,
    /// The incident that it ended with its first step, though the job may not have caught up.
    pub ended_incident: Option<u64>,
    /// The incident that is over when all ranks have completed this step again.
    pub behind: Option<(u64, Step)>,
    /// The latest generation known to continue from a step, and that step.
    pub began: Option<(Generation, Step)>,
    /// Whether the first step of the current generation was reported.
    pub stepped: bool,
    /// When the current generation began.
    pub trained_since: Time,
    /// The failures collected around the latest incident, for a moment.
    pub inquiry: Option<Inquiry>,
    /// Exit code of the job once the first cause is known, and why it is not restarted.
    pub giving_up: Option<(i32, String)>,
    /// What the latest restart was charged for.
    pub charge: Option<Charge>,
    /// Recent signs of machines.
    pub signs: VecDeque<(Time, NodeId, Sign)>,
    /// Number of generations in a row that failed before their first step, and until when the next
    /// one waits.
    pub in_a_row: (u32, Time),
    /// Since when nodes are missing.
    pub short_since: Option<Time>,
    /// Requests that are being carried out.
    pub provisioning: BTreeSet<u64>,
    /// A check of the nodes in progress.
    pub checking: Option<Checking>,
    /// When a failure last remained unexplained.
    pub unexplained: Option<Time>,
    /// Whether the current failure may be a second unexplained one.
    pub doubtful: bool,
    /// Whether the nodes are checked before the next world forms.
    pub check_asked: bool,
    /// An attempt to change the size of the world.
    pub growth: Option<Growth>,
    /// No attempt before this time.
    pub growth_after: Time,
    /// Whether the next world forms to change its size: waiting nodes are taken in.
    pub newcomers: bool,
    /// Nodes that could not read the job's state; true: because nothing was durable yet.
    pub unable: BTreeMap<NodeId, bool>,
    /// Whether the same lives of the same nodes have the same ranks as in the previous generation,
    /// if there was one: nothing in memory is lost.
    pub stayed: bool,
    /// The ranks that have ended, or may have.
    pub ending: Ending,
    /// What the ranks of the current generation report.
    pub progress: ProgressWatch,
    /// Nodes left out of a world (only used by the planted bug `TrimmedNeverReadmitted`).
    pub left_out: BTreeSet<NodeId>,
}

impl Job {
    /// Returns a new job.
    #[must_use]
    pub fn new(spec: JobSpec, now: Time) -> Self {
        let record = JobRecord {
            spec,
            generation: Generation(0),
            world: World::default(),
            stage: Stage::Forming,
            restarts: 0,
            recent: Vec::new(),
            network: Vec::new(),
            progressed: false,
            checkpointed: false,
            restored: Vec::new(),
            incidents: 0,
            last_error: None,
            durable: None,
            excluded: Vec::new(),
            blamed: Vec::new(),
            largest: 0,
            requests: Vec::new(),
            checked: false,
        };
        Job::from_record(record, None, now)
    }

    /// Returns a job from its record: its nodes are expected to come back.
    #[must_use]
    pub fn from_record(record: JobRecord, version: Option<Version>, now: Time) -> Self {
        let reattach_until = Some(now.after(record.spec.ladder().reattach));
        let phase = match &record.stage {
            Stage::Forming => Phase::Forming { since: now, last_join: Some(now) },
            Stage::Training => Phase::Training { finished: BTreeSet::new(), reattach_until },
            Stage::Ended { code, why, .. } => Phase::Over { code: *code, why: why.clone() },
        };
        let old = OldWorld {
            members: record.world.slots.iter().map(|s| (s.node.clone(), s.incarnation)).collect(),
            confirmed: record.world.slots.is_empty(),
        };
        Job {
            record,
            version,
            write: Write::default(),
            nodes: BTreeMap::new(),
            phase,
            reason: Reason::StoreBusy,
            old,
            durability: Durability::default(),
            replication: Replicas::default(),
            unreadable: BTreeSet::new(),
            high_water: None,
            highest: None,
            reached: None,
            open_incident: None,
            ended_incident: None,
            behind: None,
            began: None,
            stepped: false,
            trained_since: now,
            inquiry: None,
            giving_up: None,
            charge: None,
            signs: VecDeque::new(),
            in_a_row: (0, Time(0)),
            short_since: None,
            provisioning: BTreeSet::new(),
            checking: None,
            unexplained: None,
            doubtful: false,
            check_asked: false,
            growth: None,
            growth_after: Time(0),
            newcomers: false,
            unable: BTreeMap::new(),
            stayed: false,
            ending: Ending::default(),
            progress: ProgressWatch::default(),
            left_out: BTreeSet::new(),
        }
    }

    /// Returns the connections of all attached nodes.
    pub fn sessions(&self) -> impl Iterator<Item = (&NodeId, Session)> {
        self.nodes.iter().filter_map(|(id, n)| n.session.map(|s| (id, s)))
    }

    /// Returns whether a snapshot of this step by this generation belongs to the past that the job
    /// still has.
    #[must_use]
    pub fn is_of_this_past(&self, generation: Generation, step: Step) -> bool {
        self.record.restored.iter().all(|(g, s)| *g <= generation || step <= *s)
    }

    /// Returns whether `node`, in this life, is part of the current world.
    #[must_use]
    pub fn is_member(&self, node: &NodeId, incarnation: Incarnation) -> bool {
        self.record.world.slot(node).is_some_and(|s| s.incarnation == incarnation)
    }
}
