//! Finds the first cause of an incident. One failing process makes others fail, with hundreds of
//! "connection closed by peer" errors. So all failures around an incident are collected for a
//! moment, while the restart is under way, and the one that explains the others is blamed.
//!
//! ```text
//!  first failure ──> restart (at once)
//!        └─────────> inquiry: other workers, lost nodes, signs of machines
//!                       └──> the first cause: named, and its machine excluded
//! ```

use super::command::{Command, Fact};
use super::incident::describe_as;
use super::state::{Job, Phase, RECENT};
use crate::failure::{SIGN_BEFORE, SIGNS_KEPT};
use crate::id::{Generation, Incarnation, NodeId};
use crate::message::{Cause, Failure, Order, Sign};
use crate::severity::{Scope, Severity, Table, Verdict};
use crate::spec::RestartBudget;
use crate::time::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// How long further failures are collected after the first one.
pub(crate) const HEARING: Duration = Duration::from_secs(2);
/// A machine blamed for two failures within this time is excluded if another one can replace it.
const AGAIN: Duration = Duration::from_secs(30 * 60);
/// Maximum number of failures kept for one incident.
const WITNESSES: usize = 16_384;
/// First and longest wait between generations that fail before their first step.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A generation that lasted this long does not count as one of those.
const LASTING: Duration = Duration::from_secs(60);

/// A failure around an incident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Witness {
    /// The node that reported it or was lost.
    pub node: NodeId,
    /// The worker's failure; `None`: the node was lost.
    pub failure: Option<Failure>,
}

/// The failures collected for one incident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inquiry {
    /// Number of the incident.
    pub incident: u64,
    /// The generation that failed.
    pub generation: Generation,
    /// Nodes of that generation, and the lives of their agents.
    members: BTreeMap<NodeId, Incarnation>,
    /// When the inquiry began.
    opened: Time,
    /// When it ends.
    pub until: Time,
    /// Whether it was extended because all failures so far are consequences.
    drawn_out: bool,
    /// The failures, in the order in which they were reported.
    pub witnesses: Vec<Witness>,
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
    rank: Rank,
}

/// How well a failure explains the others; the best comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// It names its own cause.
    Cause,
    /// The machine was lost, or reported a failure of its own.
    Machine,
    /// A process ended without an explanation.
    Silent,
    /// It follows from another failure.
    Consequence,
}

impl Rank {
    fn of(verdict: &Verdict) -> Self {
        match verdict {
            v if v.follows => Rank::Consequence,
            v if v.says_why() => Rank::Cause,
            _ => Rank::Silent,
        }
    }
}

impl Inquiry {
    /// Returns the first cause, from the reported failures and the machines' `signs`; `None` only
    /// if there are no failures.
    #[must_use]
    pub fn first_cause(&self, signs: &[&(Time, NodeId, Sign)]) -> Option<Blame> {
        let near = |at: &Time| at.after(SIGN_BEFORE) >= self.opened;
        let signs: Vec<_> = signs.iter().filter(|(at, node, _)| near(at) && self.members.contains_key(node)).collect();
        let heard = self.witnesses.iter().map(|w| {
            let own = w.failure.as_ref().map_or_else(|| Table::built_in().named("node-lost"), |f| f.verdict.clone());
            let of_node = signs.iter().filter(|(_, node, _)| *node == w.node).map(|(.., sign)| sign);
            let explains = |s: &&Sign| w.failure.as_ref().is_none_or(|f| explains(s, f));
            match of_node.clone().rfind(explains) {
                Some(sign) => (Rank::Cause, w.node.clone(), w.failure.clone(), sign.verdict.clone()),
                None if w.failure.is_none() => (Rank::Machine, w.node.clone(), None, own),
                None => (Rank::of(&own), w.node.clone(), w.failure.clone(), own),
            }
        });
        let told = signs.iter().filter(|(.., sign)| sign.verdict.is_of_machine());
        let told = told.map(|(_, node, sign)| (Rank::Machine, node.clone(), None, sign.verdict.clone()));
        let all = heard.chain(told);
        let first = all.min_by_key(|(rank, _, _, verdict)| (*rank, verdict.severity != Severity::Sev1));
        first.map(|(rank, node, failure, verdict)| Blame { node, failure, verdict, rank })
    }
}

/// Returns whether a machine's sign explains the failure of a process on it: the sign names the
/// process, or the machine itself failed and the process does not know better.
fn explains(sign: &Sign, failure: &Failure) -> bool {
    let named = sign.pid.is_some_and(|pid| pid == failure.pid && pid != 0) && !sign.verdict.follows;
    let says = Rank::of(&failure.verdict) == Rank::Cause;
    let knows_better = says && (failure.verdict.scope == Scope::User || failure.verdict.is_of_machine());
    (named && sign.verdict.severity != Severity::Sev3) || (sign.verdict.is_of_machine() && !knows_better)
}

