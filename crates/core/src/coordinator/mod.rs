//! The coordinator's state machine. This file only routes events; the files beside it handle them.
//!
//! Contract: call [`Coordinator::handle`] once, then [`Coordinator::poll`] until `None`. The same
//! events at the same times give the same commands, byte for byte. A `Send` that names a `Persist`
//! leaves only when that write has succeeded. A message of an old generation or connection changes
//! nothing.

mod blame;
pub mod check_findings;
pub mod command;
mod ending;
pub mod event;
mod exclusion;
pub mod finding;
mod growth;
pub mod incident;
pub mod job;
mod live_plan;
mod membership;
mod network;
mod node_check;
mod node_selection;
mod outlier;
mod output;
mod progress;
mod reassignment;
mod rebuild;
mod remediation;
mod replication;
mod reports;
pub mod request;
mod restore_point;
mod stopping;
pub mod timers;
pub mod wording;
mod write_ahead;

use crate::id::{Epoch, JobId, NodeId, PersistId, Session};
use crate::message::{ExitReason, Hello, Order, Report, Stop};
use crate::progress::ProgressWatch;
use crate::time::Time;
use command::{Command, Fact, Reason};
use event::{Event, Version};
use job::{Checking, Ending, Job, JobRecord, Phase, Replicas, Stage};
use output::Output;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Returns a job's key in the store.
#[must_use]
pub fn job_key(job: &JobId) -> String {
    format!("job/{job}")
}

/// The state machine for all jobs of a cluster.
#[derive(Clone, Debug)]
pub struct Coordinator {
    epoch: Epoch,
    jobs: BTreeMap<JobId, Job>,
    by_session: BTreeMap<Session, (JobId, NodeId)>,
    writes: BTreeMap<PersistId, JobId>,
    next_write: PersistId,
    out: VecDeque<Command>,
    stepped_down: bool,
    /// Latest time, and how far the caller's clock has jumped back so far.
    latest: Time,
    behind: Duration,
    ticked: Time,
    live_plan: Option<live_plan::LivePlan>,
    /// The bug to exhibit, if any.
    #[cfg(feature = "planted")]
    pub planted: Option<crate::planted_bugs::Bug>,
}

impl Coordinator {
    /// Creates the coordinator of this `epoch` from the records found in the store.
    #[must_use]
    pub fn new(epoch: Epoch, records: Vec<(JobRecord, Version)>, now: Time) -> Self {
        let mut c = Coordinator {
            epoch,
            jobs: BTreeMap::new(),
            by_session: BTreeMap::new(),
            writes: BTreeMap::new(),
            next_write: PersistId(1),
            out: VecDeque::new(),
            stepped_down: false,
            latest: now,
            behind: Duration::ZERO,
            ticked: now,
            live_plan: None,
            #[cfg(feature = "planted")]
            planted: None,
        };
        for (record, version) in records {
            let id = record.spec.job.clone();
            let fact = Fact::CoordinatorStarted { epoch: epoch.0 };
            c.out.push_back(Command::Record { job: id.clone(), fact });
            let mut job = Job::from_record(record, Some(version), now);
            job.replicas.begin_after(epoch);
            // Write the record as it was read, so that a later write of an earlier coordinator
            // conflicts. If another write came after the read, this one conflicts, and the record
            // is read again.
            job.changed(false);
            c.jobs.insert(id.clone(), job);
            c.write(now, &id, false);
        }
        c
    }

