//! Follows the coordinator's orders.

use super::Agent;
use super::command::{Command, CrewCommand};
use crate::id::{Epoch, Generation, Step};
use crate::message::{CrewOrder, CrewReport, Order, Report, Restore, ShardWritten, Start};
use crate::time::Time;

impl Agent {
    /// Follows an order of the coordinator with this epoch. Orders of earlier epochs are void.
    pub(super) fn order(&mut self, now: Time, epoch: Epoch, order: Order) {
        if epoch < self.epoch {
            return;
        }
        self.epoch = epoch;
        match order {
            Order::Crew(generation, order) => self.crew_order(now, generation, order),
            Order::Welcome { began, .. } => {
                self.began = Some(began);
                self.refused_since = None;
                self.send_unacknowledged();
                self.report_refusal();
                self.take_part_again();
            }
            Order::Refused(reason) => {
                // An earlier life of this node may have just died: insist until that is detected.
                let since = *self.refused_since.get_or_insert(now);
                if now.since(since) >= self.config.spec.ladder().silence * 3 || reason.code == 2 {
                    self.end(now, reason);
                }
            }
            Order::Check(check) => self.check(check),
            Order::StandBy => self.warm(),
            Order::Idle { excluded } if self.crew.is_none() => self.ledger.waits(now.micros(), excluded),
            Order::Idle { .. } => {}
            Order::Notice { what } => self.out.push_back(Command::Say { what }),
            Order::End(reason) | Order::Leave(reason) => self.end(now, reason),
        }
    }

    /// Follows an order about the workers of one generation.
    fn crew_order(&mut self, now: Time, generation: Generation, order: CrewOrder) {
        match order {
            CrewOrder::Start(start) => self.start_ordered(generation, start),
            CrewOrder::Fence { stacks } => self.fence(generation, stacks),
            CrewOrder::Signal(stop) => self.stop_ordered(now, generation, stop),
            // What a node persists last may depend on these two, even if its workers are gone
            // already.
            CrewOrder::Committed { step, round } => {
                self.held_by_all(generation, step);
                if self.runs(generation) {
                    self.committed(step);
                    self.replicate_next(round);
                }
            }
            CrewOrder::Durable(step) => self.durable(generation, step),
            // The other orders concern only workers that are here.
            _ if !self.runs(generation) => {}
            CrewOrder::PersistAt(step) => self.command(generation, CrewCommand::PersistAt(step)),
            CrewOrder::SnapshotEvery(change) => self.command(generation, CrewCommand::SnapshotEvery(change)),
            CrewOrder::ProposeStep => {
                let step = self.step_ahead();
                self.report(CrewReport::StepProposed(step));
            }
            CrewOrder::HoldAt(step) => self.hold(step),
            CrewOrder::Restore(restore) => self.restore(generation, restore),
            CrewOrder::Replicate { plan, round, committed } => self.replicate_with(plan, round, committed),
            CrewOrder::Publish(publish) => self.command(generation, CrewCommand::Publish(publish)),
        }
    }

    /// Starts the workers of a generation, once older workers have ended.
    fn start_ordered(&mut self, generation: Generation, start: Start) {
        let stale = generation <= self.seen && !crate::is_planted!(self, MissingGenerationCheck);
        if stale || self.over.is_some() || self.starts_in_vain(generation) {
            return;
        }
        if self.crew.is_some() {
            self.queued = Some((generation, start));
            self.kill(self.config.spec.ladder().fence_grace);
        } else {
            self.start(generation, start);
        }
    }

    fn restore(&mut self, generation: Generation, restore: Restore) {
        self.acknowledge(|r| matches!(r, CrewReport::Offers(_) | CrewReport::Holds(_)));
        if let Some(crew) = &mut self.crew {
            crew.restoring.clear();
        }
        self.ledger.best(restore.best.map_or(0, |s| s.0));
        self.goes_on_from(restore.step);
        self.command(generation, CrewCommand::Restore(restore));
    }

    /// Handles a checkpoint that became visible. What a node persists last is newer.
    fn durable(&mut self, generation: Generation, step: Step) {
        if self.runs(generation) {
            self.acknowledge(|r| {
                matches!(r, CrewReport::ShardWritten(ShardWritten { step: s, .. }) | CrewReport::Published(s) if *s <= step)
            });
        }
        // The latest crew may be gone already.
        if self.latest == Some(generation) {
            self.command(generation, CrewCommand::Durable(step));
        }
    }

    /// Repeats the reports that must reach the coordinator.
    fn send_unacknowledged(&mut self) {
        let Some(crew) = &self.crew else { return };
        let again = crew.unacknowledged.iter().cloned().map(|report| Report::Crew(crew.generation, report));
        self.out.extend(again.map(Command::Send));
    }

    pub(super) fn hold(&mut self, step: Option<Step>) {
        let Some(generation) = self.latest.filter(|_| step.is_some() || self.holding) else { return };
        self.holding = step.is_some();
        self.command(generation, CrewCommand::HoldAt(step));
    }
}
