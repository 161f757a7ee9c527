//! From facts to incidents.

use super::{Entry, Progress, What};
use crate::coordinator::blame::HEARING;
use crate::coordinator::command::{Action, Fact};
use crate::coordinator::incident::{describe, describe_as};
use crate::coordinator::node_check::Found;
use crate::coordinator::remedy::Request;
use crate::coordinator::unlike::Finding;
use crate::id::{Generation, NodeId, Step};
use crate::message::{Cause, Failure, Tier};
use crate::severity::Verdict;
use crate::stacks::Stack;
use serde::Serialize;
use std::collections::BTreeMap;

/// Stacks that come within this of an incident are of it, in microseconds.
const HEARD: u64 = HEARING.as_micros() as u64;

/// How an incident ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Outcome {
    /// It is not over.
    Open,
    /// The job steps again, but does steps once more that it had done before.
    Repeating,
    /// The job is where it had been before.
    Recovered,
    /// The job steps again. Whether it does again what it had done, nobody can know.
    GoesOn,
    /// Another failure came before the job was where it had been.
    Overtaken {
        /// its number
        by: u64,
    },
    /// The job ended.
    Ended {
        /// exit code
        code: i32,
        /// the cause
        why: String,
    },
}

/// What was restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Restore {
    /// The step; `None` for a fresh start.
    pub step: Option<Step>,
    /// Where from, by rank.
    pub tiers: Vec<Tier>,
    /// Completed steps that had to be computed again.
    pub steps_lost: u64,
    /// Nodes that restored it; 0: not known.
    pub nodes: u32,
}

/// Where the ranks went on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Began {
    /// The generation.
    pub generation: u64,
    /// The step that they went on from; `None`: nothing says which.
    pub from: Option<u64>,
    /// The highest step that the job had completed before; `None`: not known.
    pub had: Option<u64>,
}

impl Began {
    /// Steps that had been done before and are done again; `None`: not known.
    #[must_use]
    pub fn again(&self) -> Option<u64> {
        Some(self.had?.saturating_sub(self.from?))
    }
}

/// One failure from its first sign to where the job is again where it had been. Times in microseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Incident {
    /// Number within the run of the job, from 1.
    pub number: u64,
    /// Generation that failed.
    pub generation: u64,
    /// Node at fault.
    pub node: NodeId,
    /// The worker's failure; `None`: the whole node was lost.
    pub failure: Option<Failure>,
    /// What was done.
    pub action: Action,
    /// Ranks before and after.
    pub world: (u32, Option<u32>),
    /// Declared.
    pub opened: u64,
    /// The next generation's processes are being started.
    pub regrouped: Option<u64>,
    /// All were told what to restore.
    pub told: Option<u64>,
    /// The first new step was complete.
    pub stepped: Option<(u64, Step)>,
    /// The job was where it had been.
    pub caught_up: Option<u64>,
    /// What was restored.
    pub restored: Option<Restore>,
    /// Where the ranks went on, once they step.
    pub began: Option<Began>,
    /// Median step time before and after, in microseconds.
    pub step_us: (Option<u64>, Option<u64>),
    /// Whose failure it was, when all was heard: known a moment later.
    pub blamed: Option<Blamed>,
    /// Where the main thread of each rank was, of a hang.
    pub stacks: BTreeMap<u32, Stack>,
    /// The node is left out from then on.
    pub excluded: Option<NodeId>,
    /// What a check of the nodes found.
    pub checked: Option<Found>,
    /// The plan was there before, and how many nodes each job is to have by it.
    pub planned: Option<(bool, BTreeMap<String, u32>)>,
    /// What was asked for of machines because of it.
    pub requests: Vec<Request>,
    /// What a detector has found, if it was one that said so.
    pub finding: Option<Finding>,
    /// Whether a person says that it was named rightly, and in which words.
    pub noted: Option<(bool, String)>,
    /// How it ended.
    pub outcome: Outcome,
    /// The job ended, for another reason, before it was where it had been.
    pub cut_off: bool,
}

