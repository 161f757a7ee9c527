//! A job that is asked to stop. The coordinator orders it for all nodes, so the agent that receives
//! the signal only asks; where no coordinator answers, it stops its own workers.

use super::command::{Command, CrewCommand};
use super::{Agent, Stopping};
use crate::id::Generation;
use crate::message::{Report, Stop};
use crate::time::Time;
use std::time::Duration;

/// A stop that was asked for or ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) what: Stop,
    /// When this agent stops by itself, unless the stop is ordered before.
    alone_at: Option<Time>,
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
        if self.stop.is_some_and(|asked| asked.alone_at.is_none()) {
            // A scheduler signals all nodes, and another one was faster.
            return;
        }
        let what = Stop { signal, at: self.step_ahead() };
        if self.connected && self.began.is_some() && self.over.is_none() {
            // The connection may be dead without anybody having noticed.
            let alone_at = Some(now.after(self.config.spec.ladder().silence * 3));
            self.stop = Some(Asked { what, alone_at });
            self.send(Report::StopRequested(what));
        } else {
            self.stop_alone(now, what);
        }
    }

    /// Stops the workers of this node and then this agent, without a coordinator.
    fn stop_alone(&mut self, now: Time, stop: Stop) {
        self.stop = Some(Asked { what: stop, alone_at: None });
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

    /// Returns when this agent stops by itself.
    pub(super) fn unheard_until(&self) -> Option<Time> {
        self.stop.and_then(|asked| asked.alone_at).filter(|_| self.over.is_none())
    }

    /// Stops by itself if the stop that it asked for was not ordered in time.
    pub(super) fn stop_unheard(&mut self, now: Time) {
        if let Some(stop) = self.stop.filter(|_| self.unheard_until().is_some_and(|at| now >= at)) {
            // The ranks are further by now.
            self.stop_alone(now, Stop { at: self.step_ahead(), ..stop.what });
        }
    }

    /// Returns the stop that a coordinator must know of.
    pub(super) fn known_stop(&self) -> Option<Stop> {
        let asked = self.stop?;
        let at = if asked.alone_at.is_some() { self.step_ahead() } else { asked.what.at };
        Some(Stop { at, ..asked.what })
    }

    /// Stops the workers as the coordinator orders it.
    pub(super) fn stop_ordered(&mut self, now: Time, generation: Generation, stop: Stop) {
        self.stop = Some(Asked { what: stop, alone_at: None });
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
