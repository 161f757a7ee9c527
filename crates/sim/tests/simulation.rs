//! The control plane under faults: many seeds give no violation, and the same seed gives the same
//! trace.

use everstep_sim::fault::{Fault, FaultCounts};
use everstep_sim::trace::Keep;
use everstep_sim::{Options, Outcome, run};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Seeds that once found a bug. They are never removed.
const REGRESSIONS: &[u64] = &[169, 373, 375, 904, 1092, 1874, 3868];

/// The same with a tight budget.
const TIGHT_REGRESSIONS: &[u64] = &[94, 188];

fn seeds() -> u64 {
    std::env::var("EVERSTEP_SIM_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(600)
}

/// Runs all of them, on all processors, and returns their outcomes, by seed.
fn outcomes(seeds: &[u64]) -> Vec<(u64, Outcome)> {
    let next = AtomicUsize::new(0);
    let some = || {
        let taken = std::iter::from_fn(|| seeds.get(next.fetch_add(1, Ordering::Relaxed)));
        taken.map(|seed| (*seed, run(&Options::usual(*seed)))).collect::<Vec<_>>()
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut all: Vec<(u64, Outcome)> = std::thread::scope(|s| {
        let threads: Vec<_> = (0..threads).map(|_| s.spawn(some)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a seed panicked")).collect()
    });
    all.sort_by_key(|(seed, _)| *seed);
    all
}

#[test]
fn no_seed_breaks_an_invariant() {
    let (mut counts, mut restores) = (FaultCounts::new(), BTreeMap::new());
    let (mut events, mut generations, mut fewest) = (0, 0, u64::MAX);
    let (mut blames, mut checks) = ((0, 0, 0), (0, 0));
    let all: Vec<u64> = REGRESSIONS.iter().copied().chain(0..seeds()).collect();
    let mut bad = Vec::new();
    for (seed, outcome) in outcomes(&all) {
        fewest = fewest.min(outcome.faults.values().sum());
        events += outcome.events;
        checks = (checks.0 + outcome.checks.0, checks.1 + outcome.checks.1);
        let (right, wrong, unknown) = outcome.blames;
        blames = (blames.0 + right, blames.1 + wrong, blames.2 + unknown);
        generations += outcome.generations;
        for (fault, n) in outcome.faults {
            *counts.entry(fault).or_default() += n;
        }
        for (tier, n) in outcome.restores {
            *restores.entry(tier).or_insert(0) += n;
        }
        bad.extend(
            outcome.violations.first().map(|v| format!("seed {seed}: {} at {} ms: {}", v.invariant, v.at, v.what)),
        );
    }
    let total: u64 = counts.values().sum();
    println!(
        "simulation: {} seeds, {total} faults of {} kinds, {events} events, {generations} generations",
        all.len(),
        counts.len()
    );
    println!("simulation faults: {counts:?}");
    println!("simulation restores by tier: {restores:?}");
    println!("simulation blames: {} right, {} wrong, {} on nobody", blames.0, blames.1, blames.2);
    println!("simulation checks of nodes: {}, {} nodes named, all of them bad", checks.0, checks.1);
    assert!(bad.is_empty(), "{} of {} seeds; replay with make sim SEED=…\n{}", bad.len(), all.len(), bad.join("\n"));
    assert!(blames.1 * 100 <= blames.0, "{blames:?}: who had done it is blamed");
    if seeds() >= 600 {
        assert!(restores.values().filter(|n| **n >= 500).count() == 4, "{restores:?}");
        assert!(fewest >= 20, "a seed with only {fewest} faults");
        assert!(Fault::ALL.iter().all(|f| counts.get(f).is_some_and(|n| *n >= 100)), "{counts:?}");
    }
}

#[test]
fn a_rank_that_dies_between_two_seals_goes_on_from_its_own() {
    for seed in 0..seeds() / 12 {
        let options = Options { between_seals: 12, faults: 6, nodes: 8, ..Options::usual(seed * 2) };
        let outcome = run(&options);
        assert!(outcome.violations.is_empty(), "seed {seed}: {:?}", outcome.violations);
    }
}

#[test]
fn a_tight_budget_is_kept() {
    let mut ended = 0;
    for seed in (0..seeds() / 6).chain(TIGHT_REGRESSIONS.iter().copied()) {
        let outcome = run(&Options { tight_budget: true, ..Options::usual(seed) });
        assert!(outcome.violations.is_empty(), "seed {seed}: {:?}", outcome.violations);
        ended += u32::from(outcome.generations < 12);
    }
    assert!(ended > 0, "no budget was ever used up");
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let mut hashes = BTreeSet::new();
    for seed in 0..50 {
        let run = || run(&Options { trace: Keep::Hash, ..Options::usual(seed) });
        let (a, b) = (run(), run());
        assert_eq!(a.hash, b.hash, "seed {seed}");
        assert!(hashes.insert(a.hash), "seed {seed} is like another");
    }
}
