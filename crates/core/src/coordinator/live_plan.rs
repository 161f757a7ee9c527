//! Divides the nodes of one coordinator among several jobs. The plans for every possible next
//! change are made while nothing happens (`planner`, a [`Table`]). After a change, the plan is
//! looked up, reported, and carried out node by node (`reassignment.rs`).
//!
//! ```text
//!  nothing happens ──> Table::new
//!  node lost or joined, job done ──> look_up ──> Fact::Planned ──(if it lasts)──> Remedy::Move
//! ```

use super::Coordinator;
use super::command::Fact;
use super::job::{Job, MISSED, Phase};
use super::output::Output;
use super::wording::counted;
use crate::id::{JobId, NodeId};
use crate::time::Time;
use everstep_planner::{self as planner, Change, Plan, Problem, Table, Unit, assign, solve};
use std::collections::BTreeMap;
use std::time::Duration;

/// Plans are made when nothing has happened for this long: many nodes may join at once.
const QUIET: Duration = Duration::from_secs(1);

/// What is known about the jobs, and the plans for what may happen next.
#[derive(Clone, Debug)]
pub(super) struct LivePlan {
    /// Weights, throughput by number of nodes, and failure rates. Current sizes are ignored.
    known: Problem,
    table: Option<Table>,
    /// When something last happened that the table does not cover.
    stale: Option<Time>,
    /// The plan to carry out.
    due: Option<Due>,
    /// When a plan was last carried out or, before the first one, when planning started.
    changed: Time,
}

/// A plan that is carried out unless its reason is gone by then.
#[derive(Clone, Debug)]
struct Due {
    at: Time,
    /// Number of usable nodes when it was made.
    units: u32,
    plan: Plan,
    /// The lost node and its job: if the node comes back in time, nothing moves.
    lost: Option<(JobId, NodeId)>,
}

/// What happened to a job.
enum Happened {
    Lost(NodeId),
    Joined,
    Done,
}

impl Happened {
    fn of(fact: &Fact) -> Option<Happened> {
        match fact {
            Fact::NodeLost { node } => Some(Happened::Lost(node.clone())),
            Fact::NodeJoined { again: false, .. } => Some(Happened::Joined),
            Fact::Ended { .. } => Some(Happened::Done),
            _ => None,
        }
    }
}

/// Describes the change for people.
fn describe(change: &Change) -> String {
    match change {
        Change::Lose(job) => format!("job {job} has lost a node"),
        Change::LoseIdle => "an idle node was lost".into(),
        Change::Finish(job) => format!("job {job} is done"),
        Change::Join => "a node has joined".into(),
    }
}

impl Job {
    /// Returns the nodes to plan with: first the members of the world, then the nodes that wait
    /// beyond the spares of the job.
    fn units(&self) -> Vec<&NodeId> {
        let usable = |id: &NodeId| {
            let life = self.nodes.get(id).map(|n| n.hello.incarnation);
            life.is_some_and(|life| {
                !self.record.machines.is_excluded(id, life) && !self.record.machines.is_reassigned(id, life)
            })
        };
        let members = self.record.world.slots.iter().map(|s| &s.node).filter(|id| usable(id));
        let outside =
            self.nodes.iter().map(|(id, _)| id).filter(|id| self.record.world.slot(id).is_none() && usable(id));
        let outside = outside.skip(self.record.spec.spares as usize);
        members.chain(outside).collect()
    }

    /// Returns the job as the planner sees it.
    fn planned(&self, known: &planner::Job) -> planner::Job {
        let spec = &self.record.spec;
        let most = known.achieved.len().saturating_sub(1).min(spec.nodes_max as usize);
        // Only whole units of nodes train.
        let whole = |k: usize| k / spec.node_unit.max(1) as usize * spec.node_unit.max(1) as usize;
        let achieved = (0..=most).map(|k| known.achieved.get(whole(k)).copied().unwrap_or(0)).collect();
        let current = u32::try_from(self.record.world.slots.len()).unwrap_or(u32::MAX);
        planner::Job { current, hit: false, min: known.min.max(spec.nodes_min), achieved, ..known.clone() }
    }
}

