//! Which durable checkpoints stay. Pure: a list in, a list out.

use everstep_core::message::Purpose;
use std::collections::BTreeSet;
use std::time::Duration;

/// What the user wants kept beside the newest ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// So many of the newest; at least two stay, whatever this says.
    pub last: usize,
    /// The first one of every such span of time.
    pub every: Option<Duration>,
    /// Those of epoch boundaries.
    pub epochs: bool,
}

/// A checkpoint, as far as keeping it is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its step.
    pub step: u64,
    /// When it was published, in seconds since 1970; 0 when that is not known.
    pub saved_at: u64,
    /// Why it was written.
    pub purpose: Purpose,
}

/// Steps that may go. What a user saved never does.
#[must_use]
pub fn surplus(policy: Policy, candidates: &[Candidate]) -> Vec<u64> {
    let mut by_age: Vec<&Candidate> = candidates.iter().collect();
    by_age.sort_by_key(|c| c.step);
    let newest: BTreeSet<u64> = by_age.iter().rev().take(policy.last.max(2)).map(|c| c.step).collect();
    let mut spans = BTreeSet::new();
    let mut go = Vec::new();
    for c in by_age {
        let span = policy.every.map(|every| c.saved_at / every.as_secs().max(1));
        let first_of_span = span.is_some_and(|s| spans.insert(s));
        let kept = newest.contains(&c.step)
            || first_of_span
            || c.purpose == Purpose::User
            || (c.purpose == Purpose::Epoch && policy.epochs);
        if !kept {
            go.push(c.step);
        }
    }
    go
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(steps: &[(u64, u64, Purpose)]) -> Vec<Candidate> {
        steps
            .iter()
            .map(|(step, saved_at, purpose)| Candidate { step: *step, saved_at: *saved_at, purpose: *purpose })
            .collect()
    }

    #[test]
    fn the_newest_the_users_the_epochs_and_one_per_span_stay() {
        use Purpose::{Epoch, Recovery, User};
        let all = of(&[
            (1, 0, Recovery),
            (2, 50, User),
            (3, 3700, Recovery),
            (4, 3800, Recovery),
            (5, 3900, Epoch),
            (6, 4000, Recovery),
            (7, 4100, Recovery),
        ]);
        let hourly = Policy { last: 2, every: Some(Duration::from_secs(3600)), epochs: true };
        assert_eq!(surplus(hourly, &all), vec![4]);
        assert_eq!(surplus(Policy { last: 0, every: None, epochs: false }, &all), vec![1, 3, 4, 5]);
    }

    proptest! {
        #[test]
        fn two_always_stay_and_the_newest_is_one_of_them(steps in prop::collection::btree_set(0u64..50, 0..20), last in 0usize..6) {
            let all: Vec<_> = steps.iter().map(|s| Candidate { step: *s, saved_at: 0, purpose: Purpose::Recovery }).collect();
            let go = surplus(Policy { last, every: None, epochs: false }, &all);
            prop_assert_eq!(all.len() - go.len(), all.len().min(last.max(2)));
            prop_assert!(steps.iter().rev().take(last.max(2)).all(|s| !go.contains(s)));
        }
    }
}
