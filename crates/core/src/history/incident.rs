//! An incident: what failed, what was done, and how it ended.

use crate::coordinator::check_findings::Found;
use crate::coordinator::command::Action;
use crate::coordinator::finding::Finding;
use crate::coordinator::request::Request;
use crate::coordinator::wording::{describe, describe_as};
use crate::id::{Generation, NodeId, Step};
use crate::message::{Cause, Failure, Tier};
use crate::severity::Verdict;
use crate::stacks::Stack;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// How an incident ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub enum Outcome {
    /// The incident is not over.
    Open,
    /// The job steps again, but repeats steps that it had completed before.
    Repeating,
    /// The job is where it was before the failure.
    Recovered,
    /// The job steps again; whether it repeats steps is unknown.
    GoesOn,
    /// Another failure came before the job had caught up.
    Superseded {
        /// The number of that incident.
        by: u64,
    },
    /// The job ended.
    Ended {
        /// Exit code.
        code: i32,
        /// The cause.
        why: String,
    },
}

/// What was restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Restore {
    /// The step; `None` for a fresh start.
    pub step: Option<Step>,
    /// Tier of each rank's shard, by rank.
    pub tiers: Vec<Tier>,
    /// Completed steps that had to be computed again.
    pub steps_lost: u64,
    /// Number of nodes that restored it; 0: not known.
    pub nodes: u32,
}

/// Where the ranks continued from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Began {
    /// Their generation.
    pub generation: u64,
    /// The step that they continued from; `None`: not known.
    pub from: Option<u64>,
    /// The highest step that the job had completed before; `None`: not known.
    pub had: Option<u64>,
}

impl Began {
    /// Returns the number of completed steps that are repeated; `None`: not known.
    #[must_use]
    pub fn again(&self) -> Option<u64> {
        Some(self.had?.saturating_sub(self.from?))
    }
}

/// One failure, from its first sign until the job is where it was before. Times are in microseconds
/// since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Incident {
    /// Number within the run of the job, from 1.
    pub number: u64,
    /// The generation that failed.
    pub generation: u64,
    /// The node that reported the failure or was lost; see [`Incident::at_fault`].
    pub node: NodeId,
    /// The worker's failure; `None`: the whole node was lost.
    pub failure: Option<Failure>,
    /// The action taken.
    pub action: Action,
    /// Number of ranks before and after.
    pub world: (u32, Option<u32>),
    /// When the failure was declared.
    pub opened: u64,
    /// When the workers of the next generation were started.
    pub regrouped: Option<u64>,
    /// When all ranks had been told what to restore.
    pub told: Option<u64>,
    /// When the first new step was complete, and which step that was.
    pub stepped: Option<(u64, Step)>,
    /// When the job was where it had been before.
    pub caught_up: Option<u64>,
    /// What was restored.
    pub restored: Option<Restore>,
    /// Where the ranks continued, once they step.
    pub began: Option<Began>,
    /// Median step duration before and after, in microseconds.
    pub step_us: (Option<u64>, Option<u64>),
    /// The first cause, known a moment later, when all failures have been heard.
    pub blamed: Option<Blamed>,
    /// For a hang: the stack of each rank's main thread.
    pub stacks: BTreeMap<u32, Stack>,
    /// The node that is excluded from then on.
    pub excluded: Option<NodeId>,
    /// What a check of the nodes found.
    pub checked: Option<Found>,
    /// The plan for this incident: whether it existed in advance, and the number of nodes for each
    /// job.
    pub planned: Option<(bool, BTreeMap<String, u32>)>,
    /// Requests about machines that the incident led to.
    pub requests: Vec<Request>,
    /// The finding, if a detector opened the incident.
    pub finding: Option<Finding>,
    /// A person's verdict on whether the finding was right, with a note.
    pub noted: Option<(bool, String)>,
    /// How it ended.
    pub outcome: Outcome,
    /// The job ended for another reason before it had caught up.
    pub cut_off: bool,
}

/// The first cause of an incident.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Blamed {
    /// The node at fault.
    pub node: NodeId,
    /// The worker's failure; `None`: the machine itself failed.
    pub failure: Option<Failure>,
    /// The class of the failure, with its severity, scope and advice.
    pub verdict: Verdict,
    /// Number of failures that followed from it, by class.
    pub others: BTreeMap<String, u32>,
}

/// The moment at which an incident was declared.
#[derive(Clone, Copy, Debug)]
pub(super) struct When {
    /// Time in microseconds since 1970.
    pub at: u64,
    /// Number of ranks.
    pub world: u32,
    /// Median duration of a step in microseconds.
    pub step_us: Option<u64>,
}

impl Incident {
    /// Returns whether no further facts are expected.
    pub(super) fn is_over(&self) -> bool {
        match self.outcome {
            Outcome::Open | Outcome::Repeating => self.cut_off,
            Outcome::Recovered | Outcome::GoesOn | Outcome::Superseded { .. } | Outcome::Ended { .. } => true,
        }
    }