impl LivePlan {
    /// Returns the jobs to plan for that are not over.
    fn live_jobs<'a>(&'a self, jobs: &'a BTreeMap<JobId, Job>) -> impl Iterator<Item = (&'a JobId, &'a Job)> {
        let is_known = |id: &JobId| self.known.jobs.iter().any(|j| j.id == id.0);
        jobs.iter().filter(move |(id, job)| !job.phase.is_over() && is_known(id))
    }

    /// Returns the problem to plan for now.
    fn problem(&self, jobs: &BTreeMap<JobId, Job>) -> Problem {
        let of = |known: &planner::Job| {
            let job = jobs.get(&JobId(known.id.clone())).filter(|job| !job.phase.is_over())?;
            Some(job.planned(known))
        };
        let units = self.live_jobs(jobs).map(|(_, job)| job.units().len()).sum::<usize>();
        let (known, units) = (&self.known, u32::try_from(units).unwrap_or(u32::MAX));
        Problem {
            units,
            jobs: known.jobs.iter().filter_map(of).collect(),
            mode: known.mode,
            rates: known.rates.clone(),
        }
    }

    /// Returns what happened to `job` as a change, and the problem from before it.
    fn change(&self, jobs: &BTreeMap<JobId, Job>, job: &Job, what: &Happened) -> (Problem, Change) {
        let (mut before, id) = (self.problem(jobs), &job.record.spec.job.0);
        let change = match what {
            Happened::Lost(node) => {
                before.units += 1;
                let member = job.record.world.slot(node).is_some();
                if member { Change::Lose(id.clone()) } else { Change::LoseIdle }
            }
            Happened::Joined => {
                before.units = before.units.saturating_sub(1);
                Change::Join
            }
            Happened::Done => {
                before.jobs.extend(self.known.jobs.iter().filter(|known| known.id == *id).map(|k| job.planned(k)));
                before.units += u32::try_from(job.record.world.slots.len()).unwrap_or(u32::MAX);
                Change::Finish(id.clone())
            }
        };
        // The table has the jobs in the order of `known`.
        let place = |j: &planner::Job| self.known.jobs.iter().position(|k| k.id == j.id);
        before.jobs.sort_by_key(place);
        (before, change)
    }
}

impl Coordinator {
    /// Plans for the jobs in `known`, by name, from now on. Current sizes and units in it are
    /// ignored.
    #[must_use]
    pub fn planning(mut self, known: Problem, now: Time) -> Coordinator {
        self.live_plan = Some(LivePlan { known, table: None, stale: Some(now), due: None, changed: now });
        self
    }

    /// Returns the number of possible changes for which plans are ready.
    #[must_use]
    pub fn plans_ready(&self) -> usize {
        let table = self.live_plan.as_ref().filter(|p| p.stale.is_none()).and_then(|p| p.table.as_ref());
        table.map_or(0, |t| t.plans().len())
    }

    /// Marks the plans as stale if a change was recorded.
    pub(super) fn mark_plans_stale(&mut self, now: Time, said: &Output) {
        let formed = |f: &Fact| matches!(f, Fact::GenerationStarted { .. } | Fact::Excluded { .. });
        if let Some(plans) = &mut self.live_plan
            && said.facts().any(|f| formed(f) || Happened::of(f).is_some())
        {
            plans.stale = Some(now);
        }
    }

