//! The coordinators and their store, as the simulator drives them.

use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::command::{Command, Fact, Precondition};
use everstep_core::coordinator::event::{StoreFailure, Version};
use everstep_core::coordinator::job::JobRecord;
use everstep_core::coordinator::request::Request;
use everstep_core::id::{Epoch, JobId, PersistId, Session};
use everstep_core::idle_exit::IdleExit;
use everstep_core::keep_alive::KeepAlive;
use everstep_core::message::Order;
use std::collections::{BTreeMap, BTreeSet};

/// A store with compare-and-swap per key. Versions rise by one.
#[derive(Debug, Default)]
pub struct Store {
    /// The value and version by key.
    pub entries: BTreeMap<String, (Vec<u8>, Version)>,
    /// The store fails every write until this time.
    pub unavailable_until: u64,
}

impl Store {
    /// Writes if the precondition holds.
    ///
    /// # Errors
    /// [`StoreFailure`], like the real stores.
    pub fn put(&mut self, now: u64, key: &str, value: Vec<u8>, when: Precondition) -> Result<Version, StoreFailure> {
        if now < self.unavailable_until {
            return Err(StoreFailure::Unavailable);
        }
        let version = self.entries.get(key).map(|(_, v)| *v);
        let holds = match when {
            Precondition::Absent => version.is_none(),
            Precondition::Version(v) => version == Some(v),
        };
        if !holds {
            return Err(StoreFailure::Conflict);
        }
        let next = version.unwrap_or(0) + 1;
        self.entries.insert(key.into(), (value, next));
        Ok(next)
    }

    /// Returns all job records with their versions.
    #[must_use]
    pub fn records(&self) -> Vec<(JobRecord, Version)> {
        let jobs = self.entries.iter().filter(|(k, _)| k.starts_with("job/"));
        jobs.filter_map(|(_, (value, version))| Some((serde_json::from_slice(value).ok()?, *version))).collect()
    }
}

/// One coordinator process.
#[derive(Debug)]
pub struct Process {
    /// The real state machine.
    pub core: Coordinator,
    pub epoch: Epoch,
    /// The process runs.
    pub alive: bool,
    /// Its clock minus the simulation's, in milliseconds.
    pub clock_offset: i64,
    /// Orders that wait for a write.
    pub waiting: BTreeMap<PersistId, Vec<(Session, Order)>>,
    /// Dies at its next write: before it reaches the store (true) or after (false).
    pub crash_at_persist: Option<bool>,
    /// When its timer wakes it.
    pub wake_at: Option<u64>,
    /// Which of its connections are silent for too long.
    pub keep_alive: KeepAlive,
    /// When it ends because nobody needs it.
    pub idle_exit: IdleExit,
    /// Its open connections.
    pub sessions: BTreeSet<Session>,
    /// Its connections are being checked, because an agent may be silent.
    pub checking: bool,
}

/// What a coordinator process wants done, in order.
pub enum Effect {
    /// Send an order now.
    Send(Session, Order),
    /// Start a write.
    Write(PersistId, String, Vec<u8>, Precondition),
    /// Record a fact.
    Record(Fact),
    /// Pass on a request about machines.
    Provision(JobId, Request),
    /// End the process.
    StepDown,
}

impl Process {
    /// Drains the core and returns the effects. Orders that wait for a write are kept back.
    pub fn drain(&mut self) -> Vec<Effect> {
        let mut effects = Vec::new();
        while let Some(command) = self.core.poll() {
            match command {
                Command::Send { session, order, after: None } => effects.push(Effect::Send(session, order)),
                Command::Send { session, order, after: Some(id) } => {
                    self.waiting.entry(id).or_default().push((session, order));
                }
                Command::Persist { id, key, value, precondition } => {
                    effects.push(Effect::Write(id, key, value, precondition));
                }
                Command::Record { fact, .. } => effects.push(Effect::Record(fact)),
                Command::Provision { job, request } => effects.push(Effect::Provision(job, request)),
                Command::StepDown { .. } => effects.push(Effect::StepDown),
            }
        }
        effects
    }
}
