//! What the store keeps about a job. Everything else is rebuilt from what agents report when they
//! come back.

use super::machines::Machines;
use super::recent::remember;
use crate::id::{Generation, Incarnation, NodeId, Rank, Step};
use crate::message::{Extent, Hello, World};
use crate::spec::{JobSpec, RestartBudget};
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::time::Duration;

const DAY: Duration = Duration::from_hours(24);

/// Why the budget allows no restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoRestart {
    #[error("--max-restarts 0 allows no restart")]
    NoneAllowed,
    #[error("all {0} restarts of --max-restarts are used")]
    AllUsed(u32),
    /// The script failed before its first step.
    #[error(
        "no optimizer step was completed, so a restart would fail the same way (to restart anyway, use \
         --max-restarts N)"
    )]
    NoProgress,
    #[error("{0} restarts within 24 hours are used")]
    DayUsed(u32),
}

/// The value of a job's key in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// What the user asked for.
    pub spec: JobSpec,
    /// The agent that began this run of the job. No other run has it, not even one of the same name
    /// under another coordinator.
    #[serde(default)]
    pub began: Incarnation,
    /// Newest generation; it never decreases, not even when the job runs again.
    pub generation: Generation,
    /// World of the newest generation.
    pub world: World,
    /// Stage of the job.
    pub stage: Stage,
    /// Restarts used by this run of the job.
    restarts: u32,
    /// Times of the latest restarts (at most [`RECENT`](super::recent::RECENT)), for the daily
    /// budget.
    recent: Vec<Time>,
    /// Restarts of the last day that the network caused: not in the daily budget.
    #[serde(default)]
    network: Vec<Time>,
    /// Whether some worker has completed an optimizer step.
    pub progressed: bool,
    /// Whether the script uses checkpoints: the memory of the job is worth keeping together.
    #[serde(default)]
    pub checkpointed: bool,
    /// The steps that the latest generations restored (at most [`RECENT`](super::recent::RECENT)):
    /// a later step captured by an earlier generation belongs to a past that did not happen.
    #[serde(default)]
    pub restored: Vec<(Generation, Step)>,
    /// The decision not to restart after the latest incident, until its first cause is known and
    /// the job ends. The workers are being ended meanwhile, so nothing else would show it.
    #[serde(default)]
    pub giving_up: Option<GivingUp>,
    /// Ranks of the current world whose scripts are over, on nodes that are lost: this record is
    /// the only evidence of it.
    #[serde(default)]
    pub ended: Vec<(Rank, Extent)>,
    /// Number of incidents so far.
    pub incidents: u64,
    /// The error of the latest failed worker, with its step, to recognize it if it comes again.
    #[serde(default)]
    last_error: Option<(String, Step)>,
    /// Newest published durable checkpoint.
    pub durable: Option<Step>,
    /// What the job knows about machines, and its requests about them.
    #[serde(flatten)]
    pub machines: Machines,
    /// Largest number of nodes in a world of this run.
    #[serde(default)]
    pub largest: u32,
    /// Whether the nodes of this run were checked.
    #[serde(default)]
    pub checked: bool,
}

/// Stage of a job, as far as the store needs to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// No world has been formed yet.
    Forming,
    /// The record's world may have been sent to its nodes.
    Training,
    /// The job is over.
    Ended {
        /// Exit code of the job.
        code: i32,
        /// Cause of the end, for people.
        why: String,
        /// Agents attached at the end: they belong to this run, whether or not they have heard of
        /// its end.
        #[serde(default)]
        attached: Vec<Incarnation>,
    },
}

/// A decision to end the job when the first cause of the latest incident is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivingUp {
    /// Exit code of the job.
    pub code: i32,
    /// Why it is not restarted.
    pub why: String,
    /// What failed, as far as it was known.
    pub what: String,
    /// The script raised an error that a killed process or a lost node would explain: then the job
    /// is restarted after all.
    pub unclear: bool,
    /// That restart is already counted.
    pub counted: bool,
}

impl JobRecord {
    /// Returns the record of a new job, which this agent begins.
    #[must_use]
    pub fn new(spec: JobSpec, began: Incarnation) -> Self {
        JobRecord {
            spec,
            began,
            generation: Generation(0),
            world: World::default(),
            stage: Stage::Forming,
            restarts: 0,
            recent: Vec::new(),
            network: Vec::new(),
            progressed: false,
            checkpointed: false,
            restored: Vec::new(),
            giving_up: None,
            ended: Vec::new(),
            incidents: 0,
            last_error: None,
            durable: None,
            machines: Machines::default(),
            largest: 0,
            checked: false,
        }
    }

    /// Returns whether a snapshot of this step by this generation belongs to the past that the job
    /// still has.
    #[must_use]
    pub fn is_of_this_past(&self, generation: Generation, step: Step) -> bool {
        self.restored.iter().all(|(g, s)| *g <= generation || step <= *s)
    }

