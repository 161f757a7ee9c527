//! A detector says that a machine behaves unlike its peers. Nothing has failed: training goes on, and what was seen is said. With `--policy act`, and
//! two witnesses (families of metrics that do not fail of one cause, or samples that ceased to come), the job goes on without the machine from a
//! step that all ranks hold (`growth.rs`), and it is marked (`remedy.rs`). With one witness it is a suspect: the nodes are checked before the next
//! world is formed.

use super::command::{Command, Fact};
use super::remedy::{Remedy, Request, Stage};
use super::state::{Job, Phase};
use crate::id::{Incarnation, NodeId};
use crate::message::Order;
use crate::severity::{Table, Verdict};
use crate::spec::{CheckWhen, Policy};
use crate::time::Time;
use serde::{Deserialize, Serialize};

/// What a detector has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Who; more than one where they went bad together.
    pub nodes: Vec<NodeId>,
    /// What gave it away, the clearest first. Empty: samples have ceased to come.
    pub metrics: Vec<String>,
    /// How far from the peers, in hundredths of their usual spread.
    pub score: u64,
    /// A group, of which no machine is at fault by itself: a switch, a rack.
    pub group: bool,
    /// It has two witnesses.
    pub sure: bool,
    /// File with its curves against the others' (SVG), on the coordinator's machine; empty: none.
    #[serde(default)]
    pub picture: String,
}

impl Finding {
    /// The rest of a sentence.
    fn why(&self) -> String {
        let spread = self.score as f64 / 100.0;
        match self.metrics.as_slice() {
            [] => "its samples have ceased to come".into(),
            all => format!("{} ({spread:.1} times the usual spread)", all.join(", ")),
        }
    }

    /// Its class, and what was seen.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let class = if self.group { "group-unlike" } else { "machine-unlike" };
        Verdict { line: self.why(), ..Table::built_in().named(class) }
    }
}

impl Job {
    fn life(&self, node: &NodeId) -> Option<Incarnation> {
        let slot = self.record.world.slot(node)?;
        self.nodes.get(node).filter(|n| n.hello.incarnation == slot.incarnation).map(|_| slot.incarnation)
    }

    /// Says it, and does what the policy has.
    pub(super) fn unlike(&mut self, now: Time, finding: Finding, out: &mut Vec<Command>) {
        // Whoever has just failed is unlike the others, too.
        if !matches!(self.phase, Phase::Training { reattach_until: None, .. }) || self.open_incident.is_some() {
            return;
        }
        let mut lives: Vec<(NodeId, Incarnation)> =
            finding.nodes.iter().filter_map(|n| Some((n.clone(), self.life(n)?))).collect();
        lives.retain(|(node, life)| self.record.exclusion(node, *life).is_none() && !self.moves_away(node, *life));
        let Some((first, life)) = lives.first().cloned() else { return };
        let finding = Finding { nodes: lives.into_iter().map(|(node, _)| node).collect(), ..finding };
        self.record.incidents += 1;
        self.changed(false);
        let (incident, generation) = (self.record.incidents, self.record.generation);
        let names: Vec<&str> = finding.nodes.iter().map(|n| n.0.as_str()).collect();
        let what = match (finding.group, finding.sure) {
            (true, _) => "behave unlike the others, all together: a switch, a rack, something that they share",
            (false, true) => "behaves unlike its peers",
            (false, false) => "may be behaving unlike its peers (one family of metrics says so)",
        };
        let what = format!("inc-{incident}: node {} {what}: {}", names.join(", "), finding.why());
        out.extend(self.leader().map(|session| Command::Send { session, order: Order::Notice { what }, after: None }));
        let fact = Fact::Unlike { incident, generation, finding: finding.clone() };
        out.push(Command::Record { job: self.record.spec.job.clone(), fact });
        // Whoever shares a switch with others is not mended by taking it out.
        if finding.group || finding.nodes.len() > 1 {
            return;
        }
        match self.record.spec.policy {
            Policy::Act if finding.sure => self.do_without((&first, life), finding.verdict(), incident, false, out),
            Policy::Act => self.check_asked |= self.record.spec.check != CheckWhen::Never,
            Policy::Advise | Policy::Observe => {
                let host = self.nodes.get(&first).map_or_else(String::new, |n| n.hello.host.clone());
                let why = format!("machine-unlike, incident {incident}");
                self.request(now, Remedy::Cordon { node: first, host, why }, out);
            }
        }
    }

    /// A person has said yes to marking a machine that is still used: the job does without it.
    pub(super) fn without_marked(&mut self, request: &Request, out: &mut Vec<Command>) {
        let Remedy::Cordon { node, why, .. } = &request.remedy else { return };
        let Some(life) = self.life(node).filter(|_| matches!(request.stage, Stage::Due { .. })) else { return };
        if self.record.exclusion(node, life).is_some() {
            return;
        }
        let verdict = Verdict { line: why.clone(), ..Table::built_in().named("machine-unlike") };
        self.do_without((node, life), verdict, self.record.incidents, false, out);
        if let Some(of) = self.record.excluded.iter_mut().find(|e| e.node == *node && e.incarnation == life) {
            // By this very request.
            of.told_of = true;
        }
    }
}
