//! A suite that finds nothing proves nothing: each planted bug must break a named invariant.
#![cfg(feature = "planted")]

use everstep_core::planted_bugs::Bug;
use everstep_sim::{Options, run};

#[test]
fn every_planted_bug_is_found_within_300_seeds() {
    let mut missed = Vec::new();
    for bug in Bug::ALL {
        let found = (0..300).find_map(|seed| {
            let outcome = run(&Options {
                planted: Some(bug),
                tight_budget: bug == Bug::BudgetResetOnRestart,
                ..Options::usual(seed)
            });
            outcome.violations.first().map(|v| (seed, v.invariant))
        });
        match found {
            Some((seed, invariant)) => println!("planted {bug:?}: found by {invariant} at seed {seed}"),
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