    /// Returns whether `node`, in this life, is part of the current world.
    #[must_use]
    pub fn is_member(&self, node: &NodeId, incarnation: Incarnation) -> bool {
        self.world.slot(node).is_some_and(|s| s.incarnation == incarnation)
    }

    /// Returns whether the user has set the number of restarts.
    #[must_use]
    pub fn restarts_are_counted(&self) -> bool {
        matches!(self.spec.restarts, RestartBudget::Exactly(_))
    }

    /// Returns the number of restarts used by this run of the job.
    #[must_use]
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Returns the number of restarts in the last 24 hours that are in the daily budget.
    #[must_use]
    pub fn restarts_today(&self, now: Time) -> usize {
        self.recent.iter().filter(|t| now.since(**t) < DAY).count()
    }

    /// Returns the number of restarts for `TORCHELASTIC_MAX_RESTARTS`.
    #[must_use]
    pub fn max_restarts(&self) -> u32 {
        match self.spec.restarts {
            RestartBudget::Exactly(n) | RestartBudget::PerDayAfterFirstStep(n) => n,
        }
    }

    /// Checks whether the budget allows a restart after a failure of the `script` or of a node.
    pub(crate) fn budget_allows(&self, now: Time, script: bool) -> Result<(), NoRestart> {
        match self.spec.restarts {
            RestartBudget::Exactly(0) => Err(NoRestart::NoneAllowed),
            RestartBudget::Exactly(n) if self.restarts >= n => Err(NoRestart::AllUsed(n)),
            RestartBudget::Exactly(_) => Ok(()),
            // A lost node is not evidence about the script, and its agent may have died before it
            // reported a step.
            RestartBudget::PerDayAfterFirstStep(_) if script && !self.progressed => Err(NoRestart::NoProgress),
            RestartBudget::PerDayAfterFirstStep(n) if self.restarts_today(now) >= n as usize => {
                Err(NoRestart::DayUsed(n))
            }
            RestartBudget::PerDayAfterFirstStep(_) => Ok(()),
        }
    }

    /// Gives all restarts back.
    #[cfg(feature = "planted")]
    pub(crate) fn reset_restarts(&mut self) {
        self.restarts = 0;
    }

    /// Remembers the error of the latest failed worker. Returns whether the one before had the
    /// same, after the same step.
    pub(crate) fn has_error_again(&mut self, error: Option<(String, Step)>) -> bool {
        let again = error.is_some() && error == self.last_error;
        self.last_error = error;
        again
    }

    /// Counts a restart.
    pub(crate) fn count_restart(&mut self, now: Time) {
        self.restarts += 1;
        remember(&mut self.recent, now);
    }

    /// Takes the restart at `at` off the daily budget, because the network caused it. At most
    /// `most` restarts within a day are. Returns whether it was.
    pub(crate) fn forgive_restart(&mut self, now: Time, at: Time, most: usize) -> bool {
        self.network.retain(|at| now.since(*at) < DAY);
        if self.restarts_are_counted() || self.network.len() >= most {
            return false;
        }
        let Some(index) = self.recent.iter().rposition(|recent| *recent == at) else { return false };
        self.recent.remove(index);
        self.network.push(at);
        true
    }

    /// Returns which step the generation restores, if that was decided; 0 for a fresh start.
    pub(crate) fn restored_by(&self, generation: Generation) -> Option<Step> {
        self.restored.last().filter(|(g, _)| *g == generation).map(|(_, step)| *step)
    }

    /// Remembers which step a generation restores.
    pub(crate) fn add_restore(&mut self, generation: Generation, step: Step) {
        remember(&mut self.restored, (generation, step));
    }

    /// Returns the given nodes without the excluded ones, as far as there are enough others.
    pub(crate) fn fit<'h>(&self, able: Vec<&'h Hello>) -> Vec<&'h Hello> {
        let spec = &self.spec;
        let usable = |n: usize| n.min(spec.nodes_max as usize) / spec.node_unit as usize * spec.node_unit as usize;
        let without = |only_firm: bool| -> Vec<&'h Hello> {
            let out = |h: &Hello| {
                self.machines.exclusion(&h.node, h.incarnation).is_some_and(|e| !(only_firm && e.if_replaced))
            };
            able.iter().copied().filter(|h| !out(h)).collect()
        };
        let well = without(false);
        if usable(well.len()) >= usable(able.len()) {
            return well;
        }
        let well = without(true);
        if usable(well.len()) >= spec.nodes_min as usize && usable(well.len()) > 0 {
            return well;
        }
        // Use excluded nodes once more, for lack of others: their problems may have passed.
        able.into_iter().filter(|h| !self.machines.is_barred(&h.node, h.incarnation)).collect()
    }
}