    /// Handles one event. Never blocks, and never panics on any input.
    pub fn handle(&mut self, now: Time, event: Event) {
        if self.stepped_down {
            return;
        }
        // A clock that jumps back must not postpone what is due.
        if now.after(self.behind) < self.latest {
            self.behind = self.latest.since(now);
        }
        let now = now.after(self.behind);
        self.latest = now;
        match event {
            Event::Joined { session, hello } => self.joined(now, session, *hello),
            Event::Lost { session } => self.lost(now, session),
            Event::Late { session } => {
                if let Some((id, node)) = self.by_session.get(&session).cloned() {
                    self.with(now, &id, |job, now, _| job.nodes.late(now, &node));
                }
            }
            Event::Report { session, report } => self.report(now, session, report),
            Event::Persisted { id, result } => self.persisted(now, id, result),
            Event::StopJob { job, signal } => {
                self.with(now, &job, |j, now, out| j.stop(now, Stop { signal, at: None }, out));
            }
            Event::Provisioned { job, id, result } => {
                self.with(now, &job, |j, now, out| j.provisioned(now, id, result, out));
            }
            Event::Approved { job, id } => self.with(now, &job, |j, now, out| j.approved(now, id, out)),
            Event::Unlike { job, finding } => self.with(now, &job, |j, now, out| j.unlike(now, finding, out)),
            Event::Progress { session, generation, ranks } => self.progressed(now, session, generation, ranks),
            Event::Superseded => self.step_down("a later coordinator has taken over".into()),
            Event::Tick => {
                self.ticked = now;
                let ids: Vec<JobId> = self.jobs.keys().cloned().collect();
                for id in ids {
                    self.with(now, &id, Job::tick);
                }
                self.replan(now);
            }
        }
    }

    /// Returns the next command, or `None` if there are no more.
    pub fn poll(&mut self) -> Option<Command> {
        self.out.pop_front()
    }

    /// Returns when to call [`Coordinator::handle`] with [`Event::Tick`], on the clock of `now`. If
    /// that moment passed while another event was handled, it is `now`.
    #[must_use]
    pub fn deadline(&self, now: Time) -> Option<Time> {
        let next = self
            .jobs
            .values()
            .filter_map(|j| Some(j.next_timeout(self.ticked)?.1))
            .chain(self.plans_deadline())
            .min()?;
        Some(Time(now.0 + u64::try_from(next.since(now.after(self.behind)).as_millis()).unwrap_or(u64::MAX)))
    }

    /// Returns all jobs, for status and tests.
    #[must_use]
    pub fn jobs(&self) -> &BTreeMap<JobId, Job> {
        &self.jobs
    }

    /// Returns whether this connection has joined and was not lost.
    #[must_use]
    pub fn knows(&self, session: Session) -> bool {
        self.by_session.contains_key(&session)
    }

    /// Returns whether no job needs this coordinator any more.
    #[must_use]
    pub fn idle(&self) -> bool {
        self.jobs.values().all(|j| matches!(j.phase, Phase::Over { .. }) && j.nodes.is_empty() && j.write.is_answered())
    }

    fn joined(&mut self, now: Time, session: Session, hello: Hello) {
        let id = hello.spec.job.clone();
        if let Err(e) = hello.spec.validate() {
            return self.refuse(session, e.to_string(), 2);
        }
        let job = self.jobs.entry(id.clone()).or_insert_with(|| Job::new(&hello, now));
        let over = matches!(job.phase, Phase::Over { .. });
        // An agent that was welcomed to this run is only informed of its end, however late it comes
        // back.
        let of_this_run = hello.began == Some(job.record.began)
            || matches!(&job.record.stage, Stage::Ended { attached, .. } if attached.contains(&hello.incarnation));
        // A lost connection may come back for a while, but not to a job that is over: a user who
        // starts the job again right after its end wants a new run.
        let gone = job.nodes.sessions().next().is_none();
        if over && gone && !job.write.is_pending() && hello.running.is_none() && !of_this_run {
            job.run_anew(&hello, now);
        } else if !over && job.record.spec != hello.spec {
            let why = format!(
                "node {} was started with different options than the rest of job {id}; start all nodes with the same \
                 options",
                hello.node
            );
            return self.refuse(session, why, 78);
        }
        self.by_session.insert(session, (id.clone(), hello.node.clone()));
        #[cfg(feature = "planted")]
        let planted = self.planted;
        let epoch = self.epoch;
        self.with(now, &id, |job, now, out| {
            #[cfg(feature = "planted")]
            if planted == Some(crate::planted_bugs::Bug::DoubleAssignment) && job.nodes.session(&hello.node).is_some() {
                let mut twin = hello.clone();
                twin.node = NodeId(format!("{} ", hello.node));
                return job.joined(now, session, twin, epoch, out);
            }
            job.joined(now, session, hello, epoch, out);
        });
    }

