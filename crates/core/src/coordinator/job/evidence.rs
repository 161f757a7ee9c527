//! The failures around the latest incident, recent signs of machines, and which of them explains
//! the others.

use crate::failure::{BLAME_WINDOW, SIGN_BEFORE, SIGNS_KEPT};
use crate::id::{Generation, Incarnation, NodeId};
use crate::message::{Cause, Failure, Outcome, Sign, World};
use crate::severity::{Scope, Severity, Table, Verdict};
use crate::time::Time;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Maximum number of failures kept for one incident.
const FAILURES_KEPT: usize = 16_384;

/// A failure around an incident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeFailure {
    /// The node that reported it or was lost.
    pub node: NodeId,
    /// The worker's failure; `None`: the node was lost.
    pub failure: Option<Failure>,
}

impl NodeFailure {
    /// Returns which worker it is about; the node alone if the node was lost.
    fn who(&self) -> (&NodeId, Option<crate::id::Rank>) {
        (&self.node, self.failure.as_ref().map(|f| f.rank))
    }
}

/// The short time after a failure in which others are collected, and the failures so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlameWindow {
    /// Number of the incident within the run.
    incident: u64,
    /// The generation that failed.
    generation: Generation,
    /// Nodes of that generation, and the lives of their agents.
    members: BTreeMap<NodeId, Incarnation>,
    /// Time at which the window opened.
    opened: Time,
    /// Time at which the window closes.
    until: Time,
    /// Whether it was extended because all failures so far are consequences.
    extended: bool,
    /// The failures, in the order in which they were reported.
    failures: Vec<NodeFailure>,
}

/// The first cause of an incident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blame {
    /// The node at fault.
    pub node: NodeId,
    /// What failed there; `None`: the machine itself.
    pub failure: Option<Failure>,
    /// The class of the failure.
    pub verdict: Verdict,
    /// How well it explains the other failures.
    explanation: Explanation,
}

/// How well a failure explains the others; the best comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Explanation {
    /// It names its own cause.
    Cause,
    /// The machine was lost, or reported a failure of its own.
    Machine,
    /// A process ended without an explanation.
    Silent,
    /// It follows from another failure.
    Consequence,
}

impl Explanation {
    fn of(verdict: &Verdict) -> Self {
        match verdict {
            v if v.follows => Explanation::Consequence,
            v if v.says_why() => Explanation::Cause,
            _ => Explanation::Silent,
        }
    }
}

impl Blame {
    /// Returns whether it only follows from another failure, which was not reported.
    #[must_use]
    pub fn is_consequence(&self) -> bool {
        self.explanation == Explanation::Consequence
    }
}

impl BlameWindow {
    /// Returns the first cause, from the reported failures and the machines' `signs`; `None` only
    /// if there are no failures.
    #[must_use]
    pub fn first_cause(&self, signs: &[&(Time, NodeId, Sign)]) -> Option<Blame> {
        let near = |at: &Time| at.after(SIGN_BEFORE) >= self.opened;
        let signs: Vec<_> = signs.iter().filter(|(at, node, _)| near(at) && self.members.contains_key(node)).collect();
        let reported = self.failures.iter().map(|w| {
            let own = w.failure.as_ref().map_or_else(|| Table::built_in().named("node-lost"), |f| f.verdict.clone());
            let of_node = signs.iter().filter(|(_, node, _)| *node == w.node).map(|(.., sign)| sign);
            let explains = |s: &&Sign| w.failure.as_ref().is_none_or(|f| explains(s, f));
            match of_node.clone().rfind(explains) {
                Some(sign) => (Explanation::Cause, w.node.clone(), w.failure.clone(), sign.verdict.clone()),
                None if w.failure.is_none() => (Explanation::Machine, w.node.clone(), None, own),
                None => (Explanation::of(&own), w.node.clone(), w.failure.clone(), own),
            }
        });
        let by_signs = signs.iter().filter(|(.., sign)| sign.verdict.is_of_machine());
        let by_signs = by_signs.map(|(_, node, sign)| (Explanation::Machine, node.clone(), None, sign.verdict.clone()));
        let all = reported.chain(by_signs);
        let first = all.min_by_key(|(explanation, _, _, verdict)| (*explanation, verdict.severity != Severity::Sev1));
        first.map(|(explanation, node, failure, verdict)| Blame { node, failure, verdict, explanation })
    }

    /// Returns the number of the incident.
    #[must_use]
    pub fn incident(&self) -> u64 {
        self.incident
    }

    /// Returns the life of a node that was part of the generation.
    #[must_use]
    pub fn life(&self, node: &NodeId) -> Option<Incarnation> {
        self.members.get(node).copied()
    }

    /// Returns the failure that was reported first.
    #[must_use]
    pub fn opening(&self) -> Option<&NodeFailure> {
        self.failures.first()
    }

    /// Returns the failures of workers so far.
    pub fn failures(&self) -> impl Iterator<Item = &Failure> {
        self.failures.iter().filter_map(|w| w.failure.as_ref())
    }