impl Job {
    /// Starts collecting failures, with the first one.
    pub(super) fn inquire(
        &mut self,
        now: Time,
        incident: u64,
        node: &NodeId,
        failure: Option<Failure>,
        out: &mut Vec<Command>,
    ) {
        let members = self.record.world.slots.iter().map(|s| (s.node.clone(), s.incarnation)).collect();
        self.inquiry = Some(Inquiry {
            incident,
            generation: self.record.generation,
            members,
            opened: now,
            until: now.after(HEARING),
            drawn_out: false,
            witnesses: vec![Witness { node: node.clone(), failure }],
        });
        self.weigh(out);
    }

    /// Records another failure of the generation under inquiry.
    pub(super) fn testify(
        &mut self,
        node: &NodeId,
        generation: Generation,
        failure: Option<Failure>,
        out: &mut Vec<Command>,
    ) {
        let Some(inquiry) = self.inquiry.as_mut().filter(|i| i.generation == generation) else { return };
        let again =
            |w: &Witness| w.node == *node && w.failure.as_ref().map(|f| f.rank) == failure.as_ref().map(|f| f.rank);
        if inquiry.witnesses.len() < WITNESSES && !inquiry.witnesses.iter().any(again) {
            let echoes = inquiry.witnesses.iter().all(|w| w.failure.as_ref().is_some_and(|f| f.verdict.follows));
            inquiry.witnesses.push(Witness { node: node.clone(), failure: failure.clone() });
            // The failures before it only followed from this one.
            if echoes && self.giving_up.is_none() {
                self.giving_up = self.no_way_back(failure.as_ref());
            }
            self.weigh(out);
        }
    }

    /// Records a problem that a machine reports about itself.
    pub(super) fn signed(&mut self, now: Time, node: &NodeId, sign: Sign, out: &mut Vec<Command>) {
        let fact = Fact::Signed { node: node.clone(), sign: sign.clone() };
        out.push(Command::Record { job: self.record.spec.job.clone(), fact });
        self.signs.push_back((now, node.clone(), sign));
        if self.signs.len() > SIGNS_KEPT {
            self.signs.pop_front();
        }
        if self.inquiry.is_some() {
            self.weigh(out);
        }
    }

    /// Returns the failure of a node that ended its workers on the orders of an earlier
    /// coordinator: it follows from another failure.
    pub(super) fn fenced_before(&self, node: &NodeId) -> Option<Failure> {
        let verdict = Verdict { follows: true, ..Table::built_in().named("unknown") };
        Some(Failure {
            rank: self.record.world.slot(node)?.first_rank,
            local_rank: 0,
            pid: 0,
            cause: Cause::Fenced,
            message: String::new(),
            step: None,
            progressed: false,
            verdict,
        })
    }

    fn blame(&self) -> Option<Blame> {
        self.inquiry.as_ref()?.first_cause(&self.signs.iter().collect::<Vec<_>>())
    }

    /// Excludes the blamed node from the world being formed, if its machine failed.
    fn weigh(&mut self, out: &mut Vec<Command>) {
        let Some(blame) = self.blame().filter(|b| b.verdict.is_of_machine()) else { return };
        // A lost node is not attached, so there is nothing to exclude.
        let lost = blame.failure.is_none() && blame.verdict.class == "node-lost";
        if !lost {
            self.exclude(&blame.node, blame.verdict, false, out);
        }
    }

    fn exclude(&mut self, node: &NodeId, verdict: Verdict, if_replaced: bool, out: &mut Vec<Command>) {
        let Some(inquiry) = &self.inquiry else { return };
        let (Some(life), incident) = (inquiry.members.get(node).copied(), inquiry.incident) else { return };
        self.do_without((node, life), verdict, incident, if_replaced, out);
    }

    /// Ends the inquiry when its time is over.
    pub(super) fn hear_out(&mut self, now: Time, out: &mut Vec<Command>) {
        if self.inquiry.as_ref().is_none_or(|i| now < i.until) {
            return;
        }
        let only_consequences = self.blame().is_some_and(|b| b.rank == Rank::Consequence);
        let ladder = self.record.spec.ladder();
        if let Some(inquiry) = self.inquiry.as_mut().filter(|i| only_consequences && !i.drawn_out) {
            // A lost machine is detected only when its timeout expires.
            let longer = inquiry.opened.after(ladder.silence + ladder.reconnect + Duration::from_secs(2));
            inquiry.drawn_out = true;
            if longer > now {
                inquiry.until = longer;
                return;
            }
        }
        self.conclude(now, out);
    }

