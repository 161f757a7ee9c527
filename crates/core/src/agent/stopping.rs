//! A job that is asked to stop. The coordinator orders it for all nodes, so the agent that receives
//! the signal only asks; where no coordinator answers, it stops its own workers.

use super::command::{Command, CrewCommand};
use super::watch::Watch;
use super::workers::NEWS;
use super::{Agent, Stopping};
use crate::id::{Generation, Step};
use crate::message::{Report, Stop};
use crate::time::Time;
use std::time::Duration;

/// How far a stop is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The signal has arrived. The step at which all ranks stop can be named once a step has been
    /// timed, or at this time.
    Timing { signal: i32, until: Time },
    /// The coordinator was asked. This agent stops by itself at this time, unless it is ordered
    /// before.
    Asked { what: Stop, alone_at: Time },
    /// It was ordered, or this agent stops by itself.
    Decided(Stop),
}

impl Agent {
    /// Handles a signal that this agent has received.
    pub(super) fn signal(&mut self, now: Time, signal: i32) {
        if !self.stops_on(signal) {
            self.out.push_back(Command::Forward { signal });
            return;
        }
        self.signals += 1;
        if self.signals > 1 {
            return self.stop_at_once(now, Stop { signal, at: None });
        }
        if matches!(self.stop, Some(Stage::Decided(_))) {
            // A scheduler signals all nodes, and another one was faster.
            return;
        }
        if self.steps_are_untimed() {
            self.stop = Some(Stage::Timing { signal, until: now.after(NEWS) });
        } else {
            self.ask_to_stop(now, signal);
        }
    }

    /// Asks the coordinator to stop the job, or stops alone where there is none.
    fn ask_to_stop(&mut self, now: Time, signal: i32) {
        let what = Stop { signal, at: self.last_step() };
        if self.connected && self.began.is_some() && self.over.is_none() {
            // The connection may be dead, and this agent may not have noticed.
            let alone_at = now.after(self.config.spec.ladder().silence * 3);
            self.stop = Some(Stage::Asked { what, alone_at });
            self.send(Report::StopRequested(what));
        } else {
            self.stop_alone(now, what);
        }
    }

    /// Stops the workers of this node and then this agent, without a coordinator.
    fn stop_alone(&mut self, now: Time, stop: Stop) {
        self.stop = Some(Stage::Decided(stop));
        let reason = stop.end();
        match &self.crew {
            Some(crew) => {
                let generation = crew.generation;
                self.over.get_or_insert(reason);
                self.stop_workers(now, generation, stop);
            }
            None => self.end(now, reason),
        }
    }

    /// Ends the workers without waiting for them: a second signal.
    fn stop_at_once(&mut self, now: Time, stop: Stop) {
        let reason = stop.end();
        match &mut self.crew {
            Some(crew) => {
                crew.killing = false;
                self.over.get_or_insert(reason);
                self.kill(Duration::ZERO);
            }
            None => self.end(now, reason),
        }
    }

    /// Returns when the next thing is done about a stop that is not decided.
    pub(super) fn stop_deadline(&self) -> Option<Time> {
        match self.stop? {
            Stage::Timing { until, .. } => Some(until),
            Stage::Asked { alone_at, .. } => Some(alone_at).filter(|_| self.over.is_none()),
            Stage::Decided(_) => None,
        }
    }

    /// Asks for the stop as soon as its step can be named, and stops by itself if the stop was not
    /// ordered in time.
    pub(super) fn pursue_stop(&mut self, now: Time) {
        let due = self.stop_deadline().is_some_and(|at| now >= at);
        match self.stop {
            Some(Stage::Timing { signal, .. }) if due || !self.steps_are_untimed() => self.ask_to_stop(now, signal),
            // The ranks are further by now.
            Some(Stage::Asked { what, .. }) if due => self.stop_alone(now, Stop { at: self.last_step(), ..what }),
            _ => {}
        }
    }

    /// Returns the stop that a coordinator must know of.
    pub(super) fn known_stop(&self) -> Option<Stop> {
        match self.stop? {
            Stage::Timing { .. } => None,
            Stage::Asked { what, .. } => Some(Stop { at: self.last_step(), ..what }),
            Stage::Decided(what) => Some(what),
        }
    }

    /// Returns whether the ranks would stop at a step that is yet to be named, and no step was
    /// timed. This lasts for the first two steps after a start.
    fn steps_are_untimed(&self) -> bool {
        let alive = self.crew.iter().flat_map(|crew| crew.alive.values());
        alive.clone().any(Watch::flags_stop) && alive.clone().all(|watch| watch.median_step_ms().is_none())
    }

    /// Returns the step at which all ranks stop. `None`: each one at the end of the step that it is
    /// at, which is right if none has completed any.
    fn last_step(&self) -> Option<Step> {
        self.step_ahead().or_else(|| {
            let alive = self.crew.iter().flat_map(|crew| crew.alive.values());
            // It takes longer than a message.
            let step = alive.filter(|watch| watch.has_new_step()).filter_map(Watch::step).max()?;
            Some(Step(step + 2))
        })
    }

    /// Stops the workers as the coordinator orders it.
    pub(super) fn stop_ordered(&mut self, now: Time, generation: Generation, stop: Stop) {
        self.stop = Some(Stage::Decided(stop));
        if self.crew.is_none() {
            // Its workers have not started, and will not.
            self.seen = self.seen.max(generation);
        }
        if let Some((queued, ..)) = self.queued.take_if(|(queued, ..)| *queued <= generation) {
            self.seen = self.seen.max(queued);
        }
        self.stop_workers(now, generation, stop);
    }

    /// Returns whether workers of this generation do not start any more, because the job stops.
    pub(super) fn starts_in_vain(&mut self, generation: Generation) -> bool {
        if let Some(Stage::Timing { signal, .. }) = self.stop {
            self.ask_to_stop(self.now, signal);
        }
        let in_vain = self.stop.is_some();
        if in_vain {
            self.seen = self.seen.max(generation);
            self.report_stopped();
        }
        in_vain
    }

    /// Passes the signal on, and ends the workers that remain after the shutdown grace.
    fn stop_workers(&mut self, now: Time, generation: Generation, stop: Stop) {
        let grace = self.config.shutdown_grace;
        let Some(crew) = self.crew.as_mut().filter(|c| c.generation == generation) else {
            self.report_stopped();
            return;
        };
        if crew.stopping.is_some() {
            return;
        }
        crew.stopping = Some(Stopping { until: now.after(grace), grace: Duration::ZERO });
        if crew.alive.is_empty() {
            self.kill(Duration::ZERO);
        } else {
            self.command(generation, CrewCommand::StopAt(stop));
            self.out.push_back(Command::Forward { signal: stop.signal });
        }
    }
}
