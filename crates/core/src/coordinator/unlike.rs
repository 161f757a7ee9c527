//! Handles a detector's finding that a machine behaves unlike its peers. Nothing has failed, so
//! training continues and the finding is reported. The policy for a single machine:
//!
//! - `act`, two witnesses (families of metrics without a common cause, or samples that stopped
//!   arriving): the job continues without it from a step that all ranks hold (`growth.rs`), and a
//!   cordon is requested (`remedy.rs`).
//! - `act`, one witness: the nodes are checked before the next world forms.
//! - `advise`, `observe`: a cordon is proposed or reported.

use super::command::{Command, Fact};
use super::remedy::{Remedy, Request, Stage};
use super::state::{Job, Phase};
use crate::id::{Incarnation, NodeId};
use crate::message::Order;
use crate::severity::{Table, Verdict};
use crate::spec::{CheckWhen, Policy};
use crate::time::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A finding of a detector.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    /// The machines; more than one if they went bad together.
    pub nodes: Vec<NodeId>,
    /// The metrics that show it, the clearest first. Empty: samples stopped arriving.
    pub metrics: Vec<String>,
    /// Distance from the peers, in hundredths of their usual spread.
    pub score: u64,
    /// Whether it concerns a group (a switch, a rack), so that no single machine is at fault.
    pub group: bool,
    /// Whether it has two witnesses.
    pub sure: bool,
    /// File with the machine's curves against the others' (SVG), on the coordinator's host; empty:
    /// none.
    #[serde(default)]
    pub picture: String,
}

impl Finding {
    /// Returns the finding as the rest of a sentence.
    fn why(&self) -> String {
        let spread = self.score as f64 / 100.0;
        match self.metrics.as_slice() {
            [] => "its samples have ceased to come".into(),
            all => format!("{} ({spread:.1} times the usual spread)", all.join(", ")),
        }
    }

    /// Returns the class of the finding, with what was seen.
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

    /// Reports the finding, and acts as the policy says.
    pub(super) fn unlike(&mut self, now: Time, finding: Finding, out: &mut Vec<Command>) {
        // A machine that has just failed is unlike the others, too.
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
        // Removing a machine does not fix what it shares with others.
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

    /// Excludes a machine that is still used after a person approved its cordon.
    pub(super) fn without_marked(&mut self, request: &Request, out: &mut Vec<Command>) {
        let Remedy::Cordon { node, why, .. } = &request.remedy else { return };
        let Some(life) = self.life(node).filter(|_| matches!(request.stage, Stage::Due { .. })) else { return };
        if self.record.exclusion(node, life).is_some() {
            return;
        }
        let verdict = Verdict { line: why.clone(), ..Table::built_in().named("machine-unlike") };
        self.do_without((node, life), verdict, self.record.incidents, false, out);
        if let Some(of) = self.record.excluded.iter_mut().find(|e| e.node == *node && e.incarnation == life) {
            // The approved request is the cordon.
            of.told_of = true;
        }
    }
}
