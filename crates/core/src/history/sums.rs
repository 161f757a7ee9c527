//! Sums up where the time of a job went, from recorded accounts and facts.

use super::Entry;
use crate::coordinator::command::Fact;
use crate::id::{Generation, Incarnation, NodeId};
use crate::ledger::{Account, Category, Spent};
use std::collections::{BTreeMap, BTreeSet};

/// Where the time of a job's latest run went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Time by node.
    pub nodes: BTreeMap<NodeId, Spent>,
    /// Time by incident: what would not have been spent without it.
    pub incidents: BTreeMap<u64, Spent>,
    /// Rank-microseconds before the start for which ranks that the job asked for had not joined.
    pub queued: u64,
    /// New steps; `None`: unknown, because a script without step numbers was restarted.
    pub new_steps: Option<u64>,
    /// Repeated steps; `None`: unknown, for the same reason.
    pub repeated_steps: Option<u64>,
    /// There may have been more new steps: all nodes that had completed them were lost before they
    /// reported them.
    pub maybe_more_new: bool,
    /// There may have been more repeated steps, for the same reason.
    pub maybe_more_repeated: bool,
    /// All steps, new and repeated.
    pub steps: u64,
    /// Number of generations.
    pub generations: u32,
}

impl Sums {
    /// Returns the sum over all nodes.
    #[must_use]
    pub fn total(&self) -> Spent {
        self.nodes.values().fold(Spent::default(), |sum, of| sum + *of)
    }
}

type Owner = (NodeId, Incarnation);

/// Returns the steps recorded for this generation.
fn of(all: &mut [(Generation, Trained)], generation: Generation) -> Option<&mut Trained> {
    all.iter_mut().rfind(|(g, _)| *g == generation).map(|(_, of)| of)
}

/// What was recorded about the steps of one generation.
#[derive(Default)]
struct Trained {
    /// The step it continued from.
    from: Option<u64>,
    /// Steps completed beyond that, as reported by its nodes.
    done: u64,
    /// The highest step number seen, which counts from `from`, or from its start.
    to: u64,
    /// The step completed by the latest generation before it, as known to the coordinator.
    before: u64,
}

impl Trained {
    fn done(&self) -> u64 {
        self.done.max(self.to.saturating_sub(self.from.unwrap_or(0)))
    }
}

/// Returns the new and repeated steps of all generations, and their sum.
fn count(generations: &mut [(Generation, Trained)]) -> (Option<u64>, Option<u64>, u64) {
    for i in 0..generations.len() {
        let (earlier, later) = generations.split_at_mut(i);
        let had = later.first().map_or(0, |(_, of)| of.before);
        let latest = earlier.iter_mut().rev().map(|(_, of)| of).find(|of| of.done() > 0);
        if let Some(latest) = latest.filter(|of| of.from.is_some()) {
            latest.to = latest.to.max(had);
        }
    }
    let trained = || generations.iter().map(|(_, of)| of).filter(|of| of.done() > 0);
    let steps = trained().map(Trained::done).sum();
    let Some(first) = trained().next() else { return (Some(0), Some(0), 0) };
    let mut reached = first.from.unwrap_or(0) + first.done();
    let (mut new, mut repeated) = (first.done(), 0);
    for of in trained().skip(1) {
        let Some(from) = of.from else { return (None, None, steps) };
        let to = from + of.done();
        // Steps beyond what is recorded of the generation before: it had completed them, but their
        // record was lost with its machine.
        new += to.saturating_sub(reached);
        repeated += to.min(reached).saturating_sub(from);
        reached = reached.max(to);
    }
    (Some(new), Some(repeated), steps.max(new + repeated))
}

/// Sums up the latest run; with `since` (microseconds since 1970), only the time after it.
#[must_use]
pub fn sums(entries: &[Entry], since: Option<u64>) -> Sums {
    let mut run = Run::default();
    for Entry { at, fact } in entries {
        run.read(*at, fact, since);
    }
    run.sum(since)
}

/// What was recorded about a run.
#[derive(Default)]
struct Run {
    accounts: BTreeMap<Owner, BTreeMap<Generation, Account>>,
    /// What had been spent before the time that counts.
    before: BTreeMap<(Owner, Generation), Spent>,
    steps: Vec<(Generation, Trained)>,
    /// Incidents by the generation that failed.
    opened: BTreeMap<Generation, u64>,
    /// Generations that ended with the loss of a node, until another node reports their end.
    lost: BTreeSet<Generation>,
    /// When the first node joined.
    joined: Option<u64>,
    /// When the first generation started, and its number of ranks.
    started: Option<(u64, u32)>,
    over: bool,
    /// Whether the job has finished.
    finished: bool,
}

