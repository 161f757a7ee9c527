//! Frames, messages of workers, and lines between agents and the coordinator.

use crate::Seeds;
use everstep_core::failure::{Cause, Failure, Outcome};
use everstep_core::id::{Epoch, Generation, Incarnation, JobId, NodeId, Rank, RunId, Step};
use everstep_core::injection::{Injected, Injection};
use everstep_core::ledger::{Account, Category, Spent};
use everstep_core::message::{
    Copies, CrewOrder, CrewReport, ExitReason, Hello, Holding, Holdings, Keeper, Offer, Offers, Order, Place, Purpose,
    RankOffers, Redundancy, Replication, Report, Restore, Round, ShardFile, ShardWritten, Slot, SnapshotInterval,
    Source, Start, Tier, Unreadable, World,
};
use everstep_core::progress::RankProgress;
use everstep_core::severity::Table;
use everstep_core::spec::{CheckWhen, JobSpec, Policy, RestartBudget};
use everstep_wire::envelope::{ToAgent, ToCoordinator, VERSION, encode};
use everstep_wire::frame;
use everstep_wire::limits::FRAME_BYTES_MAX;
use everstep_wire::raw::Raw;
use everstep_wire::worker::{Ask, Persist, Reply, Request, WorkerId};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;

const GENERATION: Generation = Generation(3);
const WORKER: WorkerId = WorkerId { generation: GENERATION, rank: Rank(9), local_rank: 1 };

/// Returns streams of frames, each behind the length of its pieces.
pub fn frames() -> io::Result<Seeds> {
    let stream = |cut: u8, frames: &[Vec<u8>]| [[cut].as_slice(), &frames.concat()].concat();
    let due = frame::encode(&Request { from: WORKER, ask: Ask::PersistDue })?;
    let done = frame::encode(&Reply::Done)?;
    let environment = frame::encode(&vec![Raw::from("PATH=/bin"), Raw(OsString::from_vec(b"NAME=\xff".to_vec()))])?;
    let long = u32::try_from(FRAME_BYTES_MAX).map_err(io::Error::other)? + 1;
    Ok(vec![
        ("two-at-once", stream(255, &[due.clone(), done.clone()])),
        ("byte-by-byte", stream(0, &[done.clone(), due.clone()])),
        ("not-text", stream(15, &[environment])),
        ("cut-short", stream(7, &[done, due[..due.len() - 1].to_vec()])),
        ("too-long", stream(7, &[long.to_le_bytes().to_vec(), due])),
    ])
}

/// Returns requests of workers and replies of agents, as JSON.
pub fn worker_messages() -> serde_json::Result<Seeds> {
    let requests = requests().into_iter().map(|(name, request)| Ok((name, serde_json::to_vec(&request)?)));
    let replies = [
        ("done", Reply::Done),
        ("owned", Reply::Owned { epoch: 2 }),
        ("slots", Reply::Slots { paths: vec!["/dev/shm/everstep-0/slot".into()], warning: Some("on disk".into()) }),
        (
            "step",
            Reply::Restore {
                step: Some(Step(7)),
                tier: Some(Tier::Peer),
                path: Some("/dev/shm/slot".into()),
                found: false,
            },
        ),
        ("refused", Reply::Refused { why: "no memory is left".into() }),
    ];
    let replies = replies.into_iter().map(|(name, reply)| Ok((name, serde_json::to_vec(&reply)?)));
    requests.chain(replies).collect()
}

