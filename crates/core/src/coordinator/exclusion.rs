//! Excluded nodes, and the choice of the nodes that a job uses.

use super::command::{Command, Fact};
use super::state::{Job, JobRecord};
use crate::id::{Incarnation, NodeId};
use crate::message::{Hello, Order};
use crate::severity::Verdict;
use serde::{Deserialize, Serialize};

/// A node that the job excludes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exclusion {
    /// The node.
    pub node: NodeId,
    /// This life of its agent. A later life means that the machine has been looked after.
    pub incarnation: Incarnation,
    /// The class of its failure.
    pub class: String,
    /// The incident that led to it.
    pub incident: u64,
    /// Whether it is excluded only if another node can replace it.
    pub if_replaced: bool,
    /// It was used anyway, for lack of others, and failed again: the job now waits for another
    /// node.
    #[serde(default)]
    pub barred: bool,
    /// Whether a cordon was requested, as far as the policy allows.
    #[serde(default)]
    pub told_of: bool,
}

impl JobRecord {
    /// Returns why the job excludes this life of a node, if it does.
    #[must_use]
    pub fn exclusion(&self, node: &NodeId, life: Incarnation) -> Option<&Exclusion> {
        self.excluded.iter().find(|e| e.node == *node && e.incarnation == life)
    }
}

impl Job {
    /// Returns whether the job excludes this life of a node, even if no other node can replace it.
    #[must_use]
    pub fn is_excluded(&self, node: &NodeId, life: Incarnation) -> bool {
        self.record.exclusion(node, life).is_some_and(|e| !e.if_replaced)
    }

    /// Returns whether this life of a node is never used.
    pub(super) fn is_barred(&self, node: &NodeId, life: Incarnation) -> bool {
        self.record.exclusion(node, life).is_some_and(|e| e.barred)
    }

    /// Returns the given nodes without the excluded ones, as far as there are enough others.
    pub(super) fn fit<'h>(&self, able: Vec<&'h Hello>) -> Vec<&'h Hello> {
        let spec = &self.record.spec;
        let usable = |n: usize| n.min(spec.nodes_max as usize) / spec.node_unit as usize * spec.node_unit as usize;
        let without = |only_firm: bool| -> Vec<&'h Hello> {
            let out = |h: &Hello| {
                self.record.exclusion(&h.node, h.incarnation).is_some_and(|e| !(only_firm && e.if_replaced))
            };
            able.iter().copied().filter(|h| !out(h)).collect()
        };
        let well = without(false);
        if usable(well.len()) >= usable(able.len()) {
            return well;
        }
        let well = without(true);
        if usable(well.len()) >= spec.nodes_min as usize && usable(well.len()) > 0 {
            return well;
        }
        // Use excluded nodes once more, for lack of others: their problems may have passed.
        able.into_iter().filter(|h| !self.is_barred(&h.node, h.incarnation)).collect()
    }

    /// Returns which attached nodes are never used, and why, as the rest of a sentence.
    pub(super) fn barred_for_people(&self) -> String {
        let attached = |e: &&Exclusion| e.barred && self.nodes.contains_key(&e.node);
        let each: Vec<String> =
            self.record.excluded.iter().filter(attached).map(|e| format!("node {} ({})", e.node, e.class)).collect();
        if each.is_empty() {
            String::new()
        } else {
            format!("; not used, because of failures of the machine: {}", each.join(", "))
        }
    }

    /// Excludes this life of a node from now on. If the node was used anyway, for lack of others,
    /// and failed again in another incident, it is never used again.
    pub(super) fn do_without(
        &mut self,
        (node, life): (&NodeId, Incarnation),
        verdict: Verdict,
        incident: u64,
        if_replaced: bool,
        out: &mut Vec<Command>,
    ) {
        let known = |e: &&mut Exclusion| e.node == *node && e.incarnation == life && (if_replaced || !e.if_replaced);
        if let Some(before) = self.record.excluded.iter_mut().find(known) {
            // Further failures of the same incident do not count.
            if !if_replaced && !before.barred && before.incident < incident {
                before.barred = true;
                self.changed(false);
            }
            return;
        }
        // Earlier lives of the node are over.
        self.record.excluded.retain(|e| e.node != *node);
        self.record.excluded.push(Exclusion {
            node: node.clone(),
            incarnation: life,
            class: verdict.class.clone(),
            incident,
            if_replaced,
            barred: false,
            told_of: false,
        });
        self.changed(false);
        let what = format!(
            "node {node} is left out from now on, as long as enough others are there ({}: {}{}); start its agent anew when that is mended",
            verdict.class,
            verdict.what,
            if verdict.line.is_empty() { String::new() } else { format!(": {}", verdict.line) }
        );
        let own = self.nodes.get(node).and_then(|n| n.session);
        let told = self.leader().into_iter().chain(own.filter(|s| Some(*s) != self.leader()));
        let notices =
            told.map(|session| Command::Send { session, order: Order::Notice { what: what.clone() }, after: None });
        out.extend(notices);
        let fact = Fact::Excluded { incident, node: node.clone(), verdict };
        out.push(Command::Record { job: self.record.spec.job.clone(), fact });
    }
}
