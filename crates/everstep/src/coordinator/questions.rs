//! Users' requests to a coordinator: the state of its jobs, stacks, approvals, and faults to
//! inject.

use super::{Driver, Input};
use crate::metrics::Live;
use everstep_core::coordinator::command::Fact;
use everstep_core::coordinator::event::Event;
use everstep_core::coordinator::job::{Job, Node, NodeState, Phase};
use everstep_core::coordinator::request::{NotProvisioned, Request};
use everstep_core::id::{JobId, NodeId, Rank, Step};
use everstep_core::injection::Injection;
use everstep_core::message::Hello;
use everstep_core::progress::RankProgress;
use everstep_wire::envelope::ToAgent;
use everstep_wire::output::{CoordinatorStatus, FIRST, JobStatus, NodeStatus, Phase as PhaseName, RequestStatus};
use everstep_wire::server::{ApproveError, InjectError};

/// Returns the newest step that all nodes have in memory, with its copies. A single node has no
/// copies elsewhere.
fn replicated(job: &Job) -> Option<Step> {
    job.replicas().committed().filter(|_| job.record().world.slots.len() > 1)
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
            let result = result.map_err(|e| NotProvisioned(e.to_string()));
            let _ = inbox.send(Input::Provisioned(job, request.id, result));
        });
    }

    /// Approves a request, and returns its description.
    pub(super) fn approve(&mut self, job: JobId, id: u64) -> Result<String, ApproveError> {
        let known = self.core.jobs().get(&job).ok_or_else(|| ApproveError::UnknownJob { job: job.to_string() })?;
        let what = known.may_approve(id)?;
        self.event(Event::Approved { job, id });
        Ok(what)
    }

    /// Injects a fault into the node of a rank, and returns the node.
    pub(super) fn inject(&mut self, id: &JobId, injection: Injection) -> Result<NodeId, InjectError> {
        let job = self.core.jobs().get(id).ok_or_else(|| InjectError::UnknownJob { job: id.to_string() })?;
        let training = matches!(job.phase(), Phase::Training { .. });
        let slot = job.record().world.slot_of(Rank(injection.rank)).filter(|_| training);
        let slot = slot.ok_or_else(|| InjectError::NoRank { job: id.to_string(), rank: injection.rank })?;
        let node = slot.node.clone();
        let peer = job.nodes().get(&node).and_then(|n| self.peers.get(&n.session?));
        let peer = peer.ok_or_else(|| InjectError::NotAttached { node: node.clone() })?;
        let _ = peer.orders.send(ToAgent::Inject(injection));
        self.write(&id.0, Fact::Injected { node: node.clone(), injection });
        Ok(node)
    }

    /// Returns the current values for the metrics.
    pub(super) fn live(&self) -> Vec<Live> {
        self.core.jobs().iter().map(|(id, job)| self.live_job(id, job)).collect()
    }

    fn live_job(&self, id: &JobId, job: &Job) -> Live {
        let training = matches!(job.phase(), Phase::Training { .. });
        let active = if training { job.record().world.size() } else { 0 };
        let node = |(id, n): (&NodeId, &Node)| {
            let silence =
                n.session.and_then(|s| self.keep_alive.silence(self.now(), s)).unwrap_or_default().as_secs_f64();
            (id.0.clone(), (job.state_of(n), silence), n.hello.workers)
        };
        let nodes: Vec<_> = job.nodes().iter().map(node).collect();
        let ranks = |of: NodeState| {
            nodes.iter().filter(|(_, (state, _), _)| *state == of).map(|(.., workers)| workers).sum::<u32>()
        };
        let each = nodes.first().map_or(1, |(.., workers)| *workers);
        Live {
            job: id.0.clone(),
            step: job.progress().completed_by_all(job.record().world.size()).map(|s| s.0),
            step_us: job.progress().median_step_us(),
            world: [
                ("active", active),
                ("waiting", ranks(NodeState::Waiting)),
                ("spare", ranks(NodeState::Spare)),
                ("target", job.record().spec.nodes_max * each),
            ],
            checkpoints: [("durable", job.record().durable.map(|s| s.0)), ("peer", replicated(job).map(|s| s.0))],
            restarts: job.record().restarts(),
            nodes: nodes.iter().map(|(id, (state, silence), _)| (id.clone(), (state.name(), *silence))).collect(),
        }
    }

    /// Returns the state of all jobs.
    pub(super) fn status(&self) -> CoordinatorStatus {
        let jobs = self.core.jobs().iter().map(|(id, job)| self.job_status(id, job)).collect();
        let (epoch, pid, endpoint) = (self.epoch, std::process::id(), self.endpoint.clone());
        CoordinatorStatus { version: FIRST, epoch, pid, endpoint, jobs }
    }

    fn job_status(&self, id: &JobId, job: &Job) -> JobStatus {
        let record = job.record();
        let mut workers: Vec<RankProgress> = job.progress().ranks().cloned().collect();
        workers.sort_by_key(|w| w.rank);
        let request =
            |r: &Request| RequestStatus { id: r.id, what: r.remedy.to_string(), stage: r.stage.name().to_owned() };
        JobStatus {
            job: id.clone(),
            phase: match job.phase() {
                Phase::Forming { .. } => PhaseName::Forming,
                Phase::Training { .. } => PhaseName::Training,
                Phase::Stopping { .. } => PhaseName::Stopping,
                Phase::Over { .. } => PhaseName::Over,
            },
            reason: job.reason().clone(),
            why: job.reason().sentence(),
            generation: record.generation,
            world_size: record.world.size(),
            restarts: record.restarts(),
            max_restarts: record.max_restarts(),
            durable_step: record.durable,
            replicated_step: replicated(job),
            slow: job.progress().slow().slow().clone(),
            sub_healthy: job.progress().slow().slightly_slow(),
            nodes: job.nodes().iter().map(|(_, n)| self.node_status(job, n)).collect(),
            workers,
            requests: record.machines.requests().iter().map(request).collect(),
        }
    }

    fn node_status(&self, job: &Job, n: &Node) -> NodeStatus {
        let Hello { node, host, incarnation, replica_port, .. } = &n.hello;
        // A node that is used for lack of others is not excluded.
        let unused = job.record().world.slot(node).is_none();
        let exclusion = job.record().machines.exclusion(node, *incarnation).filter(|_| unused);
        let role = n.session.and_then(|s| self.peers.get(&s)).map(|p| p.role);
        NodeStatus {
            node: node.clone(),
            host: host.clone(),
            attached: n.session.is_some(),
            excluded: exclusion.map(|e| e.class.clone()),
            role: role.filter(|r| *r != 0),
            replicas: (*replica_port != 0).then(|| format!("{host}:{replica_port}")),
        }
    }
}
