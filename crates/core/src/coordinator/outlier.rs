//! Handles a detector's finding that a machine behaves unlike its peers. Nothing has failed, so
//! training continues and the finding is reported. The policy for a single machine:
//!
//! - `act`, two witnesses (families of metrics without a common cause, or samples that stopped
//!   arriving): the job continues without it from a step that all ranks hold (`growth.rs`), and a
//!   cordon is requested (`remediation.rs`).
//! - `act`, one witness: the nodes are checked before the next world forms.
//! - `advise`, `observe`: a cordon is proposed or reported.

use super::command::Fact;
use super::finding::Finding;
use super::job::Job;
use super::output::Output;
use super::request::{Remedy, Request, Stage};
use crate::id::{Incarnation, NodeId};
use crate::message::Order;
use crate::severity::{Table, Verdict};
use crate::spec::{CheckWhen, Policy};
use crate::time::Time;

/// What to do about machines that deviate together.
const LOOK: &str = "look for what they share, such as a switch or a rack";

impl Job {
    fn life(&self, node: &NodeId) -> Option<Incarnation> {
        let slot = self.record.world.slot(node)?;
        self.nodes.get(node).filter(|n| n.hello.incarnation == slot.incarnation).map(|_| slot.incarnation)
    }

    /// Reports the finding, and acts according to the policy.
    pub(super) fn unlike(&mut self, now: Time, finding: Finding, out: &mut Output) {
        // A machine that has just failed is unlike the others, too.
        if !self.phase.is_settled() || self.recovery.is_open() {
            return;
        }
        let mut lives: Vec<(NodeId, Incarnation)> =
            finding.nodes.iter().filter_map(|n| Some((n.clone(), self.life(n)?))).collect();
        lives.retain(|(node, life)| {
            self.record.machines.exclusion(node, *life).is_none() && !self.record.machines.is_reassigned(node, *life)
        });
        let Some((first, life)) = lives.first().cloned() else { return };
        let finding = Finding { nodes: lives.into_iter().map(|(node, _)| node).collect(), ..finding };
        self.record.incidents += 1;
        self.changed(false);
        let (incident, generation) = (self.record.incidents, self.record.generation);
        let names = finding.nodes.iter().map(|n| n.0.as_str()).collect::<Vec<_>>().join(", ");
        let why = finding.why();
        let what = match (finding.nodes.len() > 1, finding.group, finding.sure) {
            (true, ..) => format!("nodes {names} deviate from their peers together: {why}; {LOOK}"),
            (_, true, _) => format!("node {names} deviates from its peers, together with others: {why}; {LOOK}"),
            (_, _, true) => format!("node {names} behaves unlike its peers: {why}"),
            _ => format!("node {names} may be behaving unlike its peers (only one family of metrics shows it): {why}"),
        };
        let what = format!("inc-{incident}: {what}");
        out.send_each(self.leader(), &Order::Notice { what });
        let fact = Fact::Unlike { incident, generation, finding: finding.clone() };
        out.record(fact);
        // Removing a machine does not fix a fault that it shares with others.
        if finding.group || finding.nodes.len() > 1 {
            return;
        }
        match self.record.spec.policy {
            Policy::Act if finding.sure => self.do_without(&first, life, finding.verdict(), incident, false, out),
            Policy::Act if self.record.spec.check == CheckWhen::Never => {}
            Policy::Act => self.checks.ask(),
            Policy::Advise | Policy::Observe => {
                let host = self.nodes.get(&first).map_or_else(String::new, |n| n.hello.host.clone());
                let why = format!("machine-outlier, incident {incident}");
                self.request(now, Remedy::Cordon { node: first, host, why }, out);
            }
        }
    }

    /// Excludes a machine that is still used after a person approved its cordon.
    pub(super) fn without_marked(&mut self, request: &Request, out: &mut Output) {
        let Remedy::Cordon { node, why, .. } = &request.remedy else { return };
        let Some(life) = self.life(node).filter(|_| matches!(request.stage, Stage::Due { .. })) else { return };
        if self.record.machines.exclusion(node, life).is_some() {
            return;
        }
        let verdict = Verdict { line: why.clone(), ..Table::built_in().named("machine-outlier") };
        self.do_without(node, life, verdict, self.record.incidents, false, out);
        if let Some(of) = self.record.machines.exclusion_mut(node, life) {
            // The approved request is the cordon.
            of.told_of = true;
        }
    }
}
