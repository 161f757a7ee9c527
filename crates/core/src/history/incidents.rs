//! Reads recorded facts, and reconstructs the incidents of a job's latest run.

use super::entry::Entry;
use super::incident::{Began, Blamed, Incident, Outcome, Restore, When};
use crate::coordinator::command::{Action, Fact};
use crate::failure::BLAME_WINDOW;
use crate::id::{Generation, Step};
use crate::severity::Verdict;
use std::collections::BTreeMap;

/// Stacks recorded within this time after an incident was declared belong to it, in microseconds.
const COLLECTED: u64 = BLAME_WINDOW.as_micros() as u64;

/// Returns the incidents of a job's latest run, in order.
#[must_use]
pub fn incidents(entries: &[Entry]) -> Vec<Incident> {
    let mut reader = Reader::default();
    for Entry { at, fact } in entries {
        reader.read(*at, fact);
    }
    reader.found
}

/// What was read so far.
#[derive(Default)]
struct Reader {
    found: Vec<Incident>,
    /// Number of ranks in the current world.
    world: u32,
    /// Latest median duration of a step, in microseconds.
    step_us: Option<u64>,
    /// Whether the run has ended.
    over: bool,
}

impl Reader {
    fn read(&mut self, at: u64, fact: &Fact) {
        match fact {
            Fact::GenerationStarted { generation, world_size, restarts } => {
                self.generation_started(at, *generation, *world_size, *restarts);
            }
            Fact::IncidentOpened { incident, generation, node, failure, action } => {
                let before = self.found.iter_mut().rfind(|i| i.action != Action::Tell);
                if let Some(before) = before.filter(|i| !i.is_over()) {
                    before.outcome = Outcome::Superseded { by: *incident };
                }
                let opened = Incident::opened(*incident, *generation, node.clone(), *action, self.when(at));
                self.found.push(Incident { failure: failure.clone(), ..opened });
            }
            Fact::Unlike { incident, generation, finding } => {
                let Some(node) = finding.nodes.first().cloned() else { return };
                let opened = Incident::opened(*incident, *generation, node.clone(), Action::Tell, self.when(at));
                let blamed = Blamed { node, failure: None, verdict: finding.verdict(), others: BTreeMap::new() };
                self.found.push(Incident { blamed: Some(blamed), finding: Some(finding.clone()), ..opened });
            }
            Fact::Restored { generation, step, tiers, steps_lost, nodes } => {
                if let Some(i) = self.ended_by(*generation) {
                    i.told = Some(at);
                    let (step, tiers, steps_lost, nodes) = (*step, tiers.clone(), *steps_lost, *nodes);
                    i.restored = Some(Restore { step, tiers, steps_lost, nodes });
                }
            }
            Fact::FirstStep { generation, step, from, had, .. } => {
                self.first_step(at, *generation, *step, *from, *had);
            }
            Fact::Began { generation, step, from, had } => {
                let of = |i: &&mut Incident| i.began.is_some_and(|b| b.generation == generation.0);
                if let Some(i) = self.found.iter_mut().rfind(of) {
                    i.began(Began { generation: generation.0, from: Some(from.0), had: had.map(|s| s.0) });
                    i.stepped_to(at, step.0);
                }
            }
            Fact::Ended { code, why } => self.ended(at, *code, why),
            Fact::Stacks { generation, stacks } => {
                // Stacks requested by a person in the meantime belong to no failure.
                let of = |i: &&mut Incident| i.generation == generation.0 && at < i.opened + COLLECTED;
                if let Some(i) = self.found.last_mut().filter(of) {
                    i.stacks.extend(stacks.clone());
                }
            }
            Fact::Progress { step, step_us, .. } => {
                if let Some(i) = self.found.iter_mut().rfind(|i| i.steps_again()) {
                    i.step_us.1.get_or_insert(*step_us);
                    // A coordinator that started in between does not know how far the job had been,
                    // so it records no `CaughtUp`.
                    i.stepped_to(at, step.0);
                }
                self.step_us = Some(*step_us);
            }
            about_one => self.read_about(at, about_one),
        }
    }

