//! What is done about machines, beyond leaving them out of this job: mark a bad one so that nobody gets it again, ask for another one. Said,
//! asked for, or done, as the policy has it. A request has a number, is written down before it leaves, and may arrive twice.
//!
//! ```text
//!  a node is left out for good ──> cordon ──┐  observe: said          advise: waits for a yes
//!  fewer nodes than there were ──> add ─────┘  act:     Provision ──> Provisioned (again on failure, a few times)
//! ```

use super::command::{Command, Fact};
use super::state::{Job, Phase, RECENT};
use crate::id::{Incarnation, JobId, NodeId};
use crate::message::Order;
use crate::spec::Policy;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Nodes are missed for so long before another one is asked for: most come back.
pub(super) const MISSED: Duration = Duration::from_secs(15);
/// A machine that was asked for and has not come by then may be asked for again.
const ARRIVAL: Duration = Duration::from_secs(30 * 60);
/// Tries of one request, and the wait after the first; each next one is twice as long.
const TRIES: u32 = 5;
const AGAIN: Duration = Duration::from_secs(5);

/// Something to be done about machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "action")]
pub enum Remedy {
    /// Nobody is to get this machine until it was seen to.
    Cordon {
        /// the node
        node: NodeId,
        /// its host
        host: String,
        /// why, for people
        why: String,
    },
    /// Another job is to have this machine.
    Move {
        /// the node, as its job calls it
        node: NodeId,
        /// this life of its agent
        incarnation: Incarnation,
        /// its host
        host: String,
        /// the other job
        to: JobId,
        /// why, for people
        why: String,
    },
    /// One more machine is needed.
    Add {
        /// why, for people
        why: String,
    },
}

impl std::fmt::Display for Remedy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Remedy::Cordon { node, host, why } => write!(f, "cordon node {node} ({host}): {why}"),
            Remedy::Move { node, host, to, why, .. } => write!(f, "move node {node} ({host}) to job {to}: {why}"),
            Remedy::Add { why } => write!(f, "add a machine: {why}"),
        }
    }
}

/// How far a request is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// It was said, and that is all.
    Noted,
    /// It waits for a yes.
    Asked,
    /// It is to be carried out.
    Due {
        /// tries so far
        tries: u32,
        /// not before
        at: Time,
    },
    /// Whoever provides machines has taken it.
    Taken,
    /// What was asked for is there.
    Done,
    /// It could not be done.
    Failed {
        /// why
        why: String,
    },
}

impl Stage {
    /// In a word, for people.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Stage::Noted => "noted",
            Stage::Asked => "waits",
            Stage::Due { .. } => "due",
            Stage::Taken => "taken",
            Stage::Done => "done",
            Stage::Failed { .. } => "failed",
        }
    }
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Its number within the job, from 1: whoever is asked twice knows it by that.
    pub id: u64,
    /// What.
    pub remedy: Remedy,
    /// How far it is.
    pub stage: Stage,
    /// When it was made.
    pub at: Time,
}

impl Request {
    /// A machine that may still come.
    fn awaits(&self) -> bool {
        matches!(self.remedy, Remedy::Add { .. }) && !matches!(self.stage, Stage::Done | Stage::Failed { .. })
    }
}

impl Job {
    /// Machines that have shown themselves to be bad.
    fn cordon(&mut self, now: Time, out: &mut Vec<Command>) {
        let mut new = Vec::new();
        for of in self.record.excluded.iter_mut().filter(|e| !e.if_replaced && !e.told_of) {
            of.told_of = true;
            let host = self.nodes.get(&of.node).map_or(String::new(), |n| n.hello.host.clone());
            let why = format!("{}, incident {}", of.class, of.incident);
            new.push(Remedy::Cordon { node: of.node.clone(), host, why });
        }
        for remedy in new {
            self.request(now, remedy, out);
        }
    }

    /// How many nodes this run has had at its best, and is to have beside them.
    fn wanted(&self) -> u32 {
        self.record.largest + if self.record.largest > 0 { self.record.spec.spares } else { 0 }
    }

    /// Nodes that are there, or may come back in a moment, and can be used.
    fn usable(&self) -> u32 {
        let usable = self.nodes.iter().filter(|(id, n)| !self.is_excluded(id, n.hello.incarnation)).count();
        u32::try_from(usable).unwrap_or(u32::MAX)
    }

    /// Asks for what is to be done about machines: bad ones at once, missing ones after a while.
    pub(super) fn remedy(&mut self, now: Time, out: &mut Vec<Command>) {
        self.cordon(now, out);
        self.refill(now, out);
    }

    fn refill(&mut self, now: Time, out: &mut Vec<Command>) {
        if !matches!(self.phase, Phase::Training { reattach_until: None, .. } | Phase::Forming { .. }) {
            self.short_since = None;
            return;
        }
        let coming =
            u32::try_from(self.record.requests.iter().filter(|r| r.awaits() && now.since(r.at) < ARRIVAL).count())
                .unwrap_or(u32::MAX);
        let (wanted, usable) = (self.wanted(), self.usable());
        let missing = wanted.saturating_sub(usable.saturating_add(coming));
        if missing == 0 {
            self.short_since = None;
            return;
        }
        if now < self.short_since.get_or_insert(now).after(MISSED) {
            return;
        }
        self.short_since = None;
        for _ in 0..missing {
            let why = format!("{usable} of {wanted} nodes are there");
            self.request(now, Remedy::Add { why }, out);
        }
    }