/// The first cause of an incident.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Blamed {
    /// Where.
    pub node: NodeId,
    /// The worker's failure; `None`: the machine itself.
    pub failure: Option<Failure>,
    /// What it is held to be.
    pub verdict: Verdict,
    /// Classes of what followed, and how many of each.
    pub others: BTreeMap<String, u32>,
}

impl Incident {
    /// Nothing more is to come of it.
    fn is_over(&self) -> bool {
        match self.outcome {
            Outcome::Open | Outcome::Repeating => self.cut_off,
            Outcome::Recovered | Outcome::GoesOn | Outcome::Overtaken { .. } | Outcome::Ended { .. } => true,
        }
    }

    /// The next generation steps, and nothing has come of it yet but that.
    fn steps_again(&self) -> bool {
        matches!(self.outcome, Outcome::Repeating | Outcome::Recovered | Outcome::GoesOn)
    }

    /// The ranks have completed their first step after it, or it has become known from where they went on.
    fn began(&mut self, began: Began) {
        self.began = Some(began);
        if let (Some((at, _)), Some(from)) = (self.stepped, began.from) {
            // The one step that was lost may be the first one: then nothing is caught up with after it.
            self.stepped_to(at, from + 1);
        }
        self.settle();
    }

    /// All ranks have completed this step: the job may be where it had been.
    fn stepped_to(&mut self, at: u64, step: u64) {
        let known = self.began.filter(|b| b.from.is_some()).and_then(|b| b.had);
        if self.caught_up.is_none() && known.is_some_and(|had| had <= step) {
            self.caught_up = Some(at);
        }
        self.settle();
    }

    fn settle(&mut self) {
        let stepped = self.began.is_some() || self.caught_up.is_some();
        if stepped && (self.outcome == Outcome::Open || self.steps_again()) {
            self.outcome = match (self.caught_up, self.began.and_then(|b| b.again())) {
                (Some(_), _) => Outcome::Recovered,
                (None, Some(_)) => Outcome::Repeating,
                (None, None) => Outcome::GoesOn,
            };
        }
    }