/// Returns a request of each kind.
fn requests() -> Vec<(&'static str, Request)> {
    let asks = [
        ("reserve", Ask::Reserve { slot_bytes: 4096, slots: 3 }),
        ("restore", Ask::Restore(offers())),
        ("heal", Ask::Heal { path: "/dev/shm/slot".into(), chunks: vec![0, 5] }),
        ("restore-failed", Ask::RestoreFailed(Unreadable { step: Step(7), tier: Tier::Memory })),
        (
            "replicas",
            Ask::Replicas { run: RunId(1).to_string(), wish: Redundancy { replicas: 2, data: 4, shared: false } },
        ),
        ("await-durable", Ask::AwaitDurable(Step(7))),
        (
            "persist",
            Ask::Persist(Persist {
                directory: "/checkpoints".into(),
                run: RunId(1),
                keep: 3,
                keep_every: 3600,
                keep_epochs: true,
                bandwidth: 0,
                exactly: false,
            }),
        ),
        ("persist-due", Ask::PersistDue),
        ("snapshot-every", Ask::SnapshotEvery(SnapshotInterval(10))),
        (
            "error",
            Ask::Error {
                message: "ValueError: \"é\"".into(),
                uncaught: Some("Traceback (most recent call last):\n".into()),
            },
        ),
    ];
    asks.into_iter().map(|(name, ask)| (name, Request { from: WORKER, ask })).collect()
}

fn offers() -> Offers {
    let offer = |step, tier| Offer { step: Step(step), tier, generation: GENERATION };
    Offers {
        held: vec![offer(7, Tier::Memory), offer(5, Tier::Durable)],
        shared: false,
        wanted: Some(Step(5)),
        found: false,
    }
}

/// Returns streams of lines: with checksums, and one message of each kind without.
pub fn lines() -> serde_json::Result<Seeds> {
    let (reports, orders) = (to_coordinator(), to_agent());
    let mut seeds = vec![
        ("agent", stream(reports.iter().map(|(_, message)| message))?),
        ("coordinator", stream(orders.iter().map(|(_, message)| message))?),
        ("old-agent", line(&hello(VERSION - 1))?),
    ];
    for (name, message) in &reports {
        seeds.push((*name, line(message)?));
    }
    for (name, message) in &orders {
        seeds.push((*name, line(message)?));
    }
    Ok(seeds)
}

/// Returns the first messages of an iterator as lines with their checksums.
fn stream<'m, T: Serialize + 'm>(messages: impl Iterator<Item = &'m T>) -> serde_json::Result<Vec<u8>> {
    messages.take(3).try_fold(Vec::new(), |stream, message| Ok([stream, encode(message)?].concat()))
}

/// Returns a message as a line without its checksum.
fn line(message: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    Ok([serde_json::to_vec(message)?.as_slice(), b"\n"].concat())
}

fn hello(version: u32) -> ToCoordinator {
    let spec = JobSpec {
        job: JobId("job".into()),
        nodes_min: 1,
        nodes_max: 2,
        node_unit: 1,
        spares: 0,
        restarts: RestartBudget::Exactly(3),
        detect_timeout_ms: 2000,
        join_timeout_ms: 600_000,
        policy: Policy::Observe,
        check: CheckWhen::OnTrouble,
    };
    let hello = Hello {
        node: NodeId("0".into()),
        incarnation: Incarnation(1),
        spec,
        host: "10.0.0.1".into(),
        workers: 2,
        store_port: 4000,
        replica_port: 0,
        domain: String::new(),
        role: "default".into(),
        seen: GENERATION,
        began: None,
        running: None,
        stop: None,
        shutdown_grace_ms: 30_000,
    };
    ToCoordinator::Hello { version, hello: Box::new(hello) }
}

/// Returns the greeting of an agent for this version, as the first line of its stream.
pub fn greeting() -> ToCoordinator {
    hello(VERSION)
}

