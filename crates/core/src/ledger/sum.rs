//! From what was written down about a job to where its time went.

use super::{Account, Category, Spent};
use crate::coordinator::command::Fact;
use crate::history::{Entry, Progress, What};
use crate::id::{Generation, Incarnation, NodeId};
use std::collections::BTreeMap;

/// Where the time of a job's latest run went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// By node.
    pub nodes: BTreeMap<NodeId, Spent>,
    /// By incident: what would not have been spent without it.
    pub incidents: BTreeMap<u64, Spent>,
    /// Microseconds for which ranks that the job asked for were not there yet.
    pub queued: u64,
    /// New steps.
    pub new_steps: u64,
    /// Steps that were computed again.
    pub repeated_steps: u64,
    /// Generations.
    pub generations: u32,
}

impl Sums {
    /// All nodes.
    #[must_use]
    pub fn total(&self) -> Spent {
        self.nodes.values().fold(Spent::default(), |sum, of| sum + *of)
    }
}

type Owner = (NodeId, Incarnation);

#[derive(Default)]
struct Steps {
    step: u64,
    restored: u64,
}

/// Adds up the latest run; with `since` (microseconds since 1970), only what came after it.
#[must_use]
pub fn sums(entries: &[Entry], since: Option<u64>) -> Sums {
    let mut accounts: BTreeMap<Owner, BTreeMap<Generation, Account>> = BTreeMap::new();
    let mut before: BTreeMap<(Owner, Generation), Spent> = BTreeMap::new();
    let mut steps: Vec<(Generation, Steps)> = Vec::new();
    let mut opened: BTreeMap<Generation, u64> = BTreeMap::new();
    let (mut over, mut joined, mut started) = (false, None, None);
    for Entry { at, what } in entries {
        match what {
            What::Spent { node, incarnation, account } => {
                let owner = (node.clone(), *incarnation);
                if since.is_some_and(|since| *at < since) {
                    before.insert((owner.clone(), account.generation), account.spent);
                }
                let of = accounts.entry(owner).or_default();
                // What a node waited for before its first generation has become a part of that one's account.
                if account.generation > Generation(0) {
                    of.remove(&Generation(0));
                }
                of.insert(account.generation, account.clone());
            }
            What::Fact(Fact::GenerationStarted { generation, restarts, world_size }) => {
                if *restarts == 0 && over {
                    (steps, opened, over, started) = (Vec::new(), BTreeMap::new(), false, None);
                    accounts.clear();
                    before.clear();
                }
                started.get_or_insert((*at, *world_size));
                steps.push((*generation, Steps::default()));
            }
            What::Fact(Fact::NodeJoined { .. }) if started.is_none() || over => {
                joined = Some(joined.filter(|_| !over).unwrap_or(*at))
            }
            What::Fact(Fact::IncidentOpened { incident, generation, .. }) => {
                opened.insert(*generation, *incident);
            }
            What::Fact(Fact::Restored { generation, step, .. }) => {
                if let Some((_, of)) = steps.iter_mut().rfind(|(g, _)| g == generation) {
                    of.restored = step.map_or(0, |s| s.0);
                }
            }
            What::Fact(Fact::Ended { .. }) => over = true,
            What::Fact(_) | What::Stacks { .. } => {}
            What::Progress(Progress { generation, step, .. }) => {
                if let Some((_, of)) = steps.iter_mut().rfind(|(g, _)| g.0 == *generation) {
                    of.step = of.step.max(*step);
                }
            }
        }
    }
    let mut found = Sums { generations: u32::try_from(steps.len()).unwrap_or(u32::MAX), ..Sums::default() };
    let mut reached = 0;
    for (_, Steps { step, restored }) in &steps {
        found.new_steps += step.saturating_sub(reached.max(*restored));
        found.repeated_steps += (*step).min(reached).saturating_sub(*restored);
        reached = reached.max(*step);
    }
    // The incident that a generation was started for: the latest one of an earlier generation.
    let cause = |generation: Generation| opened.range(..generation).next_back().map(|(_, incident)| *incident);
    for (owner, of) in &accounts {
        let newest = of.keys().next_back().copied();
        for (generation, account) in of {
            let mut spent = account.spent;
            // A step that was never completed, of a node that says nothing more; or one under way.
            let ended = over || Some(*generation) != newest;
            spent.put(if ended { Category::Detect } else { Category::Unknown }, account.pending);
            if let Some(earlier) = before.get(&(owner.clone(), *generation)) {
                spent = spent.less(earlier);
            }
            *found.nodes.entry(owner.0.clone()).or_default() += spent;
            let of = |categories: &[Category]| {
                let mut part = Spent::default();
                categories.iter().for_each(|c| part.put(*c, spent.of(*c)));
                part
            };
            if let Some(incident) = opened.get(generation) {
                *found.incidents.entry(*incident).or_default() += of(&[Category::Detect, Category::Decide]);
            }
            if let Some(incident) = cause(*generation) {
                use Category::{Init, Recompute, Restore, Schedule, Warmup};
                *found.incidents.entry(incident).or_default() += of(&[Schedule, Init, Restore, Warmup, Recompute]);
            }
        }
    }
    if let (Some(joined), Some((started, ranks))) = (joined, started) {
        let waited = found.total().of(Category::Schedule);
        found.queued = (u64::from(ranks) * started.saturating_sub(joined)).saturating_sub(waited);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(generation: u64, micros: &[(Category, u64)], pending: u64) -> Account {
        let mut spent = Spent::default();
        micros.iter().for_each(|(c, m)| spent.put(*c, *m));
        Account { generation: Generation(generation), places: 2, spent, pending }
    }

    fn said(at: u64, account: Account) -> Entry {
        Entry { at, what: What::Spent { node: NodeId("0".into()), incarnation: Incarnation(1), account } }
    }

    fn fact(at: u64, fact: Fact) -> Entry {
        Entry { at, what: What::Fact(fact) }
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