    /// One that has just begun: at `when`, in a world of so many ranks, whose steps took so long.
    fn opened(
        number: u64,
        (generation, node): (Generation, NodeId),
        failure: Option<Failure>,
        action: Action,
        (when, world, step_us): (u64, u32, Option<u64>),
    ) -> Incident {
        Incident {
            number,
            generation: generation.0,
            node,
            failure,
            action,
            world: (world, None),
            opened: when,
            regrouped: None,
            told: None,
            stepped: None,
            caught_up: None,
            restored: None,
            began: None,
            step_us: (step_us, None),
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

    /// The node at fault, as far as it is known.
    #[must_use]
    pub fn at_fault(&self) -> &NodeId {
        self.blamed.as_ref().map_or(&self.node, |b| &b.node)
    }

    /// What it is held to be; `None`: the node was lost.
    #[must_use]
    pub fn verdict(&self) -> Option<&Verdict> {
        self.blamed.as_ref().map(|b| &b.verdict).or(self.failure.as_ref().map(|f| &f.verdict))
    }

    /// Its class: of a node that was lost, too.
    #[must_use]
    pub fn class(&self) -> &str {
        self.verdict().map_or("node-lost", |v| v.class.as_str())
    }

    /// Its stages that are over: begin and end in microseconds since 1970. One whose beginning was not noted begins with the end of the one
    /// before it.
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

    /// How long they took, in microseconds.
    #[must_use]
    pub fn stages(&self) -> Vec<(&'static str, u64)> {
        self.spans().into_iter().map(|(name, begin, end)| (name, end - begin)).collect()
    }

    /// What failed, in a line.
    #[must_use]
    pub fn what(&self) -> String {
        match &self.blamed {
            Some(b) => describe_as(&b.node, b.failure.as_ref(), &b.verdict),
            None => describe(&self.node, self.failure.as_ref()),
        }
    }

    /// Silence before it was declared, in microseconds, where silence was the sign.
    #[must_use]
    pub fn silence(&self) -> Option<u64> {
        match self.failure.as_ref()?.cause {
            Cause::Hung { silence_ms, .. } => Some(silence_ms * 1000),
            _ => None,
        }
    }

    /// From the first sign to where the job was again where it had been (or, as far as is known, stepped), in microseconds.
    #[must_use]
    pub fn lasted(&self) -> Option<u64> {
        let end = self.caught_up.or(self.stepped.map(|(at, _)| at))?;
        Some(end.saturating_sub(self.opened) + self.silence().unwrap_or(0))
    }

    /// Rank-seconds in which nothing new was computed.
    #[must_use]
    pub fn rank_seconds(&self) -> Option<f64> {
        Some(self.lasted()? as f64 / 1e6 * f64::from(self.world.1.unwrap_or(self.world.0)))
    }
}

/// The open incident that this generation is to end; what was noticed in the generation itself is none.
fn ended_by(found: &mut [Incident], generation: Generation) -> Option<&mut Incident> {
    found.iter_mut().rfind(|i| i.generation < generation.0).filter(|i| i.outcome == Outcome::Open)
}

/// The incidents of a job's latest run, in order.
#[must_use]
pub fn incidents(entries: &[Entry]) -> Vec<Incident> {
    let mut found: Vec<Incident> = Vec::new();
    let (mut world, mut step_us, mut over) = (0, None, false);
    for Entry { at, what } in entries {
        match what {
            What::Fact(Fact::GenerationStarted { generation, world_size, restarts }) => {
                if *restarts == 0 && over {
                    // The job was run anew.
                    (found, step_us, over) = (Vec::new(), None, false);
                } else if let Some(i) = ended_by(&mut found, *generation) {
                    i.regrouped = Some(*at);
                    i.world.1 = Some(*world_size);
                }
                world = *world_size;
            }
            What::Fact(Fact::IncidentOpened { incident, generation, node, failure, action }) => {
                let before = found.iter_mut().rfind(|i| i.action != Action::Tell);
                if let Some(before) = before.filter(|i| !i.is_over()) {
                    before.outcome = Outcome::Overtaken { by: *incident };
                }
                let node = node.clone();
                found.push(Incident::opened(
                    *incident,
                    (*generation, node),
                    failure.clone(),
                    *action,
                    (*at, world, step_us),
                ));
            }
            What::Fact(Fact::Unlike { incident, generation, finding }) => {
                let Some(node) = finding.nodes.first().cloned() else { continue };
                let about = (*at, world, step_us);
                let mut of = Incident::opened(*incident, (*generation, node.clone()), None, Action::Tell, about);
                of.blamed = Some(Blamed { node, failure: None, verdict: finding.verdict(), others: BTreeMap::new() });
                of.finding = Some(finding.clone());
                found.push(of);
            }
            What::Fact(Fact::Noted { incident, right, note }) => {
                if let Some(i) = found.iter_mut().rfind(|i| i.number == *incident) {
                    i.noted = Some((*right, note.clone()));
                }
            }
            What::Fact(Fact::Restored { generation, step, tiers, steps_lost, nodes }) => {
                if let Some(i) = ended_by(&mut found, *generation) {
                    i.told = Some(*at);
                    let (step, tiers, steps_lost, nodes) = (*step, tiers.clone(), *steps_lost, *nodes);
                    i.restored = Some(Restore { step, tiers, steps_lost, nodes });
                }
            }
            What::Fact(Fact::FirstStep { generation, step, from, had, .. }) => {
                // Its own number is not said by a coordinator that began in between.
                if let Some(i) = ended_by(&mut found, *generation) {
                    i.stepped = Some((*at, *step));
                    let generation = generation.0;
                    let (from, had) = (from.map(|s| s.0), had.map(|s| s.0));
                    // An earlier version said only how much was lost of what was restored.
                    let restored = i.restored.as_ref().map(|r| (r.step.map_or(0, |s| s.0), r.steps_lost, r.nodes));
                    let earlier = restored.filter(|(.., nodes)| *nodes == 0).map(|(step, lost, _)| step + lost);
                    let from = from.or(restored.map(|(step, ..)| step));
                    i.began(Began { generation, from, had: had.or(earlier) });
                }
            }
            What::Fact(Fact::Began { generation, step, from, had }) => {
                let of = |i: &&mut Incident| i.began.is_some_and(|b| b.generation == generation.0);
                if let Some(i) = found.iter_mut().rfind(of) {
                    i.began(Began { generation: generation.0, from: Some(from.0), had: had.map(|s| s.0) });
                    i.stepped_to(*at, step.0);
                }
            }
            What::Fact(Fact::Blamed { incident, node, failure, verdict, others }) => {
                if let Some(i) = found.iter_mut().rfind(|i| i.number == *incident) {
                    let (node, failure) = (node.clone(), failure.as_deref().cloned());
                    let verdict = Verdict::clone(verdict);
                    i.blamed = Some(Blamed { node, failure, verdict, others: others.clone() });
                }
            }
            What::Fact(Fact::Excluded { incident, node, .. }) => {
                if let Some(i) = found.iter_mut().rfind(|i| i.number == *incident) {
                    i.excluded = Some(node.clone());
                }
            }
            What::Fact(Fact::Requested { incident, request }) => {
                let known = |i: &&mut Incident| i.requests.iter().any(|r| r.id == request.id);
                // What becomes of a request may be told after a later incident.
                let of = match found.iter_mut().rfind(known) {
                    Some(of) => Some(of),
                    None => found.iter_mut().rfind(|i| i.number == *incident),
                };
                if let Some(i) = of {
                    i.requests.retain(|r| r.id != request.id);
                    i.requests.push(request.clone());
                }
            }
            What::Fact(Fact::Planned { incident, from_table, units, .. }) => {
                if let Some(i) = found.iter_mut().rfind(|i| i.number == *incident) {
                    i.planned = Some((*from_table, units.clone()));
                }
            }
            What::Fact(Fact::Checked { incident, found: all, .. }) => {
                if let Some(i) = found.iter_mut().rfind(|i| i.number == *incident) {
                    i.checked = Some(all.clone());
                }
            }
            What::Fact(Fact::CaughtUp { incident, .. }) => {
                if let Some(i) = found.iter_mut().rfind(|i| i.number == *incident) {
                    i.caught_up.get_or_insert(*at);
                    i.settle();
                }
            }
            What::Fact(Fact::Ended { code, why }) => {
                over = true;
                for i in &mut found {
                    match i.outcome {
                        Outcome::Open => i.outcome = Outcome::Ended { code: *code, why: why.clone() },
                        // Who is done has done again what was lost.
                        Outcome::Repeating if *code == 0 => {
                            i.caught_up = Some(*at);
                            i.outcome = Outcome::Recovered;
                        }
                        Outcome::Repeating => i.cut_off = true,
                        _ => {}
                    }
                }
            }
            What::Stacks { generation, stacks } => {
                // Those that were asked for in between belong to nobody's failure.
                if let Some(i) = found.last_mut().filter(|i| i.generation == *generation && *at < i.opened + HEARD) {
                    i.stacks.extend(stacks.clone());
                }
            }
            What::Fact(_) | What::Spent { .. } => {}
            What::Progress(Progress { step, step_us: us, .. }) => {
                if let Some(i) = found.iter_mut().rfind(|i| i.steps_again()) {
                    i.step_us.1.get_or_insert(*us);
                    // A coordinator that began in between does not know how far the job had been, and does not say so.
                    i.stepped_to(*at, *step);
                }
                step_us = Some(*us);
            }
        }
    }
    found
}