impl Run {
    fn read(&mut self, at: u64, fact: &Fact, since: Option<u64>) {
        match fact {
            Fact::Spent { node, incarnation, account } => {
                let counts = since.is_none_or(|since| at >= since);
                self.spent((node.clone(), *incarnation), account, counts);
            }
            Fact::GenerationStarted { generation, restarts, world_size } => {
                if *restarts == 0 && self.over {
                    *self = Run { joined: self.joined, ..Run::default() };
                }
                self.started.get_or_insert((at, *world_size));
                self.steps.push((*generation, Trained::default()));
            }
            Fact::NodeJoined { .. } if self.started.is_none() || self.over => {
                self.joined = Some(self.joined.filter(|_| !self.over).unwrap_or(at));
            }
            Fact::IncidentOpened { incident, generation, failure, .. } => {
                self.opened.insert(*generation, *incident);
                if failure.is_none() {
                    self.lost.insert(*generation);
                }
            }
            Fact::Restored { generation, step, steps_lost, .. } => {
                if let Some(of) = of(&mut self.steps, *generation) {
                    let step = step.map_or(0, |s| s.0);
                    (of.from, of.before) = (Some(step), step + steps_lost);
                }
            }
            Fact::FirstStep { generation, step, from, .. } => {
                if let Some(of) = of(&mut self.steps, *generation) {
                    (of.from, of.to) = (from.map(|s| s.0).or(of.from), of.to.max(step.0));
                }
            }
            Fact::Began { generation, step, from, .. } => {
                if let Some(of) = of(&mut self.steps, *generation) {
                    (of.from, of.to) = (Some(from.0), of.to.max(step.0));
                }
            }
            Fact::Ended { code, .. } => (self.over, self.finished) = (true, *code == 0),
            Fact::Progress { generation, step, .. } => {
                if let Some(of) = of(&mut self.steps, *generation) {
                    of.to = of.to.max(step.0);
                }
            }
            _ => {}
        }
    }

    fn spent(&mut self, owner: Owner, account: &Account, counts: bool) {
        if !counts {
            self.before.insert((owner.clone(), account.generation), account.spent);
        }
        self.lost.remove(&account.generation);
        let of = self.accounts.entry(owner).or_default();
        // Time that a node waited before its first generation is now part of that generation's
        // account.
        if account.generation > Generation(0) {
            of.remove(&Generation(0));
        }
        of.insert(account.generation, account.clone());
    }

    fn sum(mut self, since: Option<u64>) -> Sums {
        for account in self.accounts.values().flat_map(BTreeMap::values) {
            if let (Some(said), Some(of)) = (account.steps, of(&mut self.steps, account.generation)) {
                of.done = of.done.max(said.done);
                of.from = of.from.or(said.from);
            }
        }
        let (new_steps, repeated_steps, steps) = count(&mut self.steps);
        let generations = u32::try_from(self.steps.len()).unwrap_or(u32::MAX);
        // The last generation of a finished job has completed all steps that an earlier one had.
        let maybe_more_repeated = !self.lost.is_empty();
        let maybe_more_new = maybe_more_repeated && !self.finished;
        let mut found = Sums {
            new_steps,
            repeated_steps,
            maybe_more_new,
            maybe_more_repeated,
            steps,
            generations,
            ..Sums::default()
        };
        let first = self.steps.first().map(|(generation, _)| *generation);
        let mut waited = 0;
        for (owner, of) in &self.accounts {
            let newest = of.keys().next_back().copied();
            for (generation, account) in of {
                let mut spent = account.spent;
                // A step never completed, on a node that reports nothing more; or one in progress.
                let ended = self.over || Some(*generation) != newest;
                spent.put(if ended { Category::Detect } else { Category::Unknown }, account.pending);
                if let Some(earlier) = self.before.get(&(owner.clone(), *generation)) {
                    spent = spent.less(earlier);
                }
                if first.is_none_or(|first| *generation <= first) {
                    waited += spent.of(Category::Schedule);
                }
                *found.nodes.entry(owner.0.clone()).or_default() += spent;
                self.charge(&mut found.incidents, *generation, &spent);
            }
        }
        if let (Some(joined), Some((started, ranks))) = (self.joined, self.started) {
            let from = joined.max(since.unwrap_or(0));
            found.queued = (u64::from(ranks) * started.saturating_sub(from)).saturating_sub(waited);
        }
        found
    }