    fn refuse(&mut self, session: Session, why: String, code: i32) {
        self.out.push_back(Command::Send { session, order: Order::Refused(ExitReason { code, why }), after: None });
    }

    fn lost(&mut self, now: Time, session: Session) {
        let Some((id, node)) = self.by_session.remove(&session) else { return };
        let believe_stale = crate::is_planted!(self, StaleLostAfterJoined);
        self.with(now, &id, |job, now, _| job.lost(now, &node, session, believe_stale));
    }

    fn report(&mut self, now: Time, session: Session, report: Report) {
        let Some((id, node)) = self.by_session.get(&session).cloned() else { return };
        self.with(now, &id, |job, now, out| {
            if job.nodes.session(&node) == Some(session) {
                job.report(now, &node, report, out);
            }
        });
    }

    fn step_down(&mut self, why: String) {
        self.stepped_down = true;
        self.out.clear();
        self.out.push_back(Command::StepDown { why });
    }

    /// Runs `act` on a job, then lets the job settle: forms a world, writes the record if it
    /// changed, and queues what depends on that write.
    fn with(&mut self, now: Time, id: &JobId, act: impl FnOnce(&mut Job, Time, &mut Output)) {
        #[cfg(feature = "planted")]
        let planted = self.planted;
        let Some(job) = self.jobs.get_mut(id) else { return };
        let mut out = Output::new(id.clone());
        act(job, now, &mut out);
        if matches!(job.phase, Phase::Over { .. }) {
            job.end(&mut out);
        }
        // Plan while the world is still the one it happened to.
        self.plan_after(now, id, &mut out);
        let Some(job) = self.jobs.get_mut(id) else { return };
        #[cfg(feature = "planted")]
        let left_out = planted == Some(crate::planted_bugs::Bug::TrimmedNeverReadmitted);
        #[cfg(not(feature = "planted"))]
        let left_out = false;
        job.try_form(now, left_out, &mut out);
        job.consider_growth(now, &mut out);
        job.request_remedies(now, &mut out);
        job.release_reassigned(&mut out);
        self.mark_plans_stale(now, &out);
        self.out.extend(out.into_commands());
        let early = crate::is_planted!(self, SendBeforePersist);
        #[cfg(feature = "planted")]
        if planted == Some(crate::planted_bugs::Bug::BudgetResetOnRestart)
            && let Some(job) = self.jobs.get_mut(id)
            && job.reason_is_reattaching()
        {
            job.record.reset_restarts();
        }
        self.write(now, id, early);
        if let Some(job) = self.jobs.get_mut(id) {
            self.out.extend(job.provisions(now));
        }
    }
}

impl Job {
    #[cfg(feature = "planted")]
    fn reason_is_reattaching(&self) -> bool {
        matches!(self.phase, Phase::Training { reattach_until: Some(_), .. })
    }

    fn run_anew(&mut self, hello: &Hello, now: Time) {
        let (generation, version) = (self.record.generation, self.write.version());
        let mut fresh = Job::from_record(JobRecord::new(hello.spec.clone(), hello.incarnation), version, now);
        fresh.record.generation = generation;
        *self = fresh;
    }

    fn end(&mut self, out: &mut Output) {
        let Phase::Over { code, why } = &self.phase else { return };
        self.reason = Reason::Over { code: *code, why: why.clone() };
        if matches!(self.record.stage, Stage::Ended { .. }) {
            return;
        }
        let attached = self.nodes.iter().map(|(_, n)| n.hello.incarnation).collect();
        let fact = Fact::Ended { code: *code, why: why.clone() };
        self.record.stage = Stage::Ended { code: *code, why: why.clone(), attached };
        self.record_progress(out);
        out.record(fact);
        self.changed(true);
    }

