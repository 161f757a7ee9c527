//! Users' requests to a coordinator: the state of its jobs, stacks, approvals, and faults to
//! inject.

use super::{Driver, Input};
use crate::metrics::Live;
use everstep_core::coordinator::event::Event;
use everstep_core::coordinator::remedy::Request;
use everstep_core::coordinator::state::{Job, Node, Phase};
use everstep_core::id::{JobId, NodeId, Rank, Step};
use everstep_core::progress::RankProgress;
use everstep_wire::envelope::{Injection, ToAgent};
use serde_json::json;

/// Returns the newest step that all nodes have in memory, with its copies. A single node has no
/// copies elsewhere.
fn replicated(job: &Job) -> Option<Step> {
    job.replication.committed.filter(|_| job.record.world.slots.len() > 1)
}

impl Driver {
    /// Requests the stacks of a job's workers from all its nodes. The answers are recorded later.
    /// Returns false if no node of such a job is attached.
    pub(super) fn ask_for_stacks(&self, job: &str) -> bool {
        let of_job: Vec<_> = self.peers.values().filter(|p| p.job.as_deref() == Some(job)).collect();
        of_job.iter().for_each(|p| drop(p.orders.send(ToAgent::Stacks)));
        !of_job.is_empty()
    }

    /// Carries out a request about a machine, in the background.
    pub(super) fn provision(&self, job: JobId, request: Request) {
        let (program, inbox) = (self.provisioner.clone(), self.inbox.clone());
        tokio::spawn(async move {
            let result = crate::provisioner::carry_out(program.as_deref(), &job, &request).await;
            let _ = inbox.send(Input::Provisioned(job, request.id, result));
        });
    }

    /// Approves a request, and returns its description.
    pub(super) fn approve(&mut self, job: JobId, id: u64) -> Result<String, String> {
        let known = self.core.jobs().get(&job).ok_or_else(|| format!("no job {job} here"))?;
        let what = known.may_approve(id)?;
        self.event(Event::Approved { job, id });
        Ok(what)
    }

    /// Injects a fault into the node of a rank, and returns the node.
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

    /// Returns the current values for the metrics.
    pub(super) fn live(&self) -> Vec<Live> {
        self.core.jobs().iter().map(|(id, job)| self.live_job(id, job)).collect()
    }

    fn live_job(&self, id: &JobId, job: &Job) -> Live {
        let training = matches!(job.phase, Phase::Training { .. });
        let active = if training { job.record.world.size() } else { 0 };
        let node = |(id, n): (&NodeId, &Node)| {
            let excluded = job.record.exclusion(id, n.hello.incarnation).is_some();
            let state = match job.record.world.slot(id) {
                _ if n.session.is_none() => "lost",
                Some(_) if training => "active",
                None if excluded => "left-out",
                _ => "spare",
            };
            let silence =
                n.session.and_then(|s| self.keep_alive.silence(self.now(), s)).unwrap_or_default().as_secs_f64();
            (id.0.clone(), (state, silence), n.hello.workers)
        };
        let nodes: Vec<_> = job.nodes.iter().map(node).collect();
        let spare = nodes.iter().filter(|(_, (state, _), _)| *state == "spare").map(|(.., workers)| workers).sum();
        let each = nodes.first().map_or(1, |(.., workers)| *workers);
        Live {
            job: id.0.clone(),
            step: job.progress.completed_by_all(job.record.world.size()).map(|s| s.0),
            step_us: job.progress.median_step_us(),
            world: [("active", active), ("spare", spare), ("target", job.record.spec.nodes_max * each)],
            checkpoints: [("durable", job.record.durable.map(|s| s.0)), ("peer", replicated(job).map(|s| s.0))],
            restarts: job.record.restarts,
            nodes: nodes.into_iter().map(|(id, state, _)| (id, state)).collect(),
        }
    }

    /// Returns the status that `everstep status --json` prints.
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
                let mut workers: Vec<&RankProgress> = job.progress.ranks().collect();
                workers.sort_by_key(|w| w.rank);
                let left_out = |n: &Node| {
                    let of = job.record.exclusion(&n.hello.node, n.hello.incarnation);
                    // A node that is used for lack of others is not excluded.
                    of.filter(|_| job.record.world.slot(&n.hello.node).is_none()).map(|e| e.class.clone())
                };
                let role = |n: &Node| n.session.and_then(|s| self.peers.get(&s)).map(|p| p.role).filter(|r| *r != 0);
                let nodes: Vec<_> = job.nodes.values().map(|n| json!({"node": n.hello.node, "host": n.hello.host, "attached": n.session.is_some(), "left_out": left_out(n), "role": role(n), "replicas": (n.hello.replica_port != 0).then(|| format!("{}:{}", n.hello.host, n.hello.replica_port))})).collect();
                let requests: Vec<_> = job.record.requests.iter().map(|r| json!({"id": r.id, "what": r.remedy.to_string(), "stage": r.stage.name()})).collect();
                json!({
                    "requests": requests,
                    "job": id, "phase": phase, "reason": job.reason, "why": job.reason.sentence(), "generation": job.record.generation,
                    "world_size": job.record.world.size(), "restarts": job.record.restarts, "max_restarts": job.max_restarts(),
                    "durable_step": job.record.durable, "replicated_step": replicated(job), "slow": job.progress.slow().slow(), "sub_healthy": job.progress.slow().sub_healthy(), "nodes": nodes, "workers": workers,
                })
            })
            .collect();
        json!({"version": 1, "epoch": self.epoch, "pid": std::process::id(), "endpoint": self.endpoint, "jobs": jobs})
    }
}