    /// Charges what a generation has `spent` on incidents: the one that ended it, and the one that
    /// led to it, which is the latest one of an earlier generation.
    fn charge(&self, incidents: &mut BTreeMap<u64, Spent>, generation: Generation, spent: &Spent) {
        use Category::{Decide, Detect, Init, Recompute, Restore, Schedule, Warmup};
        let mut charge = |incident: u64, categories: &[Category]| {
            let charged = incidents.entry(incident).or_default();
            categories.iter().for_each(|c| charged.put(*c, spent.of(*c)));
        };
        if let Some(incident) = self.opened.get(&generation) {
            charge(*incident, &[Detect, Decide]);
        }
        if let Some((_, incident)) = self.opened.range(..generation).next_back() {
            charge(*incident, &[Schedule, Init, Restore, Warmup, Recompute]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordinator::command::Action;
    use crate::id::Step;
    use crate::ledger::Steps;

    fn account(generation: u64, micros: &[(Category, u64)], pending: u64) -> Account {
        let mut spent = Spent::default();
        micros.iter().for_each(|(c, m)| spent.put(*c, *m));
        Account { generation: Generation(generation), places: 2, spent, pending, steps: None }
    }

    fn said(at: u64, account: Account) -> Entry {
        Entry { at, fact: Fact::Spent { node: NodeId("0".into()), incarnation: Incarnation(1), account } }
    }

    fn fact(at: u64, fact: Fact) -> Entry {
        Entry { at, fact }
    }

    #[test]
    fn the_latest_word_of_each_generation_counts_once() {
        use Category::{Decide, Detect, Init, Productive, Schedule};
        let started = |g, restarts| Fact::GenerationStarted { generation: Generation(g), world_size: 2, restarts };
        let entries = [
            said(1, account(0, &[(Schedule, 5)], 0)),
            fact(2, started(1, 0)),
            said(3, account(1, &[(Schedule, 6), (Init, 10), (Productive, 40)], 4)),
            said(9, account(1, &[(Schedule, 6), (Init, 10), (Productive, 80), (Detect, 20)], 0)),
            fact(10, started(2, 1)),
            said(11, account(2, &[(Decide, 7)], 3)),
        ];
        let found = sums(&entries, None);
        let total = found.total();
        assert_eq!((total.total(), total.of(Productive), total.of(Category::Unknown)), (126, 80, 3));
        let later = sums(&entries, Some(5)).total();
        assert_eq!((later.of(Productive), later.of(Schedule), later.of(Detect)), (40, 0, 20));
    }

    #[test]
    fn only_the_wait_before_the_first_start_and_within_the_window_is_queued() {
        use Category::{Productive, Schedule};
        let joined = Fact::NodeJoined { node: NodeId("0".into()), again: false };
        let started = |g| Fact::GenerationStarted { generation: Generation(g), world_size: 2, restarts: g as u32 - 1 };
        let entries = [
            fact(100, joined),
            fact(1100, started(1)),
            said(1100, account(1, &[(Schedule, 1000)], 0)),
            said(2000, account(1, &[(Schedule, 1000), (Productive, 900)], 0)),
            fact(2500, started(2)),
            said(3000, account(2, &[(Schedule, 500), (Productive, 400)], 0)),
        ];
        // Two ranks for 1,000, half of which a node had waited.
        assert_eq!(sums(&entries, None).queued, 1000);
        assert_eq!(sums(&entries, Some(1500)).queued, 0);
    }

    /// Returns the new, repeated and total steps of generations, given by where each continued and
    /// how many steps it completed.
    fn counted(generations: &[(Option<u64>, u64)]) -> (Option<u64>, Option<u64>, u64) {
        let mut entries = Vec::new();
        for (g, (from, done)) in (1..).zip(generations) {
            let (generation, restarts) = (Generation(g), g as u32 - 1);
            entries.push(fact(g, Fact::GenerationStarted { generation, world_size: 2, restarts }));
            let steps = Some(Steps { from: *from, done: *done });
            entries.push(said(g, Account { steps, ..account(g, &[], 0) }));
        }
        let found = sums(&entries, None);
        (found.new_steps, found.repeated_steps, found.steps)
    }

    #[test]
    fn steps_are_counted_from_where_a_script_goes_on() {
        assert_eq!(counted(&[(Some(0), 80), (Some(75), 125)]), (Some(200), Some(5), 205));
        assert_eq!(counted(&[(Some(0), 60), (Some(0), 60)]), (Some(60), Some(60), 120));
        assert_eq!(counted(&[(Some(40), 60), (Some(90), 30)]), (Some(80), Some(10), 90));
        // Steps that the first generation had completed before the second one continued there.
        assert_eq!(counted(&[(Some(0), 150), (Some(180), 20)]), (Some(200), Some(0), 200));
        // Interrupted while it repeated steps.
        assert_eq!(counted(&[(Some(0), 80), (Some(50), 10), (Some(60), 40)]), (Some(100), Some(30), 130));
        assert_eq!(counted(&[(None, 60)]), (Some(60), Some(0), 60));
        assert_eq!(counted(&[(None, 60), (None, 90)]), (None, None, 150));
    }

    #[test]
    fn a_lost_node_may_have_done_more_than_anybody_knows() {
        let started = |g, restarts| Fact::GenerationStarted { generation: Generation(g), world_size: 2, restarts };
        let steps = |from, done| Some(Steps { from: Some(from), done });
        let (generation, node) = (Generation(1), NodeId("0".into()));
        let lost = Fact::IncidentOpened { incident: 1, generation, node, failure: None, action: Action::Reconfigure };
        let mut entries =
            vec![fact(1, started(1, 0)), said(2, Account { steps: steps(0, 60), ..account(1, &[], 0) }), fact(3, lost)];
        let more = |entries: &[Entry]| {
            let found = sums(entries, None);
            (found.new_steps, found.maybe_more_new, found.maybe_more_repeated)
        };
        assert_eq!(more(&entries), (Some(60), true, true));
        // A node that was there, too, knows how far they were.
        let survivor = said(4, Account { steps: steps(0, 63), ..account(1, &[], 0) });
        assert_eq!(more(&[entries.clone(), vec![survivor]].concat()), (Some(63), false, false));
        // The job continues from the last known step, and finishes.
        entries.push(fact(5, started(2, 1)));
        entries.push(said(6, Account { steps: steps(50, 5), ..account(2, &[], 0) }));
        assert_eq!(more(&entries), (Some(60), true, true));
        entries.push(said(7, Account { steps: steps(50, 50), ..account(2, &[], 0) }));
        entries.push(fact(8, Fact::Ended { code: 0, why: String::new() }));
        assert_eq!(more(&entries), (Some(100), false, true));
    }

    #[test]
    fn what_the_coordinator_knew_of_a_generation_counts_for_it() {
        let started = |g, restarts| Fact::GenerationStarted { generation: Generation(g), world_size: 2, restarts };
        let progress = |g, step| Fact::Progress { generation: Generation(g), step: Step(step), step_us: 1 };
        let restored = |g, step, steps_lost| {
            let (generation, step, tiers) = (Generation(g), Some(Step(step)), Vec::new());
            Fact::Restored { generation, step, tiers, steps_lost, nodes: 2 }
        };
        let entries = [
            fact(1, started(1, 0)),
            fact(1, restored(1, 0, 0)),
            fact(2, progress(1, 150)),
            fact(3, started(2, 1)),
            fact(3, restored(2, 178, 2)),
            fact(4, progress(2, 600)),
        ];
        let found = sums(&entries, None);
        assert_eq!((found.new_steps, found.repeated_steps), (Some(600), Some(2)));
    }

    #[test]
    fn a_run_that_is_over_does_not_count_for_the_next() {
        let started = |g| Fact::GenerationStarted { generation: Generation(g), world_size: 2, restarts: 0 };
        let entries = [
            fact(1, started(1)),
            said(2, account(1, &[(Category::Productive, 50)], 0)),
            fact(3, Fact::Ended { code: 0, why: String::new() }),
            fact(4, started(2)),
            said(5, account(2, &[(Category::Productive, 7)], 0)),
        ];
        assert_eq!(sums(&entries, None).total().total(), 7);
    }
}
