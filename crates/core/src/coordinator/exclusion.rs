//! Excludes nodes from a job.

use super::command::Fact;
use super::job::{Exclusion, Job};
use super::output::Output;
use crate::id::{Incarnation, NodeId};
use crate::message::Order;
use crate::severity::Verdict;

impl Job {
    /// Returns which attached nodes are never used, and why, as the rest of a sentence.
    pub(super) fn barred_for_people(&self) -> String {
        let attached = |e: &&Exclusion| e.barred && self.nodes.contains(&e.node);
        let each: Vec<String> = self
            .record
            .machines
            .excluded()
            .iter()
            .filter(attached)
            .map(|e| format!("node {} ({})", e.node, e.class))
            .collect();
        if each.is_empty() {
            String::new()
        } else {
            format!("; excluded because of machine failures: {}", each.join(", "))
        }
    }

    /// Excludes this life of a node from now on. If the node was used anyway, for lack of others,
    /// and failed again in another incident, it is never used again.
    pub(super) fn do_without(
        &mut self,
        node: &NodeId,
        life: Incarnation,
        verdict: Verdict,
        incident: u64,
        if_replaced: bool,
        out: &mut Output,
    ) {
        let known = |e: &&mut Exclusion| e.node == *node && e.incarnation == life && (if_replaced || !e.if_replaced);
        if let Some(before) = self.record.machines.excluded_mut().iter_mut().find(known) {
            // Further failures of the same incident do not count.
            if !if_replaced && !before.barred && before.incident < incident {
                before.barred = true;
                self.changed(false);
            }
            return;
        }
        self.record.machines.exclude(Exclusion {
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
            "node {node} is excluded from now on, as long as there are enough other nodes ({}: {}{}); once it is \
             repaired, restart its agent",
            verdict.class,
            verdict.what,
            if verdict.line.is_empty() { String::new() } else { format!(": {}", verdict.line) }
        );
        let own = self.nodes.session(node);
        let told = self.leader().into_iter().chain(own.filter(|s| Some(*s) != self.leader()));
        out.send_each(told, &Order::Notice { what });
        let fact = Fact::Excluded { incident, node: node.clone(), verdict };
        out.record(fact);
    }
}
