//! Whose failure was it? What one process fails of, others notice: hundreds of "connection closed by peer" are one line. All that fails around
//! an incident is heard for a moment, while the restart is under way, and the one that the others follow from is blamed.
//!
//! ```text
//!  first failure ──> restart (at once)
//!        └─────────> inquiry ── other workers, lost nodes, signs of machines ──> the first cause: named, and its machine left out
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

/// How long others are heard after the first failure.
pub(crate) const HEARING: Duration = Duration::from_secs(2);
/// A machine that two failures are blamed on within this is left out, if another one can take its place.
const AGAIN: Duration = Duration::from_secs(30 * 60);
/// Failures of one incident that are kept.
const WITNESSES: usize = 16_384;
/// First and longest wait between generations that fail before their first step.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A generation that has lasted this long is not one of those.
const LASTING: Duration = Duration::from_secs(60);

/// Something that failed around an incident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Witness {
    /// Where.
    pub node: NodeId,
    /// A worker; `None`: the node was lost.
    pub failure: Option<Failure>,
}

/// All that is heard of one incident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inquiry {
    /// Its number.
    pub incident: u64,
    /// The generation that failed.
    pub generation: Generation,
    /// Its nodes, and their lives.
    members: BTreeMap<NodeId, Incarnation>,
    /// When it began.
    opened: Time,
    /// When it ends.
    pub until: Time,
    /// It was drawn out because nothing but consequences were heard.
    drawn_out: bool,
    /// In the order in which they were heard.
    pub witnesses: Vec<Witness>,
}

/// Who is blamed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blame {
    /// The node.
    pub node: NodeId,
    /// What failed there; `None`: the machine itself.
    pub failure: Option<Failure>,
    /// What it is held to be.
    pub verdict: Verdict,
    /// The later, the less it explains.
    rank: Rank,
}

/// What explains the others best, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// It says itself what it is.
    Cause,
    /// A machine is gone, or tells of a failure without a process of it having said anything.
    Machine,
    /// It ended and does not say why.
    Silent,
    /// It follows from something else.
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
    /// The first cause among all that was heard, and what machines told of themselves: `None` only for an inquiry without witnesses.
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

/// Whether what a machine told of itself is why a process of it failed: it names the process, or it is grave and the process does not
/// know better.
fn explains(sign: &Sign, failure: &Failure) -> bool {
    let named = sign.pid.is_some_and(|pid| pid == failure.pid && pid != 0) && !sign.verdict.follows;
    let says = Rank::of(&failure.verdict) == Rank::Cause;
    let knows_better = says && (failure.verdict.scope == Scope::User || failure.verdict.is_of_machine());
    (named && sign.verdict.severity != Severity::Sev3) || (sign.verdict.is_of_machine() && !knows_better)
}

impl Job {
    /// Hears what else fails, from the first failure on.
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

    /// Something else of the generation that is inquired into has failed.
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
            // What was noticed first only followed from it.
            if echoes && self.giving_up.is_none() {
                self.giving_up = self.no_way_back(failure.as_ref());
            }
            self.weigh(out);
        }
    }

    /// A machine tells something of itself.
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

    /// A node has ended its workers on the word of an earlier coordinator: something else failed.
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

    /// A machine that has failed itself is left out of the world that is being formed.
    fn weigh(&mut self, out: &mut Vec<Command>) {
        let Some(blame) = self.blame().filter(|b| b.verdict.is_of_machine()) else { return };
        // One that is gone is not there to be left out; if it comes back it is another life of it.
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
            // A machine that is gone is known to be after its silence only.
            let longer = inquiry.opened.after(ladder.silence + ladder.reconnect + Duration::from_secs(2));
            inquiry.drawn_out = true;
            if longer > now {
                inquiry.until = longer;
                return;
            }
        }
        self.conclude(now, out);
    }

    /// Says whose failure it was.
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
            // Consoles have shown what was noticed first, which was only a consequence.
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

    /// A second failure of the same machine within a while, whatever shows it: another one takes its place, if there is one.
    fn blamed_again(&mut self, now: Time, blame: &Blame, out: &mut Vec<Command>) {
        let by_hand = ["killed", "interrupted"].contains(&blame.verdict.class.as_str());
        // One that was lost has been replaced already.
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

    /// Generations that fail before their first step come ever less often. Not where the user has said how often to restart.
    pub(super) fn back_off(&mut self, now: Time) {
        let counted = matches!(self.record.spec.restarts, RestartBudget::Exactly(_));
        let lasted = self.stepped || now.since(self.trained_since) >= LASTING;
        let times = if lasted { 1 } else { self.in_a_row.0 + 1 };
        let wait = BACK_OFF.0 * 2u32.saturating_pow(times.saturating_sub(2).min(16));
        let until = if counted || times < 2 { Time(0) } else { now.after(wait.min(BACK_OFF.1)) };
        self.in_a_row = (times, until);
    }

    /// Until when no world is formed.
    pub(super) fn held_back(&self, now: Time) -> Option<Time> {
        Some(self.in_a_row.1).filter(|until| *until > now)
    }
}
