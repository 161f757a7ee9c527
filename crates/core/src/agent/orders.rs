//! Follows the coordinator's orders.

use super::Agent;
use super::command::Command;
use crate::id::{Epoch, Step};
use crate::message::{Order, Report};
use crate::time::Time;

impl Agent {
    /// Follows an order of the coordinator with this epoch. Orders of earlier epochs are void.
    pub(super) fn order(&mut self, now: Time, epoch: Epoch, order: Order) {
        if epoch < self.epoch {
            return;
        }
        self.epoch = epoch;
        match order {
            Order::Welcome { .. } => {
                self.ever_welcome = true;
                self.refused_since = None;
                let again: Vec<Report> = self.crew.iter().flat_map(|c| c.unacknowledged.clone()).collect();
                self.out.extend(again.into_iter().map(Command::Send));
                self.report_refusal();
                self.take_part_again();
            }
            Order::Refused { why, code } => {
                // An earlier life of this node may have just died: insist until that is detected.
                let since = *self.refused_since.get_or_insert(now);
                if now.since(since) >= self.config.spec.ladder().silence * 3 || code == 2 {
                    self.end(now, code, why);
                }
            }
            Order::Start { generation, place, restarts, max_restarts } => {
                let stale = generation <= self.seen && !crate::is_planted!(self, MissingGenerationCheck);
                if stale || self.over.is_some() || self.starts_in_vain(generation) {
                    return;
                }
                if let Some(crew) = &self.crew {
                    let old = crew.generation;
                    self.queued = Some((generation, place, restarts, max_restarts));
                    self.kill(old, self.config.spec.ladder().fence_grace);
                } else {
                    self.start(generation, place, restarts, max_restarts);
                }
            }
            Order::Fence { generation, stacks } => self.fence(generation, stacks),
            Order::Signal { generation, stop } => self.stop_ordered(now, generation, stop),
            Order::Check { check, round, measure, partners } => self.check(check, round, measure, partners),
            Order::StandBy => self.warm(),
            Order::Idle { excluded } if self.crew.is_none() => self.book.waits(now.micros(), excluded),
            Order::Idle { .. } => {}
            Order::Notice { what } => self.out.push_back(Command::Say { what }),
            Order::End { code, why } => self.end(now, code, why),
            of_checkpoints => self.order_of_checkpoints(of_checkpoints),
        }
    }

    /// Follows an order about steps: where ranks capture, hold, replicate and restore.
    fn order_of_checkpoints(&mut self, order: Order) {
        match order {
            Order::PersistAt { generation, step } => {
                if self.runs(generation) {
                    self.out.push_back(Command::PersistAt { step });
                }
            }
            Order::SnapshotEvery { generation, from, every } => {
                if self.runs(generation) {
                    self.out.push_back(Command::SnapshotEvery { from, every });
                }
            }
            Order::ProposeStep { generation } => {
                if self.runs(generation) {
                    let step = self.step_ahead();
                    self.send(Report::StepProposed { generation, step });
                }
            }
            Order::HoldAt { generation, step } => {
                if self.runs(generation) {
                    self.hold(step);
                }
            }
            Order::Restore { generation, step, sources, persist, best, found } => {
                if self.acknowledge(generation, |r| matches!(r, Report::Offers { .. } | Report::Holds { .. })) {
                    if let Some(crew) = &mut self.crew {
                        crew.restoring.clear();
                    }
                    self.book.best(best.map_or(0, |s| s.0));
                    self.goes_on_from(step);
                    self.out.push_back(Command::Restore { generation, step, sources, persist, found });
                }
            }
            Order::Replicate { generation, plan, next, round } => {
                self.replicate_next(generation, Some(plan), (next, round));
            }
            Order::Committed { generation, step, next, round } => {
                self.committed(generation, step);
                self.replicate_next(generation, None, (next, round));
            }
            Order::Publish { generation, step, directory, shards } => {
                if self.runs(generation) {
                    self.out.push_back(Command::Publish { generation, step, directory, shards });
                }
            }
            Order::Durable { generation, step } => {
                let covered = |r: &Report| matches!(r, Report::ShardWritten { step: s, .. } | Report::Published { step: s, .. } if *s <= step);
                if self.acknowledge(generation, covered) {
                    self.out.push_back(Command::Durable { generation, step });
                }
            }
            Order::Welcome { .. }
            | Order::Refused { .. }
            | Order::Start { .. }
            | Order::Fence { .. }
            | Order::Signal { .. }
            | Order::Check { .. }
            | Order::StandBy
            | Order::Idle { .. }
            | Order::Notice { .. }
            | Order::End { .. } => {}
        }
    }

    pub(super) fn hold(&mut self, step: Option<Step>) {
        if step.is_some() || self.holding {
            self.holding = step.is_some();
            self.out.push_back(Command::HoldAt { step });
        }
    }
}
