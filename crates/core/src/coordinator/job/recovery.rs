//! What the current generation has to catch up with after an incident, and whether it has.

use crate::id::{Generation, Step};
use crate::time::Time;
use std::time::Duration;

/// A generation that lasted this long does not count as one that failed before its first step.
const LASTING: Duration = Duration::from_mins(1);

/// How far the current generation is, against the ones before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// Steps that every rank had completed before the last failure.
    high_water: Option<Step>,
    /// The highest step that every rank had completed before the current generation.
    highest: Option<Step>,
    /// Like `high_water`, while it is collected from nodes that stop.
    reached: Option<Step>,
    /// The incident that the current generation should end.
    open_incident: Option<u64>,
    /// The incident that it ended with its first step, though the job may not have caught up.
    ended_incident: Option<u64>,
    /// The incident that is over when all ranks have completed this step again.
    behind: Option<(u64, Step)>,
    /// The latest generation known to continue from a step, and that step.
    began: Option<(Generation, Step)>,
    /// Whether the first step of the current generation was reported.
    stepped: bool,
    /// When the current generation began.
    since: Time,
}

impl Recovery {
    /// Returns the state of a job without incidents.
    #[must_use]
    pub fn new(now: Time) -> Self {
        Recovery {
            high_water: None,
            highest: None,
            reached: None,
            open_incident: None,
            ended_incident: None,
            behind: None,
            began: None,
            stepped: false,
            since: now,
        }
    }

    /// Begins a generation.
    pub(crate) fn begin(&mut self, now: Time) {
        self.high_water = self.reached.take().or(self.high_water);
        self.highest = self.highest.max(self.high_water);
        self.stepped = false;
        self.since = now;
    }

    /// Returns the steps that every rank had completed before the last failure.
    #[must_use]
    pub fn high_water(&self) -> Option<Step> {
        self.high_water
    }

    /// Returns the highest step that every rank had completed before the current generation.
    #[must_use]
    pub fn highest(&self) -> Option<Step> {
        self.highest
    }

    /// Returns when the current generation began.
    #[must_use]
    pub fn since(&self) -> Time {
        self.since
    }

    /// Returns whether the first step of the current generation was reported.
    #[must_use]
    pub fn has_stepped(&self) -> bool {
        self.stepped
    }

    /// Returns whether an incident waits for the first step of a new generation.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open_incident.is_some()
    }

    /// Returns whether the job must still repeat steps that it had completed before.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.behind.is_some()
    }

    /// Returns whether the current generation counts as one that works.
    pub(crate) fn has_lasted(&self, now: Time) -> bool {
        self.stepped || now.since(self.since) >= LASTING
    }

    /// Opens an incident.
    pub(crate) fn open_incident(&mut self, incident: u64) {
        self.open_incident = Some(incident);
        (self.ended_incident, self.behind) = (None, None);
    }

    /// Begins to collect how far the nodes were that stop now.
    pub(crate) fn begin_stop(&mut self) {
        self.reached = None;
    }

    /// Records how far a node was that has stopped.
    pub(crate) fn stopped_at(&mut self, step: Step) {
        self.reached = Some(self.reached.map_or(step, |r| r.min(step)));
    }

    /// Records that the current generation has done a step, though it is not known which.
    pub(crate) fn mark_stepped(&mut self) {
        self.stepped = true;
    }

    /// Records the first new step of a generation, which continues `from` a step if that is known.
    /// Returns the incident that ends with it.
    ///
    /// If the job had been further, the incident is over when that step is reached again. If the
    /// script continues from an unknown step, that moment is unknown.
    pub(crate) fn first_step(&mut self, generation: Generation, step: Step, from: Option<Step>) -> Option<u64> {
        self.stepped = true;
        let incident = self.open_incident.take();
        self.ended_incident = incident;
        self.began = from.map(|from| (generation, from));
        self.behind = from.and(incident).zip(self.highest.filter(|high| *high > step));
        incident
    }

    /// Records the step that the ranks continue from, if [`Recovery::first_step`] did not have it.
    /// Returns false if it was known.
    pub(crate) fn began(&mut self, generation: Generation, step: Step, from: Step) -> bool {
        if self.began == Some((generation, from)) {
            return false;
        }
        self.began = Some((generation, from));
        self.behind = self.ended_incident.zip(self.highest.filter(|high| *high > step));
        true
    }

    /// Records that all ranks have completed this step. Returns the incident that is over with it.
    pub(crate) fn completed(&mut self, step: Step) -> Option<u64> {
        self.behind.take_if(|(_, high)| *high <= step).map(|(incident, _)| incident)
    }
}