    /// When [`Job::remedy`] or a request that failed has something to do next.
    pub(super) fn remedy_deadline(&self) -> impl Iterator<Item = Time> + '_ {
        let again = self.record.requests.iter().filter_map(|r| match r.stage {
            Stage::Due { at, .. } => Some(at),
            _ => None,
        });
        again.chain(self.short_since.map(|at| at.after(MISSED)))
    }

    /// A node that was not there before: what was asked for longest has come.
    pub(super) fn arrived(&mut self, out: &mut Vec<Command>) {
        let Some(request) = self.record.requests.iter_mut().find(|r| r.awaits()) else { return };
        request.stage = Stage::Done;
        let request = request.clone();
        self.tell_of(request, out);
    }

    pub(super) fn request(&mut self, now: Time, remedy: Remedy, out: &mut Vec<Command>) {
        let id = self.record.requests.last().map_or(0, |r| r.id) + 1;
        let (stage, said) = match self.record.spec.policy {
            Policy::Observe => (Stage::Noted, format!("with --policy act this would be asked for: {remedy}")),
            Policy::Advise => (Stage::Asked, format!("to be decided: {remedy}; everstep approve {id}")),
            Policy::Act => (Stage::Due { tries: 0, at: now }, format!("asked for: {remedy}")),
        };
        let request = Request { id, remedy, stage, at: now };
        self.record.requests.push(request.clone());
        let surplus = self.record.requests.len().saturating_sub(RECENT);
        self.record.requests.drain(..surplus);
        if let Some(session) = self.leader() {
            out.push(Command::Send { session, order: Order::Notice { what: said }, after: None });
        }
        self.tell_of(request, out);
    }

    fn tell_of(&mut self, request: Request, out: &mut Vec<Command>) {
        self.changed(false);
        let incident = self.record.incidents;
        out.push(Command::Record { job: self.record.spec.job.clone(), fact: Fact::Requested { incident, request } });
    }

    /// Whether a person may say yes to this request; what it is.
    ///
    /// # Errors
    /// A sentence that says why not.
    pub fn may_approve(&self, id: u64) -> Result<String, String> {
        let request = self.record.requests.iter().find(|r| r.id == id);
        let request = request.ok_or_else(|| format!("there is no request {id}; everstep approve lists them"))?;
        match request.stage {
            Stage::Noted | Stage::Asked | Stage::Failed { .. } => Ok(request.remedy.to_string()),
            _ => Err(format!("request {id} was decided before: {}", request.remedy)),
        }
    }

    /// Somebody has said yes.
    pub(super) fn approved(&mut self, now: Time, id: u64, out: &mut Vec<Command>) {
        if self.may_approve(id).is_err() {
            return;
        }
        let Some(request) = self.record.requests.iter_mut().find(|r| r.id == id) else { return };
        request.stage = Stage::Due { tries: 0, at: now };
        let request = request.clone();
        self.without_marked(&request, out);
        self.tell_of(request, out);
    }

    /// What is to be carried out now; each once per try and life of the coordinator.
    pub(super) fn provisions(&mut self, now: Time) -> Vec<Command> {
        if self.write_pending() {
            // Written down before it leaves: a later life knows of it.
            return Vec::new();
        }
        let due = self.record.requests.iter().filter(|r| matches!(r.stage, Stage::Due { at, .. } if now >= at));
        let new: Vec<Request> =
            due.filter(|r| !self.provisioning.contains(&r.id) && self.may_leave(r)).cloned().collect();
        self.provisioning.extend(new.iter().map(|r| r.id));
        let job = &self.record.spec.job;
        new.into_iter().map(|request| Command::Provision { job: job.clone(), request }).collect()
    }

    /// Whoever provides machines has answered.
    pub(super) fn provisioned(&mut self, now: Time, id: u64, result: Result<(), String>, out: &mut Vec<Command>) {
        self.provisioning.remove(&id);
        let Some(request) = self.record.requests.iter_mut().find(|r| r.id == id) else { return };
        let Stage::Due { tries, .. } = request.stage else { return };
        request.stage = match (result, &request.remedy) {
            (Ok(()), Remedy::Cordon { .. } | Remedy::Move { .. }) => Stage::Done,
            (Ok(()), Remedy::Add { .. }) => Stage::Taken,
            (Err(_), _) if tries + 1 < TRIES => {
                Stage::Due { tries: tries + 1, at: now.after(AGAIN * 2u32.saturating_pow(tries)) }
            }
            (Err(why), _) => Stage::Failed { why },
        };
        let request = request.clone();
        if let (Stage::Failed { why }, Some(session)) = (&request.stage, self.leader()) {
            let what = format!("request {} could not be carried out ({}): {why}", request.id, request.remedy);
            out.push(Command::Send { session, order: Order::Notice { what }, after: None });
        }
        self.tell_of(request, out);
    }
}
