//! Which durable checkpoints are kept. Pure: a list in, a list out.

use crate::lineage::{Lineage, Place};
use everstep_core::message::Purpose;
use std::collections::BTreeSet;
use std::time::Duration;

/// Minimum number of steps of the running branch that are kept, whatever the policy.
pub const LAST_MIN: usize = 2;

/// Checkpoints that the user wants to keep beside the newest ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Number of newest steps of the running branch to keep; at least [`LAST_MIN`].
    pub last: usize,
    /// Keep the first checkpoint of every such span of time.
    pub every: Option<Duration>,
    /// Keep the checkpoints of epoch boundaries.
    pub epochs: bool,
    /// Also delete branches that the user left by restoring an earlier step.
    pub abandoned: bool,
}

/// A checkpoint that everstep may delete, with what decides whether it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Step and branch of the checkpoint.
    pub place: Place,
    /// When it was published, in seconds since 1970; 0 if unknown.
    pub saved_at: u64,
    /// Why it was written.
    pub purpose: Purpose,
    /// Names of the objects whose state is in it; empty if unknown.
    pub objects: BTreeSet<String>,
}

/// Returns the indices of the checkpoints that may be deleted, given the branch that runs.
/// Checkpoints that the user saved are never among them, nor those that the user left behind by
/// going back to an earlier step (unless the policy allows it), nor those of branches that do not
/// lead here. With `unread`, there are others that cannot be read and may depend on the checkpoints
/// that they continue.
#[must_use]
pub fn surplus(policy: Policy, running: &Lineage, candidates: &[Candidate], unread: bool) -> Vec<usize> {
    let keep = policy.last.max(LAST_MIN);
    let mut line: Vec<usize> = Vec::new();
    let mut left_behind = Vec::new();
    let mut abandoned = Vec::new();
    for (i, c) in candidates.iter().enumerate() {
        if running.includes(&c.place) {
            line.push(i);
        } else if running.left_behind(&c.place) {
            left_behind.push(i);
        } else {
            abandoned.push(i);
        }
    }
    let at = |i: &usize| candidates.get(*i);
    let order = |i: &usize| at(i).map(|c| (c.place.step, c.place.lineage.turn, c.purpose, c.saved_at));
    line.sort_by_key(order);
    let superseded = superseded(&line, candidates);
    line.retain(|i| !superseded.contains(i));
    // Steps are counted, not checkpoints: the user may have saved one several times.
    let steps: BTreeSet<u64> = line.iter().filter_map(at).map(|c| c.place.step).collect();
    let newest: BTreeSet<u64> = steps.into_iter().rev().take(keep).collect();
    // Checkpoints that the user left are kept to go back to, with those that they continue.
    let needed = |c: &Candidate| {
        let needs = |other: &Candidate| other.place.lineage.includes(&c.place);
        let left = running.forks.iter().any(|f| f.asked && f.step >= c.place.step);
        !policy.abandoned
            && ((unread && left)
                || abandoned.iter().filter_map(at).any(|other| other.place.step >= c.place.step && needs(other)))
    };
    let asked_for = |c: &Candidate| c.purpose == Purpose::User || (c.purpose == Purpose::Epoch && policy.epochs);
    let mut spans = BTreeSet::new();
    let mut go: Vec<usize> = Vec::new();
    for i in &line {
        let Some(c) = at(i) else { continue };
        let span = policy.every.map(|every| c.saved_at / every.as_secs().max(1));
        let first_of_span = span.is_some_and(|s| spans.insert(s));
        if !(newest.contains(&c.place.step) || first_of_span || asked_for(c) || needed(c)) {
            go.push(*i);
        }
    }
    let newer = |turn: u64| {
        let after = line.iter().filter_map(at).filter(|c| c.place.lineage.turn > turn);
        after.map(|c| c.place.step).collect::<BTreeSet<u64>>().len()
    };
    let outlived =
        |i: &usize| at(i).is_some_and(|c| !asked_for(c) && !needed(c) && newer(c.place.lineage.turn) >= keep);
    go.extend(left_behind.into_iter().filter(outlived));
    if policy.abandoned {
        go.extend(abandoned.into_iter().filter(|i| at(i).is_some_and(|c| !asked_for(c))));
    }
    go.extend(superseded);
    go.sort_unstable();
    go
}

/// Returns whether a checkpoint is known to lack an object of another one of the same step. An
/// evaluation that has the model only may save what it restored.
pub(crate) fn lacks(objects: &BTreeSet<String>, of: &BTreeSet<String>) -> bool {
    !objects.is_empty() && !of.is_subset(objects)
}