    /// Counts the failures beside the first cause, by class.
    #[must_use]
    pub fn beside(&self, cause: &Blame) -> BTreeMap<String, u32> {
        let mut others: BTreeMap<String, u32> = BTreeMap::new();
        let first = (&cause.node, cause.failure.as_ref().map(|f| f.rank));
        for w in self.failures.iter().filter(|w| w.who() != first) {
            let class = w.failure.as_ref().map_or("node-lost", |f| f.verdict.class.as_str());
            *others.entry(class.into()).or_default() += 1;
        }
        others
    }

    /// Returns whether a process was killed or hung, or a node was lost: that may have caused an
    /// unexplained exception.
    #[must_use]
    pub fn has_killed(&self) -> bool {
        let killed = |f: &Failure| match f.cause {
            Cause::Exited(Outcome::Signal(signal)) => !matches!(signal, 6 | 15),
            Cause::Hung { .. } | Cause::TrainerVanished { .. } => true,
            Cause::Exited(Outcome::Code(_)) | Cause::NotStarted | Cause::Fenced => false,
        };
        self.failures.iter().any(|w| w.failure.as_ref().is_none_or(killed))
    }
}

/// Returns whether a machine's sign explains the failure of a process on it: the sign names the
/// process, or the machine itself failed and the process does not know better.
fn explains(sign: &Sign, failure: &Failure) -> bool {
    let named = sign.pid.is_some_and(|pid| pid == failure.pid && pid != 0) && !sign.verdict.follows;
    let says = Explanation::of(&failure.verdict) == Explanation::Cause;
    let knows_better = says && (failure.verdict.scope == Scope::User || failure.verdict.is_of_machine());
    (named && sign.verdict.severity != Severity::Sev3) || (sign.verdict.is_of_machine() && !knows_better)
}

/// What is known about the latest incident and the machines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// The failures collected around the latest incident, for a moment.
    window: Option<BlameWindow>,
    /// Recent signs of machines, with time and node.
    signs: VecDeque<(Time, NodeId, Sign)>,
}

impl Evidence {
    /// Starts collecting failures of a generation, with the first one.
    pub(crate) fn open_blame(
        &mut self,
        now: Time,
        incident: u64,
        generation: Generation,
        world: &World,
        first: NodeFailure,
    ) {
        self.window = Some(BlameWindow {
            incident,
            generation,
            members: world.slots.iter().map(|s| (s.node.clone(), s.incarnation)).collect(),
            opened: now,
            until: now.after(BLAME_WINDOW),
            extended: false,
            failures: vec![first],
        });
    }

    /// Records another failure of the generation whose blame window is open. Returns whether all
    /// failures before it only follow from another one; `None` if it is of another generation or
    /// known.
    pub(crate) fn add_failure(&mut self, generation: Generation, failure: NodeFailure) -> Option<bool> {
        let window = self.window.as_mut().filter(|i| i.generation == generation)?;
        if window.failures.len() >= FAILURES_KEPT || window.failures.iter().any(|w| w.who() == failure.who()) {
            return None;
        }
        let echoes = window.failures.iter().all(|w| w.failure.as_ref().is_some_and(|f| f.verdict.follows));
        window.failures.push(failure);
        Some(echoes)
    }

    /// Records a problem that a machine reports about itself.
    pub(crate) fn add_sign(&mut self, now: Time, node: &NodeId, sign: Sign) {
        self.signs.push_back((now, node.clone(), sign));
        if self.signs.len() > SIGNS_KEPT {
            self.signs.pop_front();
        }
    }

    /// Forgets the signs of an earlier life of a node: the machine may have been repaired since.
    pub(crate) fn forget_signs(&mut self, node: &NodeId) {
        self.signs.retain(|(_, of, _)| of != node);
    }

    /// Returns the blame window, if one is open.
    #[must_use]
    pub fn window(&self) -> Option<&BlameWindow> {
        self.window.as_ref()
    }

    /// Returns when the blame window closes.
    #[must_use]
    pub fn until(&self) -> Option<Time> {
        self.window.as_ref().map(|i| i.until)
    }

    /// Returns the first cause as far as is known now.
    #[must_use]
    pub fn blame(&self) -> Option<Blame> {
        self.window.as_ref()?.first_cause(&self.signs.iter().collect::<Vec<_>>())
    }

    /// Extends the blame window once, to `wait` after it opened. Returns false if it was extended
    /// before, or that time is over.
    pub(crate) fn extend_window(&mut self, now: Time, wait: Duration) -> bool {
        let Some(window) = self.window.as_mut().filter(|i| !i.extended) else { return false };
        window.extended = true;
        let longer = window.opened.after(wait);
        if longer > now {
            window.until = longer;
        }
        longer > now
    }

    /// Closes the blame window and returns it.
    pub(crate) fn close(&mut self) -> Option<BlameWindow> {
        self.window.take()
    }
}
