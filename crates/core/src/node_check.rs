//! A check that finds bad or slow nodes in at most three rounds of pairs. A pair runs a real
//! collective; in the first round, each node also measures itself. DLRover's check has two rounds
//! and calls a node faulty that fails twice (its paper, section 3.3). Here, a test that passes
//! clears both of its nodes, and only failures with two cleared nodes count against a node. What
//! can also be a link is reported as such.
//!
//! ```text
//!  round 1   all nodes, in pairs                      a pass clears both
//!  round 2   each uncleared node, with a cleared one   fails with two cleared nodes: faulty
//!  round 3   the same, with another cleared one        fails between cleared nodes: the link
//! ```

use crate::median::median;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of rounds of pairs.
pub const ROUNDS: u32 = 3;
/// A node is slow if its own work takes this many percent of the median node's (as in DLRover);
/// less is noise where nodes share CPUs.
const SLOW_PERCENT: u64 = 200;
/// A pair is slow if its collective takes this many percent of the median pair's: networks differ
/// more than CPUs do.
const SLOW_PAIR_PERCENT: u64 = 250;
/// Number of nodes that a good node may test at the same time, if good nodes are few.
const AT_ONCE: usize = 4;
/// Number of measurements needed for a meaningful median.
const FOR_A_MEDIAN: usize = 3;

/// The result of a pair's collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The result was correct and in time.
    Passed {
        /// Duration in microseconds, on the slower side.
        micros: u64,
    },
    /// The result was wrong, late or missing.
    Failed,
}

/// Durations of a node's own work in microseconds; the work is the same on all nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Speed {
    /// A matrix multiplication, on the slowest of its devices.
    pub compute: u64,
    /// A copy within that device's memory.
    pub memory: u64,
}

/// The task of one node in a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Index of the node in the check.
    pub node: usize,
    /// Its partners, all tested at the same time, each in a test of its own.
    pub peers: Vec<usize>,
    /// Whether the node measures itself first.
    pub measure: bool,
}

/// The results of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Nodes that are certainly bad, and the evidence.
    pub faulty: BTreeMap<usize, String>,
    /// Nodes that work, but slowly, and the evidence.
    pub slow: BTreeMap<usize, String>,
    /// Bad links between two good nodes.
    pub links: BTreeSet<(usize, usize)>,
    /// Any further bad nodes are among these, and any further bad links between them.
    pub suspects: BTreeSet<usize>,
    /// Nodes for which there is no evidence.
    pub untested: BTreeSet<usize>,
}

impl Findings {
    /// Returns whether nothing was found.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        *self == Findings::default()
    }
}

/// A check of the nodes `0..nodes`, given by index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeCheck {
    nodes: usize,
    round: u32,
    tests: BTreeMap<(usize, usize), Outcome>,
    /// The round in which a pair was last tried, and the number of tries.
    tried: BTreeMap<(usize, usize), (u32, u32)>,
    speeds: BTreeMap<usize, Speed>,
    broken: BTreeMap<usize, String>,
    gone: BTreeSet<usize>,
}

