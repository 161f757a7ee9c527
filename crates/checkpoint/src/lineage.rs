//! Which checkpoint continues which. Pure: the contents of the directory go in, and the branch to
//! continue comes out.
//!
//! Training is a line of steps. Going back to an earlier step and training on from there makes a
//! second line beside the first: a *branch*. Every manifest records its own branch and the steps at
//! which that branch, and those before it, were left.

use everstep_wire::limits::{LINEAGE_FORKS_MAX, LINEAGE_TURN_MAX};
use serde::{Deserialize, Serialize};

/// A point where a branch was left for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fork {
    /// The branch that was left; 0 stands for checkpoints of earlier versions, which have no
    /// lineage.
    pub branch: u64,
    /// The last step that both have in common.
    pub step: u64,
    /// Whether the user asked for this step. Otherwise the steps after it could not be read.
    pub asked: bool,
}

/// The branch of a checkpoint, and its ancestors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lineage {
    /// Number of the branch: the turn in which it began.
    pub branch: u64,
    /// Rises whenever training continues in another branch than before: the highest one ran last.
    pub turn: u64,
    /// Where this branch and its ancestors began, the latest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forks: Vec<Fork>,
}

/// The position of a checkpoint among the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Step of the checkpoint.
    pub step: u64,
    /// Lineage in its manifest; the default if the manifest has none.
    pub lineage: Lineage,
}

/// Branch number of checkpoints that were not saved by a training loop and belong to no branch.
pub const OUTSIDE: u64 = u64::MAX;

/// The state that training continues from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum From {
    /// No state: training begins at step 0.
    Scratch,
    /// State in memory, which is that of the branch that ran last.
    Memory {
        /// The step in memory.
        step: u64,
    },
    /// A durable checkpoint.
    Durable(Place),
}

impl Lineage {
    /// Returns whether training can have produced this lineage: its turn is within the limit, and
    /// its branch did not begin in a later turn. Any other lineage is damaged or made up.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        self.turn <= LINEAGE_TURN_MAX && self.branch <= self.turn
    }

    /// Returns whether a checkpoint is of this branch, or of an ancestor before the fork.
    #[must_use]
    pub fn includes(&self, other: &Place) -> bool {
        let branch = other.lineage.branch;
        branch == self.branch || self.forks.iter().any(|f| f.branch == branch && other.step <= f.step)
    }

    /// Returns whether an automatic fallback has left the checkpoint behind: it lies beyond a fork
    /// that the user did not ask for.
    #[must_use]
    pub fn left_behind(&self, other: &Place) -> bool {
        let fork = self.forks.iter().find(|f| f.branch == other.lineage.branch);
        !self.includes(other) && fork.is_some_and(|f| !f.asked)
    }

    /// Returns the branch, of this one and its ancestors, that `step` belongs to, and the forks
    /// before it.
    #[must_use]
    pub fn at(&self, step: u64) -> (u64, &[Fork]) {
        let mut at = (self.branch, self.forks.as_slice());
        while let Some((fork, before)) = at.1.split_first()
            && step <= fork.step
        {
            at = (fork.branch, before);
        }
        at
    }
}

/// Returns the branch that ran last, from the record of the running branch and the durable
/// checkpoints; `None` if there are neither.
#[must_use]
pub fn last<'a>(record: Option<&'a Lineage>, known: &'a [Place]) -> Option<&'a Lineage> {
    let inside = known.iter().filter(|p| p.lineage.branch != OUTSIDE);
    let durable = inside.max_by_key(|p| (p.lineage.turn, p.step)).map(|p| &p.lineage);
    match (record, durable) {
        (Some(r), Some(d)) if d.turn > r.turn => Some(d),
        (Some(r), _) => Some(r),
        (None, d) => d,
    }
}

/// Returns the indices of the checkpoints of the branch that ran last, newest first. Without any
/// lineage, these are all checkpoints.
#[must_use]
pub fn line(record: Option<&Lineage>, known: &[Place]) -> Vec<usize> {
    let ran = last(record, known).cloned().unwrap_or_default();
    let mut line: Vec<usize> = (0..known.len()).filter(|i| known.get(*i).is_some_and(|p| ran.includes(p))).collect();
    // Of a step that was published twice in one branch, the later one counts.
    line.sort_by_key(|i| known.get(*i).map(|p| std::cmp::Reverse((p.step, p.lineage.turn))));
    line
}