    /// Settles which failure was the first cause.
    pub(super) fn conclude(&mut self, now: Time, out: &mut Vec<Command>) {
        let opened_by = self.inquiry.as_ref().and_then(|i| i.witnesses.first()).and_then(|w| w.failure.clone());
        let only_exception = self.no_way_back(opened_by.as_ref()).is_some() && self.unfinished().is_none();
        if self.giving_up.is_some() && only_exception && self.killed_beside() {
            self.giving_up = None;
            self.count_restart(now);
        }
        let blame = self.blame();
        if let Some(blame) = &blame {
            self.blamed_again(now, blame, out);
            if blame.rank == Rank::Consequence || blame.verdict.class == "unknown" {
                self.remained_unexplained(now);
            }
            if blame.rank == Rank::Consequence {
                self.only_connections(now, out);
            }
            self.doubtful = false;
        }
        let Some((inquiry, blame)) = self.inquiry.take().zip(blame) else { return };
        let opening = inquiry.witnesses.first();
        let same = opening.is_some_and(|w| {
            w.node == blame.node
                && w.failure.as_ref().map(|f| &f.verdict) == blame.failure.as_ref().map(|_| &blame.verdict)
        });
        let mut others: BTreeMap<String, u32> = BTreeMap::new();
        let who = |w: &Witness| (w.node.clone(), w.failure.as_ref().map(|f| f.rank));
        let first = (blame.node.clone(), blame.failure.as_ref().map(|f| f.rank));
        for w in inquiry.witnesses.iter().filter(|w| who(w) != first) {
            let class = w.failure.as_ref().map_or("node-lost", |f| f.verdict.class.as_str());
            *others.entry(class.into()).or_default() += 1;
        }
        let what = describe_as(&blame.node, blame.failure.as_ref(), &blame.verdict);
        if !same {
            // Consoles have shown the first failure reported, which was only a consequence.
            self.to_all(&Order::Notice { what: format!("the cause: {what}") }, out);
        }
        if !same || !others.is_empty() {
            let Blame { node, failure, verdict, .. } = blame;
            let (failure, verdict) = (failure.map(Box::new), Box::new(verdict));
            let fact = Fact::Blamed { incident: inquiry.incident, node, failure, verdict, others };
            out.push(Command::Record { job: self.record.spec.job.clone(), fact });
        }
        if let Some((code, why)) = self.giving_up.take()
            && !matches!(self.phase, Phase::Over { .. })
        {
            self.phase = Phase::Over { code, why: format!("{what}; {why}") };
        }
    }

    /// Excludes a machine that is blamed for the second time within [`AGAIN`], if another one can
    /// replace it.
    fn blamed_again(&mut self, now: Time, blame: &Blame, out: &mut Vec<Command>) {
        let by_hand = ["killed", "interrupted"].contains(&blame.verdict.class.as_str());
        // A lost node has already been replaced.
        let machine = matches!(blame.verdict.scope, Scope::Process | Scope::Node)
            && !blame.verdict.follows
            && blame.failure.is_some();
        let life = self.inquiry.as_ref().and_then(|i| i.members.get(&blame.node).copied());
        let Some(life) = life.filter(|_| machine && !by_hand) else { return };
        let member = |node: &NodeId| self.inquiry.as_ref().is_some_and(|i| i.members.contains_key(node));
        let replaced = self.nodes.iter().any(|(id, n)| n.session.is_some() && !member(id));
        let before = |(node, of, at): &&(NodeId, Incarnation, Time)| {
            *node == blame.node && *of == life && now.since(*at) < AGAIN
        };
        if replaced && self.record.blamed.iter().any(|b| before(&b)) {
            self.exclude(&blame.node, blame.verdict.clone(), true, out);
        }
        self.record.blamed.push((blame.node.clone(), life, now));
        let surplus = self.record.blamed.len().saturating_sub(RECENT);
        self.record.blamed.drain(..surplus);
    }

    /// Increases the wait between generations that fail before their first step. There is no wait
    /// if the user has set the number of restarts.
    pub(super) fn back_off(&mut self, now: Time) {
        let counted = matches!(self.record.spec.restarts, RestartBudget::Exactly(_));
        let lasted = self.stepped || now.since(self.trained_since) >= LASTING;
        let times = if lasted { 1 } else { self.in_a_row.0 + 1 };
        let wait = BACK_OFF.0 * 2u32.saturating_pow(times.saturating_sub(2).min(16));
        let until = if counted || times < 2 { Time(0) } else { now.after(wait.min(BACK_OFF.1)) };
        self.in_a_row = (times, until);
    }

    /// Returns the time until which no world may form.
    pub(super) fn held_back(&self, now: Time) -> Option<Time> {
        Some(self.in_a_row.1).filter(|until| *until > now)
    }
}
