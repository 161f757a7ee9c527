//! Replays one list of failures on one cluster under one policy.

use super::failures::{Failures, Kind};
use super::live::{self, Happens, Situation};
use super::policy::{OnLoss, Policy};
use super::record::Recorder;
use super::state::{Phase, State};
use super::time_ledger::{Cause, TimeLedger};
use super::unsaved_work::Work;
use super::work::Workload;
use everstep_planner::{self as planner, Problem, Rates, solve};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// The result of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Where the nodes' time went.
    pub ledger: TimeLedger,
    /// What all jobs achieved and kept, in millionths of a node's peak during a microsecond, times
    /// the weight (Unicron's accumulated WAF).
    pub value: i128,
    /// The same on all nodes, without failures and without overhead.
    pub ideal: i128,
    /// What each job achieved and kept.
    pub jobs: Vec<i128>,
    /// The number of failures that stopped a job.
    pub stopped: u32,
    /// How often a job changed its number of nodes.
    pub changes: u32,
    /// The number of failures that also destroyed the copies in memory.
    pub copies_lost: u32,
}

impl Outcome {
    /// Returns the productive share of all nodes' time.
    #[must_use]
    pub fn goodput(&self) -> f64 {
        self.ledger.productive as f64 / self.ledger.sum().max(1) as f64
    }

    /// Returns the achieved share of the ideal.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.value as f64 / (self.ideal.max(1)) as f64
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Next {
    /// A node is back.
    Back(u32),
    /// The failure at this index of the list.
    Fails(usize),
    /// The failure of a job is detected. Void if the job's version has changed.
    Known(usize, u64, Kind),
    /// The job runs again. Void if the job's version has changed.
    Runs(usize, u64),
    /// A postponed plan is due.
    Plan,
}

struct Run<'a> {
    of: &'a Failures,
    work: &'a Workload,
    policy: &'a Policy,
    problem: Problem,
    now: u64,
    queue: BinaryHeap<Reverse<(u64, Next)>>,
    owner: Vec<Option<usize>>,
    /// Nodes that are up and belong to no job.
    idle: Vec<u32>,
    idle_since: u64,
    up: u32,
    jobs: Vec<State>,
    out: Outcome,
    /// Present if a history was requested.
    recorder: Option<Recorder>,
    /// Before `due`, a plan that no job needs is postponed; `later` is set while one is.
    due: u64,
    later: bool,
}

/// Jobs that need more nodes than the cluster has without failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the jobs cannot fit: they need {least} nodes at least, and there are {nodes} and {spares} spares")]
pub struct TooFewNodes {
    /// The sum of the jobs' minimums.
    pub least: u64,
    /// The number of nodes that are not spares.
    pub nodes: u32,
    pub spares: u32,
}

/// Replays these failures.
///
/// # Errors
/// If the jobs do not all fit on the cluster without failures.
///
/// # Panics
/// If the accounts do not add up to nodes times length, which is a bug in the simulator.
pub fn run(of: &Failures, work: &Workload, policy: &Policy) -> Result<Outcome, TooFewNodes> {
    Ok(replay(of, work, policy, None)?.0)
}

/// Does the same, and returns the history as records of incidents (JSON lines).
///
/// # Errors
/// Those of [`run`].
pub fn history(of: &Failures, work: &Workload, policy: &Policy) -> Result<(Outcome, String), TooFewNodes> {
    let (outcome, recorder) = replay(of, work, policy, Some(Recorder::default()))?;
    let lines = recorder.unwrap_or_default().lines(of, policy, &outcome.ledger);
    Ok((outcome, lines))
}

fn replay(
    of: &Failures,
    work: &Workload,
    policy: &Policy,
    recorder: Option<Recorder>,
) -> Result<(Outcome, Option<Recorder>), TooFewNodes> {
    let spares = policy.spares.min(of.nodes);
    let least: u64 = work.jobs.iter().map(|j| u64::from(j.min)).sum();
    if least > u64::from(of.nodes - spares) {
        return Err(TooFewNodes { least, nodes: of.nodes - spares, spares });
    }
    let mut run = Run::new(of, work, policy, of.nodes - spares);
    run.recorder = recorder;
    while let Some(Reverse((at, next))) = run.queue.pop() {
        if at >= of.length {
            break;
        }
        run.now = at;
        run.step(next);
    }
    let recorder = run.recorder.take();
    Ok((run.end(), recorder))
}