/// Returns the forks of a branch that begins at `step` of this one, or of an ancestor. Forks that
/// the user asked for earlier stay marked as such.
fn leave(ran: &Lineage, step: u64, asked: bool) -> Vec<Fork> {
    let (_, before) = ran.at(step);
    let passed = ran.forks.len() - before.len();
    let own = std::iter::once((ran.branch, false)).chain(ran.forks.iter().map(|f| (f.branch, f.asked)));
    let left = own.take(passed + 1).map(|(branch, earlier)| Fork { branch, step, asked: asked || earlier });
    left.chain(before.iter().copied()).take(LINEAGE_FORKS_MAX).collect()
}

/// How training continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The state that it continues from.
    pub from: From,
    /// Whether the user named the step.
    pub asked: bool,
    /// Whether the branches are those of another directory that this one is a copy of. Training
    /// then begins a branch of its own.
    pub copied: bool,
    /// Whether the state was written in another directory, in which its branch may continue.
    pub inherited: bool,
}

/// Returns the branch in which training continues. `unread` has the steps of checkpoints that exist
/// and cannot be read; they may be of the branch that ran last.
#[must_use]
pub fn begin(record: Option<&Lineage>, known: &[Place], unread: &[u64], departure: Departure) -> Lineage {
    let Departure { from, asked, copied, inherited } = departure;
    let next = known.iter().map(|p| p.lineage.turn).chain(record.map(|r| r.turn)).max().unwrap_or(0) + 1;
    let fresh = |forks| Lineage { branch: next, turn: next, forks };
    let ran = last(record, known);
    let Some(ran) = ran else {
        return match from {
            From::Scratch | From::Memory { .. } => fresh(Vec::new()),
            From::Durable(Place { step, lineage }) => fresh(vec![Fork { branch: lineage.branch, step, asked }]),
        };
    };
    let step = match from {
        // None of the known checkpoints belongs to this branch.
        From::Scratch if known.is_empty() && ran.forks.is_empty() && !copied => return ran.clone(),
        From::Scratch => return fresh(Vec::new()),
        From::Memory { step } | From::Durable(Place { step, .. }) => step,
    };
    let beyond = |l: &Lineage| known.iter().any(|p| p.step > step && l.includes(p)) || unread.iter().any(|s| *s > step);
    let in_line = match &from {
        From::Durable(place) => ran.includes(place),
        _ => true,
    };
    if in_line && ran.branch > 0 && !copied && !beyond(ran) {
        return ran.clone();
    }
    if in_line {
        return fresh(leave(ran, step, asked));
    }
    // The user went to another branch than the one that ran last.
    let From::Durable(Place { lineage: there, .. }) = from else { return fresh(Vec::new()) };
    let branch = there.branch;
    let mut own = known.iter().filter(|p| p.lineage.branch == branch);
    let last = own.all(|p| p.step <= step) && unread.iter().all(|s| *s <= step);
    if branch > 0 && branch != OUTSIDE && !copied && !inherited && last {
        return Lineage { turn: next, ..there };
    }
    let mut forks = vec![Fork { branch, step, asked: true }];
    forks.extend(there.forks);
    fresh(forks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(record: Option<&Lineage>, known: &[Place], unread: &[u64], from: From, asked: bool) -> Lineage {
        begin(record, known, unread, Departure { from, asked, copied: false, inherited: false })
    }

    fn copied(record: Option<&Lineage>, known: &[Place], from: From) -> Lineage {
        begin(record, known, &[], Departure { from, asked: false, copied: true, inherited: true })
    }

    fn place(step: u64, lineage: &Lineage) -> Place {
        Place { step, lineage: lineage.clone() }
    }

    fn durable(known: &[Place], step: u64, branch: u64) -> From {
        From::Durable(known.iter().find(|p| (p.step, p.lineage.branch) == (step, branch)).unwrap().clone())
    }

    fn steps(record: Option<&Lineage>, known: &[Place]) -> Vec<u64> {
        line(record, known).into_iter().map(|i| known[i].step).collect()
    }

    #[test]
    fn a_restart_continues_the_branch_that_ran_last() {
        let first = begun(None, &[], &[], From::Scratch, false);
        let mut known: Vec<Place> = [10, 15, 20].iter().map(|s| place(*s, &first)).collect();
        assert_eq!(begun(None, &known, &[], durable(&known, 20, 1), false), first, "a plain restart");
        assert_eq!(begun(None, &known, &[], From::Memory { step: 22 }, false), first);
        let second = begun(None, &known, &[], durable(&known, 10, 1), true);
        assert_eq!((second.branch, second.forks[0]), (2, Fork { branch: 1, step: 10, asked: true }));
        // Before it has anything durable, its record alone shows that it ran last.
        assert_eq!(steps(Some(&second), &known), [10]);
        assert_eq!(begun(Some(&second), &known, &[], From::Memory { step: 13 }, false), second);
        assert_eq!(begun(Some(&second), &known, &[], durable(&known, 10, 1), true), second);
        known.extend([11, 12].iter().map(|s| place(*s, &second)));
        assert_eq!(steps(None, &known), [12, 11, 10]);
        assert_eq!(begun(Some(&second), &known, &[], durable(&known, 12, 2), false), second);
        // Back to the first one: it runs last from then on.
        let back = begun(Some(&second), &known, &[], durable(&known, 20, 1), true);
        assert_eq!((back.branch, back.turn), (1, 3));
        known.push(place(21, &back));
        assert_eq!(steps(Some(&second), &known), [21, 20, 15, 10]);
    }

    #[test]
    fn a_fallback_leaves_behind_what_could_not_be_read_and_not_what_the_user_left() {
        let first = begun(None, &[], &[], From::Scratch, false);
        let mut known: Vec<Place> = [10, 15, 20].iter().map(|s| place(*s, &first)).collect();
        let second = begun(None, &known, &[], durable(&known, 15, 1), false);
        assert!(second.left_behind(&known[2]) && !second.left_behind(&known[1]));
        known.push(place(16, &second));
        // Further back than its own beginning: both are left behind.
        let third = begun(Some(&second), &known, &[], durable(&known, 10, 1), false);
        assert!(known[1..].iter().all(|p| third.left_behind(p)), "{third:?}");
        let asked = begun(None, &known[..3], &[], durable(&known, 15, 1), true);
        known.push(place(17, &asked));
        let further = begun(Some(&asked), &known, &[], durable(&known, 10, 1), false);
        assert!(!further.left_behind(&known[2]), "the user left 20: {further:?}");
    }

    #[test]
    fn checkpoints_without_a_lineage_are_the_beginning_of_the_first_branch() {
        let known: Vec<Place> = [10, 20].iter().map(|s| place(*s, &Lineage::default())).collect();
        assert_eq!(steps(None, &known), [20, 10]);
        let first = begun(None, &known, &[], durable(&known, 20, 0), false);
        assert_eq!((first.branch, first.forks[0].branch), (1, 0));
        assert_eq!(steps(Some(&first), &known), [20, 10]);
        let scratch = begun(None, &known, &[], From::Scratch, false);
        assert_eq!(steps(Some(&scratch), &known), [0; 0]);
    }

    #[test]
    fn training_in_a_copy_continues_the_branch_that_ran_last_as_a_branch_of_its_own() {
        let first = begun(None, &[], &[], From::Scratch, false);
        let mut known: Vec<Place> = [10, 15, 20].iter().map(|s| place(*s, &first)).collect();
        let second = begun(None, &known, &[], durable(&known, 10, 1), true);
        known.extend([11, 13].iter().map(|s| place(*s, &second)));
        let own = copied(Some(&second), &known, durable(&known, 13, 2));
        assert_eq!((own.branch, own.turn), (3, 3));
        assert_eq!(steps(Some(&own), &known), [13, 11, 10]);
        // The original continues, and its next checkpoint is copied here later.
        known.push(place(30, &second));
        assert_eq!(steps(Some(&own), &known), [13, 11, 10]);
        // Back to the last step of a branch that continues elsewhere: that is a branch of its own,
        // too.
        let from = durable(&known, 20, 1);
        let back = begin(Some(&own), &known, &[], Departure { from, asked: true, copied: false, inherited: true });
        assert_eq!((back.branch, back.turn), (4, 4));
        let scratch = copied(Some(&second), &known, From::Scratch);
        assert_eq!(steps(Some(&scratch), &known), [0; 0]);
        // Nothing is durable yet.
        assert_eq!(copied(Some(&first), &[], From::Scratch).branch, 2);
    }
}