    fn try_form(&mut self, now: Time, leave_out: bool, out: &mut Output) {
        let ladder = self.record.spec.ladder();
        let Phase::Forming { since, last_join } = self.phase else {
            if let Phase::Training { reattach_until, .. } = &self.phase {
                let missing = |s: &&crate::message::Slot| reattach_until.is_some() && !self.nodes.contains(&s.node);
                let waiting: Vec<NodeId> =
                    self.record.world.slots.iter().filter(missing).map(|s| s.node.clone()).collect();
                self.reason = if waiting.is_empty() { Reason::Training } else { Reason::Reattaching { waiting } };
            }
            return;
        };
        if self.record.giving_up.is_some() {
            return;
        }
        if !self.nodes.have_trained() && self.nodes.len() < self.record.spec.nodes_min as usize {
            // The common case while a large world gathers: avoid looking at every node.
            let have = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
            self.waits(Reason::WaitingForNodes { have, need: self.record.spec.nodes_min }, out);
            return;
        }
        let waiting = self.nodes.fencing(now);
        if !waiting.is_empty() {
            self.reason = Reason::Fencing { waiting };
            return;
        }
        if !self.nodes.old_world_is_over() && now < since.after(ladder.orphan + ladder.silence * 2) {
            self.reason = Reason::OldWorldUnreachable;
            return;
        }
        if let Some(until) = self.restarts.held_back(now) {
            self.reason = Reason::BackingOff { until };
            return;
        }
        let able: Vec<&Hello> = self
            .nodes
            .iter()
            .filter(|(id, n)| n.is_ready() && self.growth.is_able(id))
            .filter(|(id, n)| !self.record.machines.is_reassigned(id, n.hello.incarnation))
            .filter(|(id, _)| !(leave_out && self.growth.was_left_out(id)))
            .map(|(_, n)| &n.hello)
            .collect();
        let candidates = self.record.fit(able);
        // Nodes with the job's memory come first; others are taken in later, at a step boundary.
        let keep_together = self.record.checkpointed && !self.growth.takes_newcomers();
        match node_selection::form(&self.record.spec, &candidates, &self.record.world, keep_together, last_join, now) {
            Err((reason, _)) => self.waits(reason, out),
            Ok(world) => {
                let nodes: Vec<_> = candidates.iter().map(|h| (h.node.clone(), h.incarnation)).collect();
                if self.check_before(now, &nodes, out) {
                    let round = self.checks.in_progress().map_or(0, Checking::round);
                    self.reason = Reason::Checking { round };
                } else if matches!(self.phase, Phase::Forming { .. }) {
                    self.begin(now, world, out);
                }
            }
        }
    }

    /// Records why no world can form yet. When a job that ran before starts to wait for nodes, all
    /// consoles show it, once.
    fn waits(&mut self, reason: Reason, out: &mut Output) {
        let lacks_nodes = |r: &Reason| matches!(r, Reason::WaitingForNodes { .. });
        if lacks_nodes(&reason) && !lacks_nodes(&self.reason) && self.record.generation.0 > 0 {
            self.to_all(&Order::Notice { what: reason.sentence() }, out);
        }
        self.reason = reason;
    }

    fn begin(&mut self, now: Time, world: crate::message::World, out: &mut Output) {
        self.growth.begin(self.nodes.iter().map(|(id, _)| id).filter(|id| world.slot(id).is_none()).cloned());
        self.nodes.begin(&world);
        let left_out = self.nodes.len() > world.slots.len();
        self.recovery.begin(now);
        let record = &mut self.record;
        record.generation = record.generation.next();
        record.stage = Stage::Training;
        record.ended.clear();
        record.largest = record.largest.max(u32::try_from(world.slots.len()).unwrap_or(u32::MAX));
        let place = |s: &crate::message::Slot| (s.node.clone(), s.incarnation, s.first_rank, s.workers);
        let before = &record.world.slots;
        // A job that starts again has no previous world: each rank's memory is its own.
        let stayed = before.is_empty() || before.iter().map(place).eq(world.slots.iter().map(place));
        record.world = world;
        self.shards.begin(stayed);
        self.replicas = Replicas::default();
        self.ending = Ending::default();
        self.progress = ProgressWatch::default();
        self.phase = Phase::training();
        self.reason = Reason::Training;
        out.record(Fact::GenerationStarted {
            generation: self.record.generation,
            world_size: self.record.world.size(),
            restarts: self.record.restarts(),
        });
        self.changed(true);
        if left_out {
            self.stand_by(out);
        }
    }
}