impl<'a> Run<'a> {
    fn new(of: &'a Failures, work: &'a Workload, policy: &'a Policy, units: u32) -> Self {
        let micros = |d: u64| Duration::from_micros(d);
        let moves = planner::Move {
            regroup: micros(policy.regroup),
            state: Duration::ZERO,
            lost: micros((policy.detects(Kind::Node) + policy.restarts(Kind::Node)).saturating_sub(policy.regroup)),
        };
        let mode = match policy.on_loss {
            OnLoss::Plan(mode) => mode,
            _ => planner::Mode::Floor,
        };
        let jobs = work.jobs.iter().map(|j| j.to_plan(moves));
        let rates = Rates {
            unit_mtbf: of.node_mtbf().map(micros),
            at_least: (moves.regroup + moves.lost) * 10,
            ..Rates::default()
        };
        let problem = Problem { units, jobs: jobs.collect(), mode, rates };
        let plan = solve(&problem);
        let mut free = 0..of.nodes;
        let mut owner = vec![None; of.nodes as usize];
        let mut states = Vec::new();
        for (at, job) in work.jobs.iter().enumerate() {
            let planned = plan.units.get(&job.id).copied().unwrap_or(0);
            let nodes: Vec<u32> = free.by_ref().take(planned as usize).collect();
            nodes.iter().for_each(|n| owner[*n as usize] = Some(at));
            states.push(State::new(policy, nodes, planned));
        }
        let out = Outcome::default();
        let mut run = Run {
            of,
            work,
            policy,
            problem,
            now: 0,
            queue: BinaryHeap::new(),
            owner,
            idle: free.rev().collect(),
            idle_since: 0,
            up: of.nodes,
            jobs: states,
            out,
            recorder: None,
            due: 0,
            later: false,
        };
        let all = Problem { units: of.nodes, ..run.problem.clone() };
        let best = solve(&all);
        let nodes = |job: &super::Job| best.units.get(&job.id).copied().unwrap_or(0) as usize;
        run.out.ideal = work.jobs.iter().map(|j| j.worth(nodes(j))).sum::<i128>() * i128::from(of.length);
        if let Some(first) = of.list.first() {
            run.queue.push(Reverse((first.at, Next::Fails(0))));
        }
        run
    }

    /// Returns what a job achieves with the nodes that it has.
    fn rate(&self, job: usize) -> i64 {
        let worth = self.work.jobs[job].worth(self.jobs[job].nodes.len());
        i64::try_from(worth * i128::from(self.policy.efficiency) / 1_000_000).unwrap_or(i64::MAX)
    }

    fn step(&mut self, next: Next) {
        match next {
            Next::Fails(number) => {
                if let Some(after) = self.of.list.get(number + 1) {
                    self.queue.push(Reverse((after.at, Next::Fails(number + 1))));
                }
                self.fails(number);
            }
            Next::Back(node) => self.back(node),
            Next::Plan if self.later => self.plan(),
            Next::Known(job, version, kind) if self.jobs[job].version == version => self.known(job, kind),
            Next::Runs(job, version) if self.jobs[job].version == version => {
                self.settle(job);
                let state = &mut self.jobs[job];
                state.runs(self.policy);
                if let Some(recorder) = &mut self.recorder {
                    recorder.runs(job, self.now, self.jobs[job].nodes.len());
                }
            }
            Next::Known(..) | Next::Runs(..) | Next::Plan => {}
        }
    }

    /// Enters the job's time until now.
    fn settle(&mut self, job: usize) {
        let rate = self.rate(job);
        let (policy, state) = (self.policy, &mut self.jobs[job]);
        let (micros, nodes) = (self.now - state.since, state.nodes.len() as u64);
        state.since = self.now;
        match state.phase {
            Phase::Blocked(cause) => self.out.ledger.block(cause, micros * nodes),
            Phase::Runs => {
                let (worked, stopped) = state.unsaved.run(policy, micros, nodes, rate);
                state.kept += worked.value;
                self.out.ledger.productive += worked.nodes;
                self.out.ledger.block(Cause::Checkpoint, stopped * nodes);
            }
        }
    }

    fn settle_idle(&mut self) {
        let micros = self.now - self.idle_since;
        self.out.ledger.block(Cause::Idle, micros * self.idle.len() as u64);
        self.idle_since = self.now;
    }

