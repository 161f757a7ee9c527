//! What people ask of a coordinator: how its jobs are, where their workers are, to break something.

use super::Driver;
use everstep_core::coordinator::state::{Node, Phase};
use everstep_core::id::{JobId, Rank};
use everstep_wire::envelope::{Injection, Progress, ToAgent};
use serde_json::json;

impl Driver {
    /// Asks all nodes of a job where their workers are; false where there is no such job. The answers are written down.
    pub(super) fn ask_for_stacks(&self, job: &str) -> bool {
        let of_job: Vec<_> = self.peers.values().filter(|p| p.job.as_deref() == Some(job)).collect();
        of_job.iter().for_each(|p| drop(p.orders.send(ToAgent::Stacks)));
        !of_job.is_empty()
    }

    /// Has something broken on the node that a rank is on; which one that is.
    pub(super) fn inject(&mut self, id: &JobId, injection: Injection) -> Result<String, String> {
        let job = self.core.jobs().get(id).ok_or_else(|| format!("no job {id} here"))?;
        let training = matches!(job.phase, Phase::Training { .. });
        let slot = job.record.world.slot_of(Rank(injection.rank)).filter(|_| training);
        let slot = slot.ok_or_else(|| format!("no rank {} trains in job {id} now", injection.rank))?;
        let node = slot.node.clone();
        let peer = job.nodes.get(&node).and_then(|n| self.peers.get(&n.session?));
        let peer = peer.ok_or_else(|| format!("node {node} is not attached"))?;
        let _ = peer.orders.send(ToAgent::Inject(injection));
        self.write(&id.0, &json!({"Injected": {"node": node, "injection": injection}}));
        Ok(node.0)
    }

    /// As `everstep status --json` prints it.
    pub(super) fn status(&self) -> serde_json::Value {
        let jobs: Vec<_> = self
            .core
            .jobs()
            .iter()
            .map(|(id, job)| {
                let phase = match &job.phase {
                    Phase::Forming { .. } => "forming",
                    Phase::Training { .. } => "training",
                    Phase::Stopping { .. } => "stopping",
                    Phase::Over { .. } => "over",
                };
                let mut workers: Vec<&Progress> = self.workers(id).collect();
                workers.sort_by_key(|w| w.rank);
                let left_out = |n: &Node| {
                    let of = job.record.exclusion(&n.hello.node, n.hello.incarnation);
                    // Used all the same, for lack of others, it is not left out.
                    of.filter(|_| job.record.world.slot(&n.hello.node).is_none()).map(|e| e.class.clone())
                };
                let nodes: Vec<_> = job.nodes.values().map(|n| json!({"node": n.hello.node, "host": n.hello.host, "attached": n.session.is_some(), "left_out": left_out(n), "replicas": (n.hello.replica_port != 0).then(|| format!("{}:{}", n.hello.host, n.hello.replica_port))})).collect();
                json!({
                    "job": id, "phase": phase, "reason": job.reason, "generation": job.record.generation,
                    "world_size": job.record.world.size(), "restarts": job.record.restarts, "max_restarts": job.max_restarts(),
                    "durable_step": job.record.durable, "replicated_step": job.replication.committed, "slow": self.paces.get(id).map(|p| p.slow.slow()), "nodes": nodes, "workers": workers,
                })
            })
            .collect();
        json!({"version": 1, "epoch": self.epoch, "pid": std::process::id(), "endpoint": self.endpoint, "jobs": jobs})
    }
}
