//! Runs the detector beside the coordinator, in a thread that receives samples and returns
//! findings. Nothing waits for it: if it cannot keep up, samples are dropped and count as missing.

use super::{Driver, Input};
use crate::detect::settings::Ready;
use crate::detect::{alarm_chart, packing};
use everstep_core::coordinator::event::Event;
use everstep_core::coordinator::finding::Finding;
use everstep_core::coordinator::job::Phase;
use everstep_core::id::{Generation, JobId, NodeId, Session};
use everstep_detector::alarms::Alarm;
use everstep_detector::catalogue::KNOWN;
use everstep_detector::watch::{Watch, Which};
use everstep_detector::{Verdict, group_numbers};
use everstep_wire::envelope::ToAgent;
use everstep_wire::private::{Directory, Root};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Samples that may wait: a few seconds' worth of a thousand machines.
const WAITING: usize = 8192;
/// How often the detector advances if no samples arrive.
const PULSE: Duration = Duration::from_millis(250);
/// A job without samples for this long is over.
const OVER: Duration = Duration::from_mins(2);

/// One second of one machine's samples, as received.
struct Received {
    job: JobId,
    generation: Generation,
    /// All nodes of the world, with their failure domains; only the first time and after changes.
    world: Option<Vec<(NodeId, String)>>,
    node: NodeId,
    role: u32,
    sent_ms: u64,
    received_ms: u64,
    samples: Vec<(u8, f32)>,
}

/// The coordinator's side of the detector.
pub(super) struct Watcher {
    to: Option<SyncSender<Received>>,
    /// The worlds that were already sent to the thread.
    sent_worlds: BTreeMap<JobId, Generation>,
}

impl Watcher {
    /// Starts the detector's thread, which writes pictures into `pictures`.
    pub(super) fn start(detector: Ready, pictures: PathBuf, inbox: mpsc::UnboundedSender<Input>) -> Watcher {
        let which = match detector {
            Ready::Off => None,
            Ready::Robust(settings) => Some(Which::Robust(settings)),
            Ready::LstmVae(models) => Some(Which::LstmVae(models)),
        };
        let to = which.and_then(|which| {
            let (to, from) = sync_channel(WAITING);
            let work = move || watch(&which, &pictures, &from, &inbox);
            std::thread::Builder::new().name("everstep-detect".into()).spawn(work).ok().map(|_| to)
        });
        Watcher { to, sent_worlds: BTreeMap::new() }
    }
}

struct Watched {
    generation: Generation,
    nodes: Vec<NodeId>,
    watch: Watch,
    last_received: Instant,
}

