//! Remedies for machines, beyond excluding them from this job: cordon a bad one so that no job gets
//! it again, ask for another one, or give one to another job. The policy decides whether a remedy
//! is reported, proposed or carried out. A request has a number, is written before it leaves, and
//! may arrive twice.
//!
//! ```text
//!  a node is excluded for good ──> cordon ──┐  observe: reported    advise: waits for approval
//!  nodes are missing ────────────> add ─────┤
//!  another job needs a node ─────> move ────┘  act: Provision ──> Provisioned (with retries)
//! ```

use super::command::{Command, Fact};
use super::job::{Job, Phase};
use super::output::Output;
use super::request::{NotApproved, NotProvisioned, Remedy, Request, Stage};
use crate::spec::Policy;
use crate::time::Time;
use std::time::Duration;

/// A requested machine that has not arrived within this time may be requested again.
const ARRIVAL: Duration = Duration::from_mins(30);
/// Attempts at one request, and the wait after the first; each further wait is twice as long.
const TRIES: u32 = 5;
const AGAIN: Duration = Duration::from_secs(5);

impl Job {
    /// Requests a cordon for each newly excluded bad machine.
    fn cordon(&mut self, now: Time, out: &mut Output) {
        let mut new = Vec::new();
        for of in self.record.machines.excluded_mut().iter_mut().filter(|e| !e.if_replaced && !e.told_of) {
            of.told_of = true;
            let host = self.nodes.get(&of.node).map_or(String::new(), |n| n.hello.host.clone());
            let why = format!("{}, incident {}", of.class, of.incident);
            new.push(Remedy::Cordon { node: of.node.clone(), host, why });
        }
        for remedy in new {
            self.request(now, remedy, out);
        }
    }

    /// Returns the number of nodes that the run should have: the most it ever had, plus its spares.
    fn wanted(&self) -> u32 {
        self.record.largest + if self.record.largest > 0 { self.record.spec.spares } else { 0 }
    }

    /// Returns the number of usable nodes, including those that may still reconnect.
    fn usable(&self) -> u32 {
        let usable =
            self.nodes.iter().filter(|(id, n)| !self.record.machines.is_excluded(id, n.hello.incarnation)).count();
        u32::try_from(usable).unwrap_or(u32::MAX)
    }

    /// Requests what must be done about machines: bad ones at once, missing ones after a while.
    pub(super) fn request_remedies(&mut self, now: Time, out: &mut Output) {
        self.cordon(now, out);
        self.refill(now, out);
    }

    fn refill(&mut self, now: Time, out: &mut Output) {
        if !matches!(self.phase, Phase::Training { reattach_until: None, .. } | Phase::Forming { .. }) {
            return self.provisioning.none_missing();
        }
        let coming = u32::try_from(
            self.record.machines.requests().iter().filter(|r| r.awaits() && now.since(r.at) < ARRIVAL).count(),
        )
        .unwrap_or(u32::MAX);
        let (wanted, usable) = (self.wanted(), self.usable());
        let missing = wanted.saturating_sub(usable.saturating_add(coming));
        if missing == 0 {
            return self.provisioning.none_missing();
        }
        if !self.provisioning.some_missing(now) {
            return;
        }
        for _ in 0..missing {
            let why = format!("{usable} of {wanted} nodes have joined");
            self.request(now, Remedy::Add { why }, out);
        }
    }

    /// Records a new node: the oldest open request for a machine is done.
    pub(super) fn arrived(&mut self, out: &mut Output) {
        let Some(request) = self.record.machines.awaited_mut() else { return };
        request.stage = Stage::Done;
        let request = request.clone();
        self.record_request(request, out);
    }

    pub(super) fn request(&mut self, now: Time, remedy: Remedy, out: &mut Output) {
        let request = self.record.machines.add_request(now, remedy, self.record.spec.policy);
        let Request { id, remedy, .. } = &request;
        let what = match self.record.spec.policy {
            Policy::Observe => format!("--policy act would request: {remedy}"),
            Policy::Advise => format!("waiting for approval: {remedy}; to approve it, run everstep approve {id}"),
            Policy::Act => format!("requested: {remedy}"),
        };
        if let Some(session) = self.leader() {
            out.notice(session, what);
        }
        self.record_request(request, out);
    }

    fn record_request(&mut self, request: Request, out: &mut Output) {
        self.changed(false);
        let incident = self.record.incidents;
        out.record(Fact::Requested { incident, request });
    }

    /// Returns what a request is about, if a person may approve it.
    ///
    /// # Errors
    /// Fails if there is no such request, or if it has been decided.
    pub fn may_approve(&self, id: u64) -> Result<String, NotApproved> {
        let request = self.record.machines.requests().iter().find(|r| r.id == id);
        let request = request.ok_or(NotApproved::Unknown { id })?;
        match request.stage {
            Stage::Noted | Stage::Asked | Stage::Failed { .. } => Ok(request.remedy.to_string()),
            _ => Err(NotApproved::Decided { id, remedy: request.remedy.clone() }),
        }
    }

    /// Records that a person approved a request.
    pub(super) fn approved(&mut self, now: Time, id: u64, out: &mut Output) {
        if self.may_approve(id).is_err() {
            return;
        }
        let Some(request) = self.record.machines.request_mut(id) else { return };
        request.stage = Stage::Due { tries: 0, at: now };
        let request = request.clone();
        self.without_marked(&request, out);
        self.record_request(request, out);
    }

    /// Returns the requests to carry out now, each once per attempt and life of the coordinator.
    pub(super) fn provisions(&mut self, now: Time) -> Vec<Command> {
        if self.write.is_pending() {
            // A request is written before it leaves, so that a later life knows about it.
            return Vec::new();
        }
        let due =
            self.record.machines.requests().iter().filter(|r| matches!(r.stage, Stage::Due { at, .. } if now >= at));
        let mut new: Vec<Request> = due.filter(|r| self.may_be_sent(r)).cloned().collect();
        new.retain(|r| self.provisioning.start(r.id));
        let job = &self.record.spec.job;
        new.into_iter().map(|request| Command::Provision { job: job.clone(), request }).collect()
    }

    /// Records the machine provider's answer.
    pub(super) fn provisioned(&mut self, now: Time, id: u64, result: Result<(), NotProvisioned>, out: &mut Output) {
        self.provisioning.finish(id);
        let Some(request) = self.record.machines.request_mut(id) else { return };
        let Stage::Due { tries, .. } = request.stage else { return };
        request.stage = match (result, &request.remedy) {
            (Ok(()), Remedy::Cordon { .. } | Remedy::Move { .. }) => Stage::Done,
            (Ok(()), Remedy::Add { .. }) => Stage::Taken,
            (Err(_), _) if tries + 1 < TRIES => {
                Stage::Due { tries: tries + 1, at: now.after(AGAIN * 2u32.saturating_pow(tries)) }
            }
            (Err(NotProvisioned(why)), _) => Stage::Failed { why },
        };
        let request = request.clone();
        if let (Stage::Failed { why }, Some(session)) = (&request.stage, self.leader()) {
            let what = format!("request {} could not be carried out ({}): {why}", request.id, request.remedy);
            out.notice(session, what);
        }
        self.record_request(request, out);
    }
}