    /// Blocks the job for this cause. Returns its new version, which voids its pending events.
    fn block(&mut self, job: usize, cause: Cause) -> u64 {
        self.settle(job);
        let state = &mut self.jobs[job];
        state.version += 1;
        state.phase = Phase::Blocked(cause);
        state.version
    }

    fn fails(&mut self, number: usize) {
        let Some(failure) = self.of.list.get(number) else { return };
        let (node, kind) = (failure.node, failure.kind);
        let owner = self.owner[node as usize];
        if kind == Kind::Node {
            let until = failure.at + failure.repair.max(1);
            self.queue.push(Reverse((until, Next::Back(node))));
            self.out.ledger.unavailable += until.min(self.of.length) - failure.at;
            self.up -= 1;
        }
        let Some(job) = owner else {
            if kind == Kind::Node {
                self.settle_idle();
                self.idle.retain(|n| *n != node);
            }
            self.record(None, number, 0, 0);
            return;
        };
        let had = self.jobs[job].nodes.len();
        let version = self.block(job, Cause::Detection);
        let mut memory = true;
        let state = &mut self.jobs[job];
        if kind == Kind::Node {
            memory = state.loses(self.policy, node);
            state.lacks = state.lacks.or(Some(self.now));
            self.owner[node as usize] = None;
        }
        self.out.copies_lost += u32::from(!memory);
        self.out.stopped += 1;
        let lost = self.jobs[job].unsaved.fail(self.policy, memory);
        self.discard(job, lost);
        self.record(Some(job), number, had, lost.micros);
        let known = self.now + self.policy.detects(kind);
        self.queue.push(Reverse((known, Next::Known(job, version, kind))));
    }

    fn record(&mut self, job: Option<usize>, number: usize, nodes: usize, lost: u64) {
        if let (Some(recorder), Some(failure)) = (&mut self.recorder, self.of.list.get(number)) {
            recorder.failed(job, failure, nodes, lost, self.policy);
        }
    }

    fn discard(&mut self, job: usize, lost: Work) {
        self.jobs[job].kept -= lost.value;
        self.out.ledger.productive -= lost.nodes;
        self.out.ledger.discarded += lost.nodes;
    }

    /// Handles the detection of a failure.
    fn known(&mut self, job: usize, kind: Kind) {
        match self.policy.on_loss {
            OnLoss::Plan(_) if self.jobs[job].hit => {
                // From now on, the job is planned with the nodes that it has.
                self.block(job, Cause::Waiting);
                self.plan();
            }
            _ => {
                self.fill(job);
                self.restart_or_wait(job, Happens::Fails(kind), self.policy.restarts(kind));
            }
        }
    }

    /// Replaces the nodes that the job lacks by idle ones.
    fn fill(&mut self, job: usize) {
        self.settle(job);
        self.settle_idle();
        while self.jobs[job].missing() > 0
            && let Some(node) = self.idle.pop()
        {
            self.owner[node as usize] = Some(job);
            self.jobs[job].nodes.push(node);
        }
    }

    /// Returns how long the job waits before it continues with the nodes that it has, or `None` if
    /// it waits for others.
    fn trains(&self, job: usize, happens: Happens) -> Option<u64> {
        let (has, most, least) = (self.jobs[job].has(), self.jobs[job].planned, self.work.jobs[job].min);
        if !self.policy.coordinator {
            let needs = if self.policy.on_loss == OnLoss::Wait { most } else { least.max(1) };
            return (has >= needs).then_some(0);
        }
        let waits = live::trains(Situation { happens, has, most, least })?;
        // The job trains on while it waits for more nodes to join.
        Some(if happens == Happens::Joins { 0 } else { waits })
    }

    fn restart_or_wait(&mut self, job: usize, happens: Happens, takes: u64) {
        if self.jobs[job].missing() == 0 {
            self.jobs[job].lacks = None;
        }
        let Some(waits) = self.trains(job, happens) else {
            self.block(job, Cause::Waiting);
            return;
        };
        let version = self.block(job, Cause::Restart);
        self.queue.push(Reverse((self.now + waits + takes, Next::Runs(job, version))));
    }

