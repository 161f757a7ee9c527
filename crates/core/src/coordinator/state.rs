//! The coordinator's data. [`JobRecord`] is what the store holds; everything else is rebuilt from
//! what agents say when they come back.

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
use crate::spec::JobSpec;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// What a job's key in the store holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// What the user asked for.
    pub spec: JobSpec,
    /// Newest generation; never decreases, not even when the job is run anew.
    pub generation: Generation,
    /// World of that generation.
    pub world: World,
    /// Where the job stands.
    pub stage: Stage,
    /// Restarts used by this run of the job.
    pub restarts: u32,
    /// When the latest restarts happened (at most [`RECENT`]), for the daily budget.
    pub recent: Vec<Time>,
    /// Restarts of the last day that the network was the cause of: not in the daily budget.
    #[serde(default)]
    pub network: Vec<Time>,
    /// Some worker has completed an optimizer step.
    pub progressed: bool,
    /// Some worker has asked what to restore: its memory is worth keeping together.
    #[serde(default)]
    pub checkpointed: bool,
    /// What the latest generations (at most [`RECENT`]) restored: a snapshot that an earlier one took of a
    /// later step is of a past that did not happen.
    #[serde(default)]
    pub restored: Vec<(Generation, Step)>,
    /// Incidents opened so far.
    pub incidents: u64,
    /// The latest failure of a worker that ended with an error: what it said, and after how many steps.
    #[serde(default)]
    pub last_error: Option<(String, Step)>,
    /// Newest published durable checkpoint.
    pub durable: Option<Step>,
    /// Nodes that the job does without.
    #[serde(default)]
    pub excluded: Vec<Exclusion>,
    /// Nodes that failures were blamed on (at most [`RECENT`]), and when.
    #[serde(default)]
    pub blamed: Vec<(NodeId, Incarnation, Time)>,
    /// Most nodes that a world of this run has had.
    #[serde(default)]
    pub largest: u32,
    /// What was asked for of machines (at most [`RECENT`]).
    #[serde(default)]
    pub requests: Vec<Request>,
    /// The nodes of this run were checked.
    #[serde(default)]
    pub checked: bool,
}

/// How many restart times and restored steps a record keeps.
pub const RECENT: usize = 64;

/// Where a job stands, as far as the store needs to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// No world yet.
    Forming,
    /// The record's world was promised to its nodes.
    Training,
    /// The job is over.
    Ended {
        /// exit code
        code: i32,
        /// the cause
        why: String,
        /// agents that were there: they belong to this run, whether or not they have heard of its end
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
    /// What it said of itself, kept current.
    pub hello: Hello,
    /// No worker of an older generation is alive there.
    pub clean: bool,
    /// When it joined.
    pub joined_at: Time,
    /// When it was told to end workers; after a while nobody waits for it any more.
    pub fenced_at: Option<Time>,
    /// When a line of it last came late.
    pub late: Option<Time>,
    /// Lines of it keep coming late; until then it gets longer to reconnect.
    pub bad_network_until: Time,
}

/// What a job is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Waiting for nodes, for fenced workers to be gone, or for others to join.
    Forming {
        /// since when
        since: Time,
        /// when the last node joined; `None` when it is known who is there: nobody else is waited for
        last_join: Option<Time>,
    },
    /// Workers run.
    Training {
        /// nodes whose workers all exited with 0
        finished: BTreeSet<NodeId>,
        /// after a coordinator restart: until when nodes may come back
        reattach_until: Option<Time>,
    },
    /// Asked to stop: workers have the signal and may finish.
    Stopping {
        /// nodes whose workers are gone
        done: BTreeSet<NodeId>,
        /// when patience ends
        deadline: Time,
        /// the signal
        signal: i32,
    },
    /// Over.
    Over {
        /// exit code
        code: i32,
        /// the cause
        why: String,
    },
}

impl Phase {
    /// The end of a job that was asked to stop.
    #[must_use]
    pub fn stopped_by(signal: i32) -> Self {
        Phase::Over { code: 128 + signal, why: format!("stopped by signal {signal}") }
    }
}

/// The world that may still be training while the next one forms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OldWorld {
    /// Its nodes and their lives.
    pub members: BTreeMap<NodeId, Incarnation>,
    /// One of them has no workers any more: a collective job cannot train without it.
    pub confirmed: bool,
}