    /// Returns whether the next generation steps and the outcome is still a recovery, complete or
    /// not.
    pub(super) fn steps_again(&self) -> bool {
        matches!(self.outcome, Outcome::Repeating | Outcome::Recovered | Outcome::GoesOn)
    }

    /// Records where the ranks continued, at their first step or once it becomes known.
    pub(super) fn began(&mut self, began: Began) {
        self.began = Some(began);
        if let (Some((at, _)), Some(from)) = (self.stepped, began.from) {
            // If only the first step was lost, that step alone catches up.
            self.stepped_to(at, from + 1);
        }
        self.settle();
    }

    /// Records that all ranks have completed `step`, which may mean that the job has caught up.
    pub(super) fn stepped_to(&mut self, at: u64, step: u64) {
        let known = self.began.filter(|b| b.from.is_some()).and_then(|b| b.had);
        if self.caught_up.is_none() && known.is_some_and(|had| had <= step) {
            self.caught_up = Some(at);
        }
        self.settle();
    }

    pub(super) fn settle(&mut self) {
        let stepped = self.began.is_some() || self.caught_up.is_some();
        if stepped && (self.outcome == Outcome::Open || self.steps_again()) {
            self.outcome = match (self.caught_up, self.began.and_then(|b| b.again())) {
                (Some(_), _) => Outcome::Recovered,
                (None, Some(_)) => Outcome::Repeating,
                (None, None) => Outcome::GoesOn,
            };
        }
    }

    /// Creates an incident that was declared at `when`, of this generation and node.
    pub(super) fn opened(number: u64, generation: Generation, node: NodeId, action: Action, when: When) -> Incident {
        Incident {
            number,
            generation: generation.0,
            node,
            failure: None,
            action,
            world: (when.world, None),
            opened: when.at,
            regrouped: None,
            told: None,
            stepped: None,
            caught_up: None,
            restored: None,
            began: None,
            step_us: (when.step_us, None),
            blamed: None,
            stacks: BTreeMap::new(),
            excluded: None,
            checked: None,
            planned: None,
            requests: Vec::new(),
            finding: None,
            noted: None,
            outcome: Outcome::Open,
            cut_off: false,
        }
    }

    /// Returns the node at fault, as far as it is known.
    #[must_use]
    pub fn at_fault(&self) -> &NodeId {
        self.blamed.as_ref().map_or(&self.node, |b| &b.node)
    }

    /// Returns the verdict; `None`: the node was lost.
    #[must_use]
    pub fn verdict(&self) -> Option<&Verdict> {
        self.blamed.as_ref().map(|b| &b.verdict).or(self.failure.as_ref().map(|f| &f.verdict))
    }

    /// Returns the class; that of a lost node is `node-lost`.
    #[must_use]
    pub fn class(&self) -> &str {
        self.verdict().map_or("node-lost", |v| v.class.as_str())
    }

    /// Returns the stages that are over, with begin and end in microseconds since 1970. A stage
    /// whose beginning was not recorded begins where the previous one ends.
    #[must_use]
    pub fn spans(&self) -> Vec<(&'static str, u64, u64)> {
        let silence = self.silence().map(|silence| ("detect", self.opened.saturating_sub(silence), self.opened));
        let mut spans: Vec<_> = silence.into_iter().collect();
        let mut from = self.opened;
        let stepped = self.stepped.map(|(at, _)| at);
        let ends =
            [("regroup", self.regrouped), ("start", self.told), ("restore", stepped), ("recompute", self.caught_up)];
        for (name, end) in ends.into_iter().filter_map(|(name, end)| Some((name, end?))) {
            spans.push((name, from, end.max(from)));
            from = end.max(from);
        }
        spans
    }

    /// Returns the duration of each stage that is over, in microseconds.
    #[must_use]
    pub fn stages(&self) -> Vec<(&'static str, u64)> {
        self.spans().into_iter().map(|(name, begin, end)| (name, end - begin)).collect()
    }

    /// Describes what failed, in one line.
    #[must_use]
    pub fn what(&self) -> String {
        match &self.blamed {
            Some(b) => describe_as(&b.node, b.failure.as_ref(), &b.verdict),
            None => describe(&self.node, self.failure.as_ref()),
        }
    }

    /// Returns the silence before the failure was declared, in microseconds, if silence was the
    /// sign.
    #[must_use]
    pub fn silence(&self) -> Option<u64> {
        match self.failure.as_ref()?.cause {
            Cause::Hung { silence_ms, .. } => Some(silence_ms * 1000),
            _ => None,
        }
    }

    /// Returns the time from the first sign until the job had caught up (or until its first new
    /// step, if nothing later is known), in microseconds.
    #[must_use]
    pub fn lasted(&self) -> Option<u64> {
        let end = self.caught_up.or(self.stepped.map(|(at, _)| at))?;
        Some(end.saturating_sub(self.opened) + self.silence().unwrap_or(0))
    }

    /// Returns the rank-seconds in which nothing new was computed.
    #[must_use]
    pub fn rank_seconds(&self) -> Option<f64> {
        Some(self.lasted()? as f64 / 1e6 * f64::from(self.world.1.unwrap_or(self.world.0)))
    }
}
