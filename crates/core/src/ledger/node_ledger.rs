//! The time of all places of one node, over the generations that the node takes part in.

use super::meter::{Before, Usual};
use super::{Category, Meter, Reading, Spent};
use crate::id::Generation;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Number of closed accounts that are reported again.
const CLOSED: usize = 4;

/// What a node's places spent on one generation, from the start of its workers to the start of the
/// next ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Account {
    /// The generation; for a waiting node, the last one it took part in.
    pub generation: Generation,
    /// Number of places for ranks.
    pub places: u32,
    /// Microseconds, summed over the places.
    pub spent: Spent,
    /// Microseconds of incomplete steps, which a completed step or a failure will explain.
    pub pending: u64,
    /// The steps that its workers completed; `None`: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<Steps>,
}

/// The steps of one generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Steps {
    /// The step that it continued from; `None`: not known.
    pub from: Option<u64>,
    /// Number of steps completed beyond that.
    pub done: u64,
}

impl Steps {
    /// Derives the steps from a worker's board.
    fn of(seen: &Reading) -> Option<Steps> {
        let done = seen.new_steps();
        (done > 0).then_some(Steps { from: seen.numbered.then_some(seen.restored), done })
    }

    /// Combines two places: the steps that both have completed.
    fn and(self, other: Steps) -> Steps {
        Steps { from: self.from.filter(|from| other.from == Some(*from)), done: self.done.min(other.done) }
    }
}

/// How a worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It finished without an error.
    Well,
    /// It failed, so its incomplete step is lost.
    Failed,
    /// It was asked to stop.
    Stopped,
}

/// Why a node's places have no workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Idle {
    /// The job has not started.
    Schedule,
    /// Something failed, or the world is changing.
    Decide,
    /// The node waits for a place in the world.
    Spare,
    /// The node is excluded from the job.
    Excluded,
    /// The job is ending.
    Suspended,
}

impl Idle {
    fn category(self) -> Category {
        match self {
            Idle::Schedule => Category::Schedule,
            Idle::Decide => Category::Decide,
            Idle::Spare => Category::SpareIdle,
            Idle::Excluded => Category::ExcludedIdle,
            Idle::Suspended => Category::Suspended,
        }
    }
}

/// The time ledger of one node. The totals of a generation only grow; their sum is exactly places ×
/// time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLedger {
    places: u32,
    generation: Generation,
    /// Time of the current generation, without its running workers.
    spent: Spent,
    idle: Idle,
    /// Since when the places without a worker are in this state.
    since: u64,
    meters: BTreeMap<u32, Meter>,
    usual: Usual,
    /// The latest closed accounts, oldest first.
    closed: VecDeque<Account>,
    /// Microseconds of all closed accounts.
    past: u64,
    /// When the node began to take part.
    began: u64,
    /// What any worker here, or the job, had completed in earlier generations.
    before: Before,
    reached: u64,
    /// Steps of the current generation, by local rank.
    steps: BTreeMap<u32, Steps>,
}

impl NodeLedger {
    /// Opens the ledger of a node that takes part from `at` on (microseconds on its clock).
    #[must_use]
    pub fn new(places: u32, at: u64) -> Self {
        NodeLedger {
            places,
            generation: Generation(0),
            spent: Spent::default(),
            idle: Idle::Schedule,
            since: at,
            meters: BTreeMap::new(),
            usual: Usual::default(),
            closed: VecDeque::new(),
            past: 0,
            began: at,
            before: Before::default(),
            reached: 0,
            steps: BTreeMap::new(),
        }
    }

    /// Accounts for the places without a worker up to `at`.
    fn settle(&mut self, at: u64) {
        let free = u64::from(self.places).saturating_sub(self.meters.len() as u64);
        self.spent.put(self.idle.category(), at.saturating_sub(self.since) * free);
        self.since = self.since.max(at);
    }

    /// Records the start of the workers of a new generation.
    pub fn start(&mut self, at: u64, generation: Generation) {
        self.fenced(at);
        // The first generation continues the account in which the node waited for it.
        if self.generation != Generation(0) {
            let account = self.account(at);
            self.past += account.spent.total() + account.pending;
            self.closed.push_back(account);
            self.spent = Spent::default();
        }
        while self.closed.len() > CLOSED {
            self.closed.pop_front();
        }
        self.generation = generation;
        self.best(self.reached);
        self.steps.clear();
        self.meters = (0..self.places).map(|local| (local, Meter::new(at))).collect();
        self.idle = Idle::Decide;
    }

    /// Records a sample of a worker's board.
    pub fn look(&mut self, at: u64, local: u32, seen: Reading) {
        if let Some(meter) = self.meters.get_mut(&local) {
            meter.look(at, seen, self.before, &mut self.usual);
        }
        // This includes a worker that is being ended.
        self.reached = self.reached.max(seen.step.unwrap_or(0));
        if let Some(steps) = Steps::of(&seen) {
            self.steps.insert(local, steps);
        }
    }

    /// Records that the job had completed this step before.
    pub fn best(&mut self, step: u64) {
        self.before.best = self.before.best.max(step);
        self.before.some |= step > 0;
    }

    /// Records that the job had completed some steps before; how many is not known here.
    pub fn goes_on(&mut self) {
        self.before.some = true;
    }

    /// Records the end of one worker.
    pub fn ended(&mut self, at: u64, local: u32, how: End) {
        self.settle(at);
        let category = match how {
            // Shutdown is the counterpart of setup.
            End::Well => Category::Init,
            End::Failed => Category::Detect,
            End::Stopped => Category::Suspended,
        };
        if let Some(meter) = self.meters.remove(&local) {
            self.spent += meter.close(at, category);
        }
        if how != End::Failed && self.meters.is_empty() {
            self.idle = Idle::Suspended;
        }
    }

    /// Records that a failure was declared or the world changes: no further step of this generation
    /// will be completed.
    pub fn fenced(&mut self, at: u64) {
        self.settle(at);
        let meters = std::mem::take(&mut self.meters);
        if !meters.is_empty() {
            self.idle = Idle::Decide;
        }
        for (_, meter) in meters {
            self.spent += meter.close(at, Category::Detect);
        }
    }

    /// Records that the world has no place for this node.
    pub fn waits(&mut self, at: u64, excluded: bool) {
        self.settle(at);
        self.idle = if excluded { Idle::Excluded } else { Idle::Spare };
    }

    /// Returns whether every microsecond of every place has a category: the sum is exactly places ×
    /// time.
    #[must_use]
    pub fn is_whole(&self, at: u64) -> bool {
        let now = self.account(at);
        self.past + now.spent.total() + now.pending == u64::from(self.places) * at.saturating_sub(self.began)
    }

    /// Returns the latest accounts, the current one last. A reader that missed one finds it here
    /// for a while.
    #[must_use]
    pub fn accounts(&self, at: u64) -> Vec<Account> {
        self.closed.iter().cloned().chain([self.account(at)]).collect()
    }

    fn account(&self, at: u64) -> Account {
        let free = u64::from(self.places).saturating_sub(self.meters.len() as u64);
        let (mut spent, mut pending) = (self.spent, 0);
        spent.put(self.idle.category(), at.saturating_sub(self.since) * free);
        for meter in self.meters.values() {
            let (of, open) = meter.spent(at);
            spent += of;
            pending += open;
        }
        let steps = self.steps.values().copied().reduce(Steps::and);
        Account { generation: self.generation, places: self.places, spent, pending, steps }
    }
}
