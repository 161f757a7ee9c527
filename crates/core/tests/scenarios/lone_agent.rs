//! An agent that runs one worker or more, from rank 1 on.

use everstep_core::agent::command::Command;
use everstep_core::agent::event::Event;
use everstep_core::agent::{Agent, Config};
use everstep_core::id::{Epoch, Generation, Incarnation, JobId, NodeId, Rank};
use everstep_core::message::{CrewOrder, Order, Place, Slot, Start};
use everstep_core::severity::Table;
use everstep_core::spec::{JobSpec, RestartBudget};
use everstep_core::time::Time;
use std::time::Duration;

/// One worker, rank 1 of two.
pub fn running() -> Agent {
    running_with(1)
}

/// The last ranks of a world, in which rank 0 runs elsewhere.
pub fn running_with(workers: u32) -> Agent {
    let spec = JobSpec {
        job: JobId("j".into()),
        nodes_min: 2,
        nodes_max: 2,
        node_unit: 1,
        spares: 0,
        restarts: RestartBudget::Exactly(0),
        detect_timeout_ms: 2000,
        join_timeout_ms: 600_000,
        policy: everstep_core::spec::Policy::Observe,
        check: everstep_core::spec::CheckWhen::Never,
    };
    let node = NodeId("1".into());
    let mut agent = Agent::new(
        Config {
            node: node.clone(),
            incarnation: Incarnation(1),
            spec,
            host: "h".into(),
            workers,
            store_port: 1,
            replica_port: 0,
            domain: String::new(),
            role: String::new(),
            held: Generation(0),
            named: true,
            shutdown_grace: Duration::from_secs(30),
            stop_signals: vec![],
            table: Table::built_in().clone(),
        },
        Time(0),
    );
    let place = place(workers);
    agent.handle(Time(0), Event::Connected);
    let orders = [
        Order::Welcome { epoch: Epoch(1), began: Incarnation(1) },
        Order::Crew(
            Generation(1),
            CrewOrder::Start(Start { place, began: Incarnation(1), restarts: 0, max_restarts: 0 }),
        ),
    ];
    for order in orders {
        agent.handle(Time(1), Event::Order { epoch: Epoch(1), order });
    }
    agent
}

/// The place of this node in a world in which rank 0 runs elsewhere.
pub fn place(workers: u32) -> Place {
    let slot = Slot {
        node: NodeId("1".into()),
        incarnation: Incarnation(1),
        first_rank: Rank(1),
        workers,
        host: "h".into(),
        store_port: 1,
        role: String::new(),
    };
    Place {
        slot,
        group_rank: 1,
        group_world_size: 2,
        world_size: workers + 1,
        first_role_rank: 1,
        role_world_size: workers + 1,
        leader_host: "g".into(),
        leader_port: 1,
    }
}

pub fn commands(agent: &mut Agent) -> Vec<Command> {
    std::iter::from_fn(|| agent.poll()).collect()
}
