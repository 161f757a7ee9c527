//! How workers end, and the error that an agent passes on when it ends itself.

use crate::oracle::Violation;
use crate::world::World;
use everstep_core::agent::event::{CrewEvent, Words, WorkerExit};
use everstep_core::agent::first_error::FirstError;
use everstep_core::id::Generation;
use everstep_core::invariant::InvariantId;
use everstep_core::message::Outcome;

impl World {
    pub(crate) fn worker_dies(&mut self, host: usize, local_rank: u32) {
        self.worker_ends(host, local_rank, Outcome::Signal(9), "");
    }

    /// A worker ends with an exception. One with an odd local rank crashes while it shuts down.
    pub(crate) fn worker_errs(&mut self, host: usize, local_rank: u32, text: &str) {
        let Some(crew) = self.hosts[host].crews.last() else { return };
        if local_rank.is_multiple_of(2) || crew.living.get(&local_rank) != Some(&true) {
            return self.worker_ends(host, local_rank, Outcome::Code(1), text);
        }
        let (generation, words) = (crew.generation, Words::from(text.to_owned()));
        self.crew_event(host, generation, CrewEvent::WorkerRaised { local_rank, pid: 1, words });
        self.worker_ends(host, local_rank, Outcome::Signal(6), text);
    }

    fn worker_ends(&mut self, host: usize, local_rank: u32, outcome: Outcome, text: &str) {
        let Some(crew) = self.hosts[host].crews.last_mut() else { return };
        let Some(alive) = crew.living.get_mut(&local_rank).filter(|a| **a) else { return };
        *alive = false;
        let (generation, restarts) = (crew.generation, crew.restarts);
        if text != crate::ailing::CASCADE {
            let node = self.hosts[host].node.clone();
            self.oracle.blames.cause(generation, &node);
        }
        let code = match outcome {
            Outcome::Signal(9) => -9,
            _ => 1,
        };
        self.hosts[host].last_mut().errors.entry(restarts).or_insert((local_rank, code));
        let words = Words::from(text.to_owned());
        let exit = WorkerExit { local_rank, pid: 1, outcome, asked: false, words };
        self.crew_event(host, generation, CrewEvent::WorkerExited(exit));
    }

    /// The agent ends the workers of a generation that are still alive.
    pub(crate) fn kill_workers(&mut self, host: usize, generation: Generation) {
        let Some(crew) = self.hosts[host].crews.iter_mut().find(|c| c.generation == generation) else { return };
        let restarts = crew.restarts;
        let living: Vec<u32> = crew.living.iter().filter(|(_, alive)| **alive).map(|(local, _)| *local).collect();
        for local_rank in living {
            self.hosts[host].last_mut().errors.entry(restarts).or_insert((local_rank, -9));
            let outcome = Outcome::Signal(9);
            let exit = WorkerExit { local_rank, pid: 1, outcome, asked: true, words: Words::default() };
            self.crew_event(host, generation, CrewEvent::WorkerExited(exit));
        }
    }

    /// Checks INV-18 for an agent that ends.
    pub(crate) fn check_first_error(&mut self, host: usize, passed_on: Option<FirstError>) {
        let passed_on = passed_on.map(|of| (of.restarts, (of.local_rank, of.code)));
        let seen = self.hosts[host].last().errors.last_key_value().map(|(restarts, error)| (*restarts, *error));
        if passed_on != seen {
            let what = format!("host {host} ends with {passed_on:?}, and the first error was {seen:?}");
            let violation = Violation { invariant: InvariantId::FirstErrorIsPassedOn, at: self.now, what };
            self.oracle.violations.push(violation);
        }
    }
}