fn watch(which: &Which, pictures: &Path, from: &Receiver<Received>, inbox: &mpsc::UnboundedSender<Input>) {
    let mut jobs: BTreeMap<JobId, Watched> = BTreeMap::new();
    let mut looked = Instant::now();
    loop {
        match from.recv_timeout(PULSE) {
            Ok(received) => take(&mut jobs, which, received),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if looked.elapsed() < PULSE {
            continue;
        }
        looked = Instant::now();
        jobs.retain(|_, of| of.last_received.elapsed() < OVER);
        for (job, of) in &mut jobs {
            let Some(verdict) = of.watch.advance(crate::paths::unix_millis()) else { continue };
            let mut finding = found(of, &verdict);
            finding.picture = drawn(pictures, job, of, verdict).unwrap_or_default();
            if inbox.send(Input::Unlike(job.clone(), of.generation, finding)).is_err() {
                return;
            }
        }
    }
}

fn take(jobs: &mut BTreeMap<JobId, Watched>, which: &Which, received: Received) {
    if let Some(world) = received.world {
        let domains = group_numbers(world.iter().map(|(_, domain)| domain));
        // If no node names a domain, there are none.
        let domains = if world.iter().all(|(_, d)| d.is_empty()) { Vec::new() } else { domains };
        let nodes: Vec<NodeId> = world.into_iter().map(|(node, _)| node).collect();
        let watch = Watch::new(nodes.len(), &domains, which);
        let new = Watched { generation: received.generation, nodes, watch, last_received: Instant::now() };
        jobs.insert(received.job.clone(), new);
    }
    let Some(of) = jobs.get_mut(&received.job).filter(|of| of.generation == received.generation) else { return };
    of.last_received = Instant::now();
    if let Some(machine) = of.nodes.iter().position(|n| *n == received.node) {
        let samples = received.samples.into_iter().map(|(metric, value)| (metric.into(), value));
        of.watch.set_role(machine, received.role);
        of.watch.put(machine, received.sent_ms, received.received_ms, samples);
    }
}

fn found(of: &Watched, verdict: &Verdict) -> Finding {
    let name = |m: &usize| KNOWN.get(*m).map_or(String::new(), |k| k.name.clone());
    Finding {
        nodes: verdict.machines.iter().filter_map(|m| of.nodes.get(*m).cloned()).collect(),
        metrics: verdict.metrics.iter().map(name).collect(),
        score: if verdict.score.is_finite() { (verdict.score * 100.0) as u64 } else { 0 },
        group: verdict.group,
        sure: of.watch.is_sure(verdict),
        picture: String::new(),
    }
}

/// Draws the first reported machine against the others, and returns the picture's path.
fn drawn(pictures: &Path, job: &JobId, of: &Watched, verdict: Verdict) -> Option<String> {
    let series = of.watch.series();
    let name = of.nodes.get(*verdict.machines.first()?)?;
    let at = series.seconds().checked_sub(1)?;
    let text =
        alarm_chart::named(&series, &Alarm { verdict: Verdict { at, ..verdict }, until: at }, &format!("node {name}"));
    let name = format!("{}-{}.svg", job.0.replace('/', "-"), crate::paths::unix_millis());
    Directory::root(pictures, Root::Named).ok()?.write_whole(&name, text.as_bytes()).ok()?;
    Some(pictures.join(name).display().to_string())
}

impl Driver {
    /// Passes one second of a machine's samples to the detector.
    pub(super) fn sampled(&mut self, session: Session, sent_ms: u64, role: u32, packed: &str) {
        let Some(peer) = self.peers.get_mut(&session) else { return };
        peer.role = if role == 0 { peer.role } else { role };
        let role = peer.role;
        let Some(to) = &self.watcher.to else { return };
        let Some((job, node, _)) = peer.owner.clone() else { return };
        let id = JobId(job);
        let Some(job) = self.core.jobs().get(&id) else { return };
        // A node outside the world does nothing that could be compared.
        if !matches!(job.phase(), Phase::Training { .. }) || job.record().world.slot(&node).is_none() {
            return;
        }
        let generation = job.record().generation;
        let known = self.watcher.sent_worlds.get(&id) == Some(&generation);
        let domain = |node: &NodeId| job.nodes().get(node).map_or_else(String::new, |n| n.hello.domain.clone());
        let world = || job.record().world.slots.iter().map(|s| (s.node.clone(), domain(&s.node))).collect();
        let received = Received {
            generation,
            world: (!known).then(world),
            node,
            role,
            sent_ms,
            received_ms: crate::paths::unix_millis(),
            samples: packing::unpacked(packed),
            job: id.clone(),
        };
        if to.try_send(received).is_ok() {
            self.watcher.sent_worlds.insert(id, generation);
        }
    }

    /// Handles a finding of the detector.
    pub(super) fn unlike(&mut self, job: JobId, generation: Generation, finding: Finding) {
        if self.core.jobs().get(&job).is_none_or(|j| j.record().generation != generation) {
            return;
        }
        if finding.needs_a_burst() {
            let of_job = self.peers.values().filter(|p| p.job.as_deref() == Some(job.0.as_str()));
            of_job.for_each(|p| drop(p.orders.send(ToAgent::Burst)));
        }
        self.event(Event::Unlike { job, finding });
    }
}