fn pair(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

/// Returns the median of at least [`FOR_A_MEDIAN`] values.
fn usual(of: impl Iterator<Item = u64>) -> Option<u64> {
    let all: Vec<u64> = of.collect();
    if all.len() >= FOR_A_MEDIAN { median(all) } else { None }
}

impl NodeCheck {
    /// Starts a check of `nodes` nodes.
    #[must_use]
    pub fn new(nodes: usize) -> Self {
        NodeCheck {
            nodes,
            round: 0,
            tests: BTreeMap::new(),
            tried: BTreeMap::new(),
            speeds: BTreeMap::new(),
            broken: BTreeMap::new(),
            gone: BTreeSet::new(),
        }
    }

    /// Returns the number of rounds so far.
    #[must_use]
    pub fn round(&self) -> u32 {
        self.round
    }

    /// Records a node's own measurement, or why it failed.
    pub fn measured(&mut self, node: usize, speed: Result<Speed, String>) {
        match speed {
            Ok(speed) => {
                // Keep the better of two: a neighbour may have been busy the first time.
                let best = self.speeds.entry(node).or_insert(speed);
                best.compute = best.compute.min(speed.compute);
                best.memory = best.memory.min(speed.memory);
            }
            Err(why) => {
                self.broken.insert(node, why);
            }
        }
    }

    /// Records that a node no longer responds, which is not evidence against its partners.
    pub fn gone(&mut self, node: usize) {
        self.gone.insert(node);
        self.tests.retain(|(a, b), outcome| *outcome != Outcome::Failed || (*a != node && *b != node));
    }

    /// Records one side's result of a pair. The worse of both sides counts, and the later of two
    /// tries.
    pub fn tested(&mut self, a: usize, b: usize, outcome: Outcome) {
        if self.gone.contains(&a) || self.gone.contains(&b) {
            return;
        }
        let (round, times) = self.tried.entry(pair(a, b)).or_insert((0, 0));
        if *round != self.round {
            (*round, *times) = (self.round, *times + 1);
            self.tests.remove(&pair(a, b));
        }
        let known = self.tests.entry(pair(a, b)).or_insert(outcome);
        *known = match (*known, outcome) {
            (Outcome::Passed { micros: x }, Outcome::Passed { micros: y }) => Outcome::Passed { micros: x.max(y) },
            _ => Outcome::Failed,
        };
    }

    /// Returns the tasks of the next round; empty if nothing more can be learned, or no rounds are
    /// left. Call it when all results of the last round are known.
    pub fn next_round(&mut self) -> Vec<Task> {
        if self.round == ROUNDS {
            return Vec::new();
        }
        let pairs = if self.round == 0 { self.neighbours() } else { self.retests() };
        let again = self.slow();
        let measure = |node: &usize| self.round == 0 || (self.round == 1 && again.contains_key(node));
        let peers = |node: usize| {
            pairs.iter().filter_map(|(a, b)| if *a == node { Some(*b) } else { (*b == node).then_some(*a) }).collect()
        };
        let tasks = (0..self.nodes).map(|node| Task { node, peers: peers(node), measure: measure(&node) });
        let tasks: Vec<Task> = tasks.filter(|t| !t.peers.is_empty() || t.measure).collect();
        if !tasks.is_empty() {
            self.round += 1;
        }
        tasks
    }

    fn neighbours(&self) -> Vec<(usize, usize)> {
        (0..self.nodes / 2).map(|i| (2 * i, 2 * i + 1)).collect()
    }

    /// Pairs each uncleared node with a cleared one that has not tested it yet; the rest with each
    /// other.
    fn retests(&self) -> Vec<(usize, usize)> {
        let cleared = self.cleared();
        let faulty = self.faulty(&cleared);
        let mut load: BTreeMap<usize, usize> = cleared.iter().map(|good| (*good, 0)).collect();
        let (mut pairs, mut left) = (Vec::new(), Vec::new());
        for node in
            (0..self.nodes).filter(|n| !cleared.contains(n) && !faulty.contains_key(n) && !self.gone.contains(n))
        {
            let new = load.iter_mut().filter(|(good, load)| **load < AT_ONCE && !self.knows(node, **good));
            match new.min_by_key(|(_, load)| **load) {
                Some((good, load)) => {
                    *load += 1;
                    pairs.push((node, *good));
                }
                None => left.push(node),
            }
        }
        // A single failure together with a good node may have been momentary noise.
        for (a, b) in self.tried_once(&cleared).filter(|(a, b)| !faulty.contains_key(a) && !faulty.contains_key(b)) {
            if [a, b].iter().all(|n| load.get(n).is_none_or(|load| *load < AT_ONCE)) {
                load.iter_mut().filter(|(good, _)| **good == a || **good == b).for_each(|(_, load)| *load += 1);
                pairs.push((a, b));
            }
        }
        while let Some(node) = left.pop() {
            // The farthest one: neighbours were tried first.
            if let Some(at) = left.iter().position(|other| !self.knows(node, *other)) {
                pairs.push((node, left.remove(at)));
            }
        }
        pairs
    }

    /// Returns the pairs with a good node that were tried once and did not pass.
    fn tried_once<'a>(&'a self, cleared: &'a BTreeSet<usize>) -> impl Iterator<Item = (usize, usize)> + 'a {
        let slow = self.slow_from();
        let once = |of: &(usize, usize)| self.tried.get(of).is_some_and(|(_, times)| *times == 1);
        let failed = self.tests.iter().filter(move |(_, outcome)| !passed(**outcome, slow)).map(|(pair, _)| *pair);
        failed.filter(move |pair| once(pair) && (cleared.contains(&pair.0) || cleared.contains(&pair.1)))
    }

    fn knows(&self, a: usize, b: usize) -> bool {
        self.tests.contains_key(&pair(a, b))
    }

    fn of(&self, node: usize) -> impl Iterator<Item = (usize, Outcome)> {
        self.tests.iter().filter_map(move |((a, b), outcome)| match node {
            n if n == *a => Some((*b, *outcome)),
            n if n == *b => Some((*a, *outcome)),
            _ => None,
        })
    }

    fn failed_with(&self, node: usize) -> impl Iterator<Item = usize> {
        let slow = self.slow_from();
        self.of(node).filter(move |(_, outcome)| !passed(*outcome, slow)).map(|(peer, _)| peer)
    }

    /// Returns the duration in microseconds from which a pair counts as slow.
    fn slow_from(&self) -> Option<u64> {
        let took =
            self.tests.values().filter_map(|o| if let Outcome::Passed { micros } = o { Some(*micros) } else { None });
        usual(took).map(|m| m * SLOW_PAIR_PERCENT / 100)
    }

    /// Returns the nodes with a test that passed in time.
    fn cleared(&self) -> BTreeSet<usize> {
        let slow = self.slow_from();
        let passed = self.tests.iter().filter(|(_, outcome)| passed(**outcome, slow));
        passed
            .flat_map(|((a, b), _)| [*a, *b])
            .filter(|n| !self.broken.contains_key(n) && !self.gone.contains(n))
            .collect()
    }

    /// Returns the nodes that failed on their own, or with two cleared nodes.
    fn faulty(&self, cleared: &BTreeSet<usize>) -> BTreeMap<usize, String> {
        let mut found = self.broken.clone();
        for node in (0..self.nodes).filter(|n| !cleared.contains(n)) {
            let with: Vec<usize> = self.failed_with(node).filter(|peer| cleared.contains(peer)).collect();
            if with.len() >= 2 {
                found.entry(node).or_insert_with(|| String::from("collectives with two good nodes failed"));
            }
        }
        found
    }

    /// Returns the nodes that are slow by their own measurements.
    fn slow(&self) -> BTreeMap<usize, String> {
        let of = |speed: &Speed| [("matrix multiplication", speed.compute), ("copying memory", speed.memory)];
        let median = |what: usize| usual(self.speeds.values().map(|s| of(s)[what].1)).filter(|m| *m > 0);
        let medians = [median(0), median(1)];
        let mut found = BTreeMap::new();
        for (node, speed) in &self.speeds {
            for ((what, micros), median) in of(speed).into_iter().zip(medians) {
                let percent = median.map_or(100, |m| micros.saturating_mul(100) / m);
                if percent >= SLOW_PERCENT {
                    let times = format!("{}.{}", percent / 100, percent % 100 / 10);
                    found
                        .entry(*node)
                        .or_insert_with(|| format!("{what} takes {times} times as long as on the others"));
                }
            }
        }
        found
    }

    /// Returns what the rounds so far show.
    #[must_use]
    pub fn findings(&self) -> Findings {
        let cleared = self.cleared();
        let mut faulty = self.faulty(&cleared);
        let mut slow = self.slow();
        // All collectives of such a node ended, but late.
        let late = |n: &usize| !self.broken.contains_key(n) && self.of(*n).all(|(_, o)| o != Outcome::Failed);
        for node in faulty.keys().copied().filter(late).collect::<Vec<_>>() {
            faulty.remove(&node);
            slow.entry(node).or_insert_with(|| "collectives with two good nodes are slow".into());
        }
        slow.retain(|n, _| !faulty.contains_key(n));
        let bad = |n: &usize| faulty.contains_key(n) || (slow.contains_key(n) && !cleared.contains(n));
        let open = || (0..self.nodes).filter(|n| !cleared.contains(n) && !bad(n));
        let failed = |n: &usize| self.failed_with(*n).any(|peer| !bad(&peer));
        let between = self.tests.keys().filter(|(a, b)| cleared.contains(a) && cleared.contains(b));
        let links = between.copied().filter(|(a, b)| self.failed_with(*a).any(|peer| peer == *b)).collect();
        let (suspects, untested) = open().partition(failed);
        Findings { faulty, slow, links, suspects, untested }
    }
}

/// Returns whether the collective gave the right result in time.
fn passed(outcome: Outcome, slow_from: Option<u64>) -> bool {
    matches!(outcome, Outcome::Passed { micros } if slow_from.is_none_or(|slow| micros < slow))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;

    /// The faults that really exist.
    #[derive(Clone, Debug, Default)]
    struct Truth {
        bad: BTreeSet<usize>,
        links: BTreeSet<(usize, usize)>,
        slow: BTreeSet<usize>,
        late: BTreeSet<usize>,
        /// The pair that fails the first time only.
        flaky: Option<(usize, usize)>,
    }

    /// Runs a check to its end; also returns the number of passing pairs in the first round.
    fn check(nodes: usize, truth: &Truth) -> (NodeCheck, usize) {
        let mut check = NodeCheck::new(nodes);
        let mut good_pairs = 0;
        let mut flaky = truth.flaky;
        loop {
            let tasks = check.next_round();
            if tasks.is_empty() {
                return (check, good_pairs);
            }
            let mut seen = BTreeSet::new();
            let once = flaky.take_if(|(a, b)| tasks.iter().any(|t| t.node == *a && t.peers.contains(b)));
            for task in tasks {
                assert!(seen.insert(task.node), "one task at a time");
                if task.measure {
                    let compute = if truth.slow.contains(&task.node) { 2000 } else { 1000 };
                    check.measured(task.node, Ok(Speed { compute, memory: 500 }));
                }
                for peer in task.peers {
                    let either = |of: &BTreeSet<usize>| of.contains(&task.node) || of.contains(&peer);
                    let fails = either(&truth.bad) || truth.links.contains(&pair(task.node, peer));
                    let fails = fails || once == Some(pair(task.node, peer));
                    let micros = if either(&truth.late) { 9000 } else { 1000 };
                    check.tested(task.node, peer, if fails { Outcome::Failed } else { Outcome::Passed { micros } });
                    good_pairs += usize::from(check.round() == 1 && !fails && task.node < peer);
                }
            }
        }
    }

    #[test]
    fn dlrovers_example() {
        let truth = Truth { bad: [4].into(), ..Truth::default() };
        let (done, _) = check(6, &truth);
        assert_eq!(done.findings().faulty.into_keys().collect::<Vec<_>>(), [4]);
        assert_eq!(done.round(), 2, "its neighbour is cleared by another one, and it fails with both");
    }

    #[test]
    fn all_well_takes_one_round_or_two_for_the_odd_one() {
        assert_eq!(check(8, &Truth::default()).0.round(), 1);
        let (odd, _) = check(7, &Truth::default());
        assert!(odd.round() == 2 && odd.findings().is_clean());
    }

    #[test]
    fn a_link_is_not_a_node() {
        let truth = Truth { links: [(2, 3)].into(), ..Truth::default() };
        let (done, _) = check(6, &truth);
        assert_eq!(done.findings(), Findings { links: [(2, 3)].into(), ..Findings::default() });
        assert_eq!(done.round(), 3, "tried again");
    }

    #[test]
    fn what_fails_once_is_tried_again() {
        let truth = Truth { flaky: Some((2, 3)), ..Truth::default() };
        assert!(check(6, &truth).0.findings().is_clean());
        // The flaky pair comes in the second round, after a first one with a bad node.
        let truth = Truth { bad: [1, 4].into(), flaky: Some((3, 5)), ..Truth::default() };
        let found = check(6, &truth).0.findings();
        assert!(found.faulty.into_keys().eq([1, 4]) && found.links.is_empty() && found.suspects.is_empty());
    }

    #[test]
    fn of_two_nodes_both_are_suspects() {
        let found = check(2, &Truth { bad: [0].into(), ..Truth::default() }).0.findings();
        assert_eq!(found, Findings { suspects: [0, 1].into(), ..Findings::default() });
    }

    #[test]
    fn one_node_is_measured_and_not_tested() {
        let (one, _) = check(1, &Truth::default());
        assert_eq!(one.findings().untested, [0].into());
    }

    #[test]
    fn slow_nodes_and_slow_networks_are_not_faulty() {
        let truth = Truth { slow: [1].into(), late: [4].into(), ..Truth::default() };
        let found = check(8, &truth).0.findings();
        assert_eq!(found.slow.keys().copied().collect::<Vec<_>>(), [1, 4]);
        assert!(found.faulty.is_empty() && found.suspects.is_empty());
    }

    #[test]
    fn who_cannot_even_measure_itself_is_faulty() {
        let mut check = NodeCheck::new(2);
        check.next_round();
        check.measured(1, Err("CUDA error".into()));
        check.tested(0, 1, Outcome::Failed);
        assert!(check.next_round().is_empty());
        let found = check.findings();
        assert_eq!((found.faulty.len(), found.untested), (1, [0].into()));
    }

    #[test]
    fn who_does_not_answer_is_not_bad_and_speaks_against_nobody() {
        let mut check = NodeCheck::new(4);
        check.next_round();
        check.tested(0, 1, Outcome::Failed);
        check.gone(1);
        check.tested(1, 0, Outcome::Failed);
        check.tested(2, 3, Outcome::Passed { micros: 1 });
        assert_eq!(check.next_round().iter().map(|t| t.node).collect::<Vec<_>>(), [0, 2]);
        check.tested(0, 2, Outcome::Passed { micros: 1 });
        assert!(check.next_round().is_empty());
        assert_eq!(check.findings(), Findings { untested: [1].into(), ..Findings::default() });
    }

    /// Generates up to three bad nodes anywhere, and perhaps a link between two others that fails
    /// always or once.
    fn truths() -> impl Strategy<Value = (usize, Truth)> {
        (2usize..=64).prop_flat_map(|n| {
            let bad = prop::collection::btree_set(0..n, 0..=3.min(n));
            let link = prop::option::of((0..n, 0..n, prop::bool::weighted(0.3)));
            (Just(n), bad, link).prop_map(|(n, bad, link)| {
                let good = |(a, b, _): &(usize, usize, bool)| a != b && !bad.contains(a) && !bad.contains(b);
                let link = link.filter(good).map(|(a, b, once)| (pair(a, b), once));
                let links = link.filter(|(_, once)| !once).map(|(link, _)| link).into_iter().collect();
                let flaky = link.filter(|(_, once)| *once).map(|(link, _)| link);
                (n, Truth { bad, links, flaky, ..Truth::default() })
            })
        })
    }

    #[test]
    fn named_exactly_where_two_good_pairs_exist_and_else_nobody_outside() {
        let cases = 20_000;
        let exact = std::cell::Cell::new(0);
        let mut runner = TestRunner::new(ProptestConfig::with_cases(cases));
        let done = runner.run(&truths(), |(nodes, truth)| {
            let (done, good_pairs) = check(nodes, &truth);
            let found = done.findings();
            prop_assert!(done.round() <= ROUNDS);
            let named: BTreeSet<usize> = found.faulty.keys().copied().collect();
            prop_assert!(named.is_subset(&truth.bad), "{named:?} of {:?}", truth.bad);
            let certain: BTreeSet<usize> = &(&named | &found.suspects) | &found.untested;
            prop_assert!(truth.bad.is_subset(&certain), "{:?} not within {certain:?}", truth.bad);
            // A pair that fails once, in the last round, is seen to fail.
            let failing: BTreeSet<_> = truth.links.iter().copied().chain(truth.flaky).collect();
            prop_assert!(found.links.is_subset(&failing));
            if good_pairs >= 2 && truth.flaky.is_none() {
                exact.set(exact.get() + 1);
                prop_assert_eq!(&named, &truth.bad, "suspects {:?}", found.suspects);
                prop_assert!(found.suspects.is_empty() && found.untested.is_empty());
            }
            Ok(())
        });
        done.unwrap();
        println!("node check: {cases} cases of 2 to 64 nodes, {} with two good pairs", exact.get());
    }
}