fn to_coordinator() -> Vec<(&'static str, ToCoordinator)> {
    let (generation, rank, step) = (GENERATION, Rank(1), Step(7));
    let cause = Cause::Exited(Outcome::Code(1));
    let message = "torch.OutOfMemoryError: CUDA out of memory.".to_owned();
    let verdict = Table::built_in().judge(&cause, &message);
    let failure = Failure {
        rank,
        local_rank: 1,
        pid: 42,
        cause,
        message,
        step: Some(step),
        total: None,
        passes: 0,
        progressed: true,
        verdict,
    };
    let holding = Holding { step, generation, rank, world_size: 2, shared: false };
    let shard = ShardFile {
        rank,
        file: "rank-1.safetensors".into(),
        bytes: 4096,
        crc: format!("{:016x}", 1),
        purpose: Purpose::Recovery,
        objects: BTreeSet::new(),
    };
    let mut spent = Spent::default();
    spent.put(Category::Productive, 1_000_000);
    let progress = RankProgress { rank: 1, pid: 42, step: Some(7), doing: "step".into(), ..RankProgress::default() };
    let report = ToCoordinator::Report;
    vec![
        ("hello", hello(VERSION)),
        ("failed", report(Report::Crew(generation, CrewReport::WorkerFailed(failure)))),
        ("ping", ToCoordinator::Ping { generation, ranks: vec![progress] }),
        ("refused", report(Report::Refused(ExitReason { code: 78, why: "the directory belongs to job one".into() }))),
        (
            "holds",
            report(Report::Crew(generation, CrewReport::Holds(Holdings { held: vec![holding], parity: Vec::new() }))),
        ),
        ("offers", report(Report::Crew(generation, CrewReport::Offers(RankOffers { rank, offers: offers() })))),
        (
            "written",
            report(Report::Crew(
                generation,
                CrewReport::ShardWritten(ShardWritten {
                    step,
                    captured: generation,
                    directory: "/checkpoints".into(),
                    shard,
                }),
            )),
        ),
        ("worker-stacks", ToCoordinator::Stacks { generation, stacks: BTreeMap::from([(1, vec!["a.py:3 f".into()])]) }),
        ("spent", ToCoordinator::Spent(vec![Account { generation, places: 2, spent, pending: 5, steps: None }])),
        ("samples", ToCoordinator::Samples { at: 1_700_000_000_000, role: 1, packed: "AQAAgD8".into() }),
        ("burst", ToCoordinator::Burst(vec![(1, 22, 333), (4, 55, 666)])),
    ]
}

fn to_agent() -> Vec<(&'static str, ToAgent)> {
    let (generation, epoch) = (GENERATION, Epoch(2));
    let order = |order| ToAgent::Order { epoch, order };
    let holding = Holding { step: Step(7), generation, rank: Rank(1), world_size: 2, shared: false };
    let copies = Copies { of: holding, holders: vec!["10.0.0.2:4001".into()] };
    let restore = Order::Crew(
        generation,
        CrewOrder::Restore(Restore {
            step: Some(Step(7)),
            sources: vec![Source { tier: Tier::Peer, copies: Some(copies), rebuild: None }],
            persist: false,
            best: Some(Step(8)),
            found: false,
        }),
    );
    let keeper = Keeper { node: NodeId("1".into()), address: "10.0.0.2:4001".into() };
    let plan = Replication { keepers: vec![keeper], keeps: vec![Rank(1)], ..Replication::default() };
    vec![
        ("welcome", order(Order::Welcome { epoch, began: Incarnation(1) })),
        (
            "start",
            order(Order::Crew(
                generation,
                CrewOrder::Start(Start { place: place(), began: Incarnation(1), restarts: 1, max_restarts: 10 }),
            )),
        ),
        ("restore-at", order(restore)),
        (
            "replicate",
            order(Order::Crew(
                generation,
                CrewOrder::Replicate { plan, round: Round { next: Step(8), round: 1 }, committed: Some(Step(7)) },
            )),
        ),
        ("end", order(Order::End(ExitReason { code: 1, why: "rank 1 failed".into() }))),
        ("inject", ToAgent::Inject(Injection { fault: Injected::Slow { percent: 50 }, rank: 1, milliseconds: 1000 })),
    ]
}

/// Returns the second node's place in a world of two.
fn place() -> Place {
    let slot = |node: u32| Slot {
        node: NodeId(node.to_string()),
        incarnation: Incarnation(1),
        first_rank: Rank(2 * node),
        workers: 2,
        host: format!("10.0.0.{}", node + 1),
        store_port: 4000,
        role: "default".into(),
    };
    let world = World { slots: vec![slot(0), slot(1)] };
    world.place(&NodeId("1".into()), world.size()).unwrap_or_else(|| panic!("the node is in the world"))
}
