//! How long a very large world takes to gather on a network of a given speed, and how much CPU time
//! the decisions cost.

use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::command::Command;
use everstep_core::coordinator::event::Event;
use everstep_core::id::{Epoch, Generation, Incarnation, JobId, NodeId, Session};
use everstep_core::message::{CrewOrder, Hello, Order};
use everstep_core::spec::{JobSpec, RestartBudget};
use everstep_core::time::Time;
use std::collections::BTreeSet;
use std::time::Duration;

/// The network and the store.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// The round-trip time.
    pub round_trip: Duration,
    /// The bandwidth of the coordinator's link in each direction.
    pub bits_per_second: u64,
    /// The time of one durable write.
    pub write: Duration,
}

/// The result.
#[derive(Clone, Copy, Debug)]
pub struct Gathered {
    /// Simulated time from the first join until the last node has its place.
    pub simulated: Duration,
    /// CPU time that the core used.
    pub core: Duration,
    /// The number of nodes that received their place.
    pub placed: usize,
    /// Bytes that the coordinator sent.
    pub sent: u64,
}

fn hello(node: u32, nodes: u32) -> Hello {
    Hello {
        replica_port: 0,
        domain: String::new(),
        role: String::new(),
        node: NodeId(node.to_string()),
        incarnation: Incarnation(1),
        spec: JobSpec {
            job: JobId("scale".into()),
            nodes_min: nodes,
            nodes_max: nodes,
            node_unit: 1,
            spares: 0,
            restarts: RestartBudget::Exactly(0),
            detect_timeout_ms: 2000,
            join_timeout_ms: 600_000,
            policy: everstep_core::spec::Policy::Observe,
            check: everstep_core::spec::CheckWhen::OnTrouble,
        },
        host: format!("10.{}.{}.{}", node / 65_536, node / 256 % 256, node % 256),
        workers: 8,
        store_port: 29_500,
        seen: Generation(0),
        began: None,
        running: None,
        stop: None,
        shutdown_grace_ms: 0,
    }
}

fn cpu() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(t.tv_sec).unwrap_or(0), u32::try_from(t.tv_nsec).unwrap_or(0))
}

/// Simulates `nodes` nodes that join at once.
#[must_use]
pub fn gather(nodes: u32, model: Model) -> Gathered {
    let on_wire = |bytes: usize| Duration::from_nanos(bytes as u64 * 8 * 1_000_000_000 / model.bits_per_second);
    let mut core = Coordinator::new(Epoch(1), vec![], Time(0));
    let mut spent = Duration::ZERO;
    // In each direction, the coordinator's link delivers one message after the other.
    let (mut arrives, mut leaves, mut sent) = (model.round_trip / 2, Duration::ZERO, 0);
    let mut placed = BTreeSet::new();
    let mut last = Duration::ZERO;
    let mut waiting = Vec::new();
    for node in 0..nodes {
        let hello = Box::new(hello(node, nodes));
        arrives += on_wire(serde_json::to_vec(&hello).map_or(0, |b| b.len()));
        let mut event = Some(Event::Joined { session: Session(u64::from(node) + 1), hello });
        while let Some(next) = event.take() {
            let began = cpu();
            core.handle(Time(u64::try_from(arrives.as_millis()).unwrap_or(0)), next);
            let mut commands = Vec::new();
            while let Some(command) = core.poll() {
                commands.push(command);
            }
            spent += cpu().saturating_sub(began);
            for command in commands {
                match command {
                    Command::Send { session, order, after: None } => waiting.push((session, order)),
                    Command::Send { session, order, after: Some(_) } => waiting.push((session, order)),
                    Command::Persist { id, .. } => {
                        arrives += model.write;
                        event = Some(Event::Persisted { id, result: Ok(1) });
                    }
                    Command::Record { .. } | Command::Provision { .. } | Command::StepDown { .. } => {}
                }
            }
        }
        for (session, order) in waiting.drain(..) {
            let bytes = serde_json::to_vec(&order).map_or(0, |b| b.len());
            sent += bytes as u64;
            leaves = leaves.max(arrives) + on_wire(bytes);
            if matches!(order, Order::Crew(_, CrewOrder::Start(_))) {
                placed.insert(session);
                last = leaves + model.round_trip / 2;
            }
        }
    }
    Gathered { simulated: last, core: spent, placed: placed.len(), sent }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_is_told_and_messages_do_not_grow_with_the_world() {
        let model = Model {
            round_trip: Duration::from_millis(1),
            bits_per_second: 10_000_000_000,
            write: Duration::from_millis(5),
        };
        let (small, large) = (gather(100, model), gather(1000, model));
        assert_eq!((small.placed, large.placed), (100, 1000));
        assert!(large.sent < small.sent * 11, "{small:?} {large:?}");
    }
}