/// Returns the indices of checkpoints whose step was published again in the same branch, unless the
/// user saved them.
fn superseded(line: &[usize], candidates: &[Candidate]) -> Vec<usize> {
    let place = |c: &Candidate| (c.place.step, c.place.lineage.branch);
    let again = |pair: &[usize]| {
        let [older, newer] = pair else { return None };
        let (was, is) = (candidates.get(*older)?, candidates.get(*newer)?);
        (place(was) == place(is) && was.purpose != Purpose::User && !lacks(&is.objects, &was.objects)).then_some(*older)
    };
    line.windows(2).filter_map(again).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lineage::{Departure, From, begin};
    use Purpose::{Epoch, Recovery, User};
    use proptest::prelude::*;

    const LAST: Policy = Policy { last: 2, every: None, epochs: false, abandoned: false };

    fn begun(record: Option<&Lineage>, known: &[Place], unread: &[u64], from: From, asked: bool) -> Lineage {
        begin(record, known, unread, Departure { from, asked, copied: false, inherited: false })
    }

    fn first() -> Lineage {
        begun(None, &[], &[], From::Scratch, false)
    }

    fn on(lineage: &Lineage, steps: &[(u64, u64, Purpose)]) -> Vec<Candidate> {
        let candidate = |(step, saved_at, purpose): &(u64, u64, Purpose)| Candidate {
            place: Place { step: *step, lineage: lineage.clone() },
            saved_at: *saved_at,
            purpose: *purpose,
            objects: BTreeSet::from(["model".to_owned()]),
        };
        steps.iter().map(candidate).collect()
    }

    fn plain(lineage: &Lineage, steps: &[u64]) -> Vec<Candidate> {
        on(lineage, &steps.iter().map(|s| (*s, 0, Recovery)).collect::<Vec<_>>())
    }

    fn places(all: &[Candidate]) -> Vec<Place> {
        all.iter().map(|c| c.place.clone()).collect()
    }

    fn gone(policy: Policy, running: &Lineage, all: &[Candidate]) -> Vec<(u64, u64)> {
        surplus(policy, running, all, false)
            .into_iter()
            .map(|i| (all[i].place.lineage.branch, all[i].place.step))
            .collect()
    }

    #[test]
    fn the_newest_the_users_the_epochs_and_one_per_span_stay() {
        let all = on(
            &first(),
            &[
                (1, 0, Recovery),
                (2, 50, User),
                (3, 3700, Recovery),
                (4, 3800, Recovery),
                (5, 3900, Epoch),
                (6, 4000, Recovery),
                (7, 4100, Recovery),
            ],
        );
        let hourly = Policy { every: Some(Duration::from_hours(1)), epochs: true, ..LAST };
        assert_eq!(gone(hourly, &first(), &all), [(1, 4)]);
        let none = Policy { last: 0, ..LAST };
        assert_eq!(gone(none, &first(), &all), [(1, 1), (1, 3), (1, 4), (1, 5)]);
    }

    #[test]
    fn what_the_user_left_by_going_back_stays_until_told_otherwise() {
        let mut all = plain(&first(), &[5, 10, 15, 20]);
        let second = begun(
            None,
            &places(&all),
            &[],
            From::Durable(
                all.iter().find(|c| (c.place.step, c.place.lineage.branch) == (10, 1)).unwrap().place.clone(),
            ),
            true,
        );
        all.extend(plain(&second, &[11, 12, 13]));
        assert_eq!(gone(LAST, &second, &all), [(2, 11)], "the running branch is pruned by itself");
        let told = Policy { abandoned: true, ..LAST };
        assert_eq!(gone(told, &second, &all), [(1, 5), (1, 10), (1, 15), (1, 20), (2, 11)]);
    }

    #[test]
    fn what_a_fallback_left_goes_once_enough_newer_ones_are_durable() {
        let mut all = plain(&first(), &[10, 15, 20]);
        let second = begun(
            None,
            &places(&all),
            &[],
            From::Durable(
                all.iter().find(|c| (c.place.step, c.place.lineage.branch) == (15, 1)).unwrap().place.clone(),
            ),
            false,
        );
        assert_eq!(gone(LAST, &second, &all), [(0, 0); 0]);
        all.extend(plain(&second, &[16]));
        assert_eq!(gone(LAST, &second, &all), [(1, 10)], "one newer one is not enough for 20 to go");
        all.extend(plain(&second, &[17]));
        assert_eq!(gone(LAST, &second, &all), [(1, 10), (1, 15), (1, 20)]);
    }

    #[test]
    fn a_step_published_again_replaces_only_what_was_automatic_in_its_own_branch() {
        let mut all = on(&first(), &[(10, 1, Recovery), (10, 2, User), (12, 3, Recovery), (14, 4, Recovery)]);
        assert_eq!(surplus(LAST, &first(), &all, false), [0]);
        let second = begun(
            None,
            &places(&all),
            &[],
            From::Durable(
                all.iter().find(|c| (c.place.step, c.place.lineage.branch) == (10, 1)).unwrap().place.clone(),
            ),
            true,
        );
        all.extend(plain(&second, &[12]));
        assert_eq!(surplus(LAST, &second, &all, false), [0]);
    }

    #[test]
    fn what_lacks_an_object_replaces_nothing() {
        let mut all = on(&first(), &[(10, 1, Recovery), (10, 2, User), (12, 3, Recovery), (14, 4, Recovery)]);
        all[0].objects.insert("optimizer".to_owned());
        assert_eq!(surplus(LAST, &first(), &all, false), [0], "it goes with its step");
        assert_eq!(surplus(Policy { last: 3, ..LAST }, &first(), &all, false), [0; 0]);
    }

    proptest! {
        #[test]
        fn two_always_stay_and_the_newest_is_one_of_them(steps in prop::collection::btree_set(0u64..50, 0..20), last in 0usize..6) {
            let all = plain(&first(), &steps.iter().copied().collect::<Vec<_>>());
            let go = gone(Policy { last, ..LAST }, &first(), &all);
            prop_assert_eq!(all.len() - go.len(), all.len().min(last.max(2)));
            prop_assert!(steps.iter().rev().take(last.max(2)).all(|s| !go.contains(&(1, *s))));
        }
    }
}