    /// Reads a fact that names its incident.
    fn read_about(&mut self, at: u64, fact: &Fact) {
        match fact {
            Fact::Noted { incident, right, note } => {
                self.change(*incident, |i| i.noted = Some((*right, note.clone())));
            }
            Fact::Blamed { incident, node, failure, verdict, others } => self.change(*incident, |i| {
                let (node, failure) = (node.clone(), failure.as_deref().cloned());
                let verdict = Verdict::clone(verdict);
                i.blamed = Some(Blamed { node, failure, verdict, others: others.clone() });
            }),
            Fact::Excluded { incident, node, .. } => self.change(*incident, |i| i.excluded = Some(node.clone())),
            Fact::Requested { incident, request } => {
                let known = |i: &&Incident| i.requests.iter().any(|r| r.id == request.id);
                // The fate of a request may be recorded after a later incident.
                let at = self.found.iter().rposition(|i| known(&i));
                let at = at.or_else(|| self.found.iter().rposition(|i| i.number == *incident));
                if let Some(of) = at.and_then(|at| self.found.get_mut(at)) {
                    of.requests.retain(|r| r.id != request.id);
                    of.requests.push(request.clone());
                }
            }
            Fact::Planned { incident, from_table, units, .. } => {
                self.change(*incident, |i| i.planned = Some((*from_table, units.clone())));
            }
            Fact::Checked { incident, found, .. } => self.change(*incident, |i| i.checked = Some(found.clone())),
            Fact::CaughtUp { incident, .. } => self.change(*incident, |i| {
                i.caught_up.get_or_insert(at);
                i.settle();
            }),
            _ => {}
        }
    }

    fn when(&self, at: u64) -> When {
        When { at, world: self.world, step_us: self.step_us }
    }

    fn change(&mut self, number: u64, change: impl FnOnce(&mut Incident)) {
        if let Some(incident) = self.found.iter_mut().rfind(|i| i.number == number) {
            change(incident);
        }
    }

    /// Returns the open incident that the start of this generation ends. An incident in the
    /// generation itself does not qualify.
    fn ended_by(&mut self, generation: Generation) -> Option<&mut Incident> {
        self.found.iter_mut().rfind(|i| i.generation < generation.0).filter(|i| i.outcome == Outcome::Open)
    }

    fn generation_started(&mut self, at: u64, generation: Generation, world: u32, restarts: u32) {
        if restarts == 0 && self.over {
            // A new run of the job.
            *self = Reader::default();
        } else if let Some(i) = self.ended_by(generation) {
            i.regrouped = Some(at);
            i.world.1 = Some(world);
        }
        self.world = world;
    }

    fn first_step(&mut self, at: u64, generation: Generation, step: Step, from: Option<Step>, had: Option<Step>) {
        // A coordinator that started in between does not record the incident's number.
        let Some(i) = self.ended_by(generation) else { return };
        i.stepped = Some((at, step));
        let (from, had) = (from.map(|s| s.0), had.map(|s| s.0));
        // Earlier versions recorded only the number of steps lost relative to the restored one.
        let restored = i.restored.as_ref().map(|r| (r.step.map_or(0, |s| s.0), r.steps_lost, r.nodes));
        let earlier = restored.filter(|(.., nodes)| *nodes == 0).map(|(step, lost, _)| step + lost);
        let from = from.or(restored.map(|(step, ..)| step));
        i.began(Began { generation: generation.0, from, had: had.or(earlier) });
    }

    fn ended(&mut self, at: u64, code: i32, why: &str) {
        self.over = true;
        for i in &mut self.found {
            match i.outcome {
                Outcome::Open => {
                    // A restart was ordered, but then the cause showed that it would not help.
                    if i.regrouped.is_none() && i.action != Action::Tell && (1..128).contains(&code) {
                        i.action = Action::Fail;
                    }
                    i.outcome = Outcome::Ended { code, why: why.to_owned() };
                }
                // A job that finishes has repeated what was lost.
                Outcome::Repeating if code == 0 => {
                    i.caught_up = Some(at);
                    i.outcome = Outcome::Recovered;
                }
                Outcome::Repeating => i.cut_off = true,
                _ => {}
            }
        }
    }
}