    /// Looks up the best plan after what was recorded about a job.
    pub(super) fn plan_after(&mut self, now: Time, id: &JobId, out: &mut Output) {
        let Some(plans) = &mut self.live_plan else { return };
        let Some(job) = self.jobs.get(id).filter(|_| plans.known.jobs.iter().any(|j| j.id == id.0)) else { return };
        let happened: Vec<Happened> = out.facts().filter_map(Happened::of).collect();
        for happened in happened {
            let trained = !matches!(job.phase, Phase::Forming { .. }) && job.record.largest > 0;
            let matters = match &happened {
                Happened::Lost(_) => job.record.largest > 0 && !job.phase.is_over(),
                // While a world gathers, nodes join one after another and must not be reassigned.
                Happened::Joined => trained && now >= plans.changed.after(plans.known.dwell()),
                Happened::Done => job.record.largest > 0,
            };
            if !matters {
                continue;
            }
            let (before, change) = plans.change(&self.jobs, job, &happened);
            if before.jobs.len() < 2 {
                continue;
            }
            let ready = plans.table.as_ref().and_then(|t| t.look_up(&before, &change)).cloned();
            let from_table = ready.is_some();
            let plan = ready.unwrap_or_else(|| solve(&before.after(&change)));
            let (lost, wait, incident) = match happened {
                Happened::Lost(node) => (Some((id.clone(), node)), MISSED, job.record.incidents),
                _ => (None, Duration::ZERO, 0),
            };
            let fact = Fact::Planned { incident, change: describe(&change), from_table, units: plan.units.clone() };
            let units = before.after(&change).units;
            plans.due = Some(Due { at: now.after(wait), units, plan, lost });
            out.record(fact);
        }
    }

    /// Makes the plans for what may happen next, and carries out a plan that is due.
    pub(super) fn replan(&mut self, now: Time) {
        let Some(plans) = &mut self.live_plan else { return };
        if plans.stale.is_some_and(|at| now >= at.after(QUIET)) {
            plans.stale = None;
            let problem = plans.problem(&self.jobs);
            if !plans.table.as_ref().is_some_and(|t| t.is_for(&problem)) {
                plans.table = (problem.jobs.len() > 1).then(|| Table::new(&problem));
            }
        }
        let Some(due) = plans.due.take_if(|due| now >= due.at) else { return };
        let back = |(job, node): &(JobId, NodeId)| self.jobs.get(job).is_some_and(|j| j.nodes.contains(node));
        if due.lost.as_ref().is_some_and(back) {
            return;
        }
        plans.changed = now;
        // If more has happened since, the plan is made again.
        let problem = plans.problem(&self.jobs);
        let plan = if problem.units == due.units { due.plan } else { solve(&problem) };
        let mut who = Vec::new();
        let mut units = Vec::new();
        for (id, job) in plans.live_jobs(&self.jobs) {
            for (node, group) in job.units().into_iter().zip(0u32..) {
                // A node leaves from a step that every node can read, so it does not matter whose
                // copies it keeps. The last nodes go first.
                let domain = job.nodes.get(node).map_or(String::new(), |n| n.hello.domain.clone());
                units.push(Unit { id: who.len().to_string(), job: Some(id.0.clone()), group, domain });
                who.push((id.clone(), node.clone()));
            }
        }
        for (unit, _, to) in assign(&units, &plan).moved {
            let place = unit.parse().ok().and_then(|at: usize| who.get(at).cloned());
            let (Some((from, node)), Some(to)) = (place, to) else { continue };
            let count = plan.units.get(&to).copied().unwrap_or(0);
            let why = format!("the plan gives job {to} {}", counted(count, "node"));
            self.with(now, &from, |job, now, out| job.reassign(now, &node, &JobId(to), why, out));
        }
    }

    /// Returns when [`Coordinator::replan`] has something to do next.
    pub(super) fn plans_deadline(&self) -> Option<Time> {
        let plans = self.live_plan.as_ref()?;
        let due = plans.due.as_ref().map(|due| due.at);
        plans.stale.map(|at| at.after(QUIET)).into_iter().chain(due).filter(|at| *at > self.ticked).min()
    }
}