    fn back(&mut self, node: u32) {
        self.settle_idle();
        self.idle.push(node);
        self.up += 1;
        if let OnLoss::Plan(_) = self.policy.on_loss {
            self.plan_when_due();
            return;
        }
        // The job that has lacked a node for the longest time.
        let lacking = (0..self.jobs.len()).filter_map(|job| Some((self.jobs[job].lacks?, job))).min();
        let Some((_, job)) = lacking else { return };
        // Its failure is not detected yet. When it is, the job takes idle nodes itself.
        if self.jobs[job].phase == Phase::Blocked(Cause::Detection) {
            return;
        }
        let waited = self.jobs[job].phase == Phase::Blocked(Cause::Waiting);
        self.settle(job);
        self.fill(job);
        self.out.changes += 1;
        let takes = if waited { self.policy.restarts(Kind::Node) } else { self.policy.regroup };
        self.restart_or_wait(job, Happens::Joins, takes);
    }

    /// Plans at once if a job waits for nodes or the latest change has paid off. Otherwise a
    /// returned node is not urgent, and the plan is postponed until then.
    fn plan_when_due(&mut self) {
        let waits = self.jobs.iter().any(|s| s.phase == Phase::Blocked(Cause::Waiting));
        if self.now >= self.due || waits {
            self.plan();
        } else if !self.later {
            self.later = true;
            self.queue.push(Reverse((self.due, Next::Plan)));
        }
    }

    /// Plans all nodes that are up anew.
    fn plan(&mut self) {
        self.later = false;
        // A failure that is not detected yet is unknown to the planner: the job is planned as if it
        // had its nodes.
        let unknown: u32 =
            self.jobs.iter().filter(|s| s.phase == Phase::Blocked(Cause::Detection)).map(State::missing).sum();
        self.problem.units = self.up + unknown.min(self.of.nodes - self.up);
        for (job, state) in self.problem.jobs.iter_mut().zip(&self.jobs) {
            job.current = state.planned;
            job.hit = state.hit && state.phase != Phase::Blocked(Cause::Restart);
        }
        let plan = solve(&self.problem);
        self.settle_idle();
        let wanted: Vec<u32> = self.work.jobs.iter().map(|j| plan.units.get(&j.id).copied().unwrap_or(0)).collect();
        for (job, wanted) in wanted.iter().enumerate() {
            self.release(job, *wanted);
        }
        for (job, wanted) in wanted.into_iter().enumerate() {
            self.give(job, wanted);
        }
    }

    /// Takes away the nodes beyond `wanted`.
    fn release(&mut self, job: usize, wanted: u32) {
        if wanted >= self.jobs[job].nodes.len() as u32 {
            return;
        }
        self.settle(job);
        let away = self.jobs[job].nodes.split_off(wanted as usize);
        away.iter().for_each(|n| self.owner[*n as usize] = None);
        self.idle.extend(away);
    }

    fn give(&mut self, job: usize, wanted: u32) {
        let state = &self.jobs[job];
        let (changed, hit, had) = (wanted != state.planned, state.hit, state.planned);
        let under_way = state.phase == Phase::Blocked(Cause::Restart);
        if !changed && (!hit || under_way) {
            return;
        }
        self.settle(job);
        self.jobs[job].planned = wanted;
        // A failure that is not detected yet takes its own course.
        if self.jobs[job].phase == Phase::Blocked(Cause::Detection) {
            return;
        }
        self.fill(job);
        self.out.changes += u32::from(changed);
        self.due = self.now + u64::try_from(self.problem.dwell().as_micros()).unwrap_or(u64::MAX);
        let takes = if hit { self.policy.restarts(Kind::Node) } else { self.policy.regroup };
        let grows = !hit && self.jobs[job].has() >= had;
        let happens = if grows { Happens::Joins } else { Happens::Fails(Kind::Node) };
        if wanted == 0 {
            self.block(job, Cause::Waiting);
        } else {
            self.restart_or_wait(job, happens, takes);
        }
    }

    fn end(mut self) -> Outcome {
        self.now = self.of.length;
        for job in 0..self.jobs.len() {
            self.settle(job);
        }
        self.settle_idle();
        let all = u64::from(self.of.nodes) * self.of.length;
        assert_eq!(self.out.ledger.sum(), all, "{}: accounts do not add up to nodes times length", self.policy.name);
        self.out.jobs = self.jobs.iter().map(|s| s.kept).collect();
        self.out.value = self.out.jobs.iter().sum();
        self.out
    }
}