/// A write to the job's key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Write {
    /// The write on its way.
    pub in_flight: Option<PersistId>,
    /// The record changed after that write left.
    pub dirty: bool,
    /// When to try again after a failure, and the pause to use after that.
    pub retry: Option<(Time, Duration)>,
    /// The write on its way carries a promise that must be made again when it fails.
    pub announces: bool,
    /// The next write will carry a promise.
    pub announce_next: bool,
    /// The pause before the latest retry, to be doubled by the next one.
    pub last_pause: Option<Duration>,
}

impl Write {
    /// What a promise that rests on the current record must wait for: `Some(None)` for nothing,
    /// `Some(Some(id))` for the write on its way, `None` when that write has not left yet.
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

/// A shard that was found unreadable: whose, which step, where.
pub type Unreadable = (Rank, Step, Tier);

/// Shards of one generation on their way to and from storage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Durability {
    /// What each rank could restore, and whether every rank holds the same.
    pub offers: BTreeMap<Rank, Offers>,
    /// What each node's memory holds.
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
    /// What the store holds, or will hold.
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
    /// As `high_water`, being collected from nodes that stop.
    pub reached: Option<Step>,
    /// The incident that the current generation is to end.
    pub open_incident: Option<u64>,
    /// The one that it has ended, or not quite.
    pub ended_incident: Option<u64>,
    /// The incident that is over when all ranks have completed this step again.
    pub behind: Option<(u64, Step)>,
    /// The latest generation that is known to go on from a step, and that step.
    pub began: Option<(Generation, Step)>,
    /// First step of the current generation was reported.
    pub stepped: bool,
    /// When the current generation began.
    pub trained_since: Time,
    /// All that is heard of the latest incident, for a moment.
    pub inquiry: Option<Inquiry>,
    /// The job ends with this code when it is known whose failure that was, and why it is not restarted.
    pub giving_up: Option<(i32, String)>,
    /// What the latest restart was charged for.
    pub charge: Option<Charge>,
    /// What machines have told of themselves lately.
    pub signs: VecDeque<(Time, NodeId, Sign)>,
    /// Generations in a row that failed before their first step, and until when the next one waits.
    pub in_a_row: (u32, Time),
    /// Since when nodes are missed.
    pub short_since: Option<Time>,
    /// Requests that are being carried out.
    pub provisioning: BTreeSet<u64>,
    /// A check of the nodes that is under way.
    pub checking: Option<Checking>,
    /// When the latest failure was that nothing explained.
    pub unexplained: Option<Time>,
    /// The failure at hand may be another one.
    pub doubtful: bool,
    /// The nodes are checked before the next world.
    pub check_asked: bool,
    /// An attempt to take in nodes that wait.
    pub growth: Option<Growth>,
    /// No attempt before this.
    pub growth_after: Time,
    /// The next world is formed in order to take in nodes that wait.
    pub newcomers: bool,
    /// Nodes that could not read the job's state; true: because nothing was durable yet.
    pub unable: BTreeMap<NodeId, bool>,
    /// The same lives of the same nodes have the same ranks as in the generation before, if there was one: nothing in memory is lost.
    pub stayed: bool,
    /// How far the ranks are with ending.
    pub ending: Ending,
    /// Nodes left out of a world (only used by the planted bug of that name).
    pub left_out: BTreeSet<NodeId>,
}

impl Job {
    /// A job nobody has heard of.
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

    /// A job as the store knows it: its nodes are expected to come back.
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
            left_out: BTreeSet::new(),
        }
    }

    /// Connections of all attached nodes.
    pub fn sessions(&self) -> impl Iterator<Item = (&NodeId, Session)> {
        self.nodes.iter().filter_map(|(id, n)| n.session.map(|s| (id, s)))
    }

    /// True when the job still has the past that a snapshot of this step by this generation was taken from.
    #[must_use]
    pub fn is_of_this_past(&self, generation: Generation, step: Step) -> bool {
        self.record.restored.iter().all(|(g, s)| *g <= generation || step <= *s)
    }

    /// True when `node`, in this life, is part of the current world.
    #[must_use]
    pub fn is_member(&self, node: &NodeId, incarnation: Incarnation) -> bool {
        self.record.world.slot(node).is_some_and(|s| s.incarnation == incarnation)
    }
}
