//! Network problems are not the script's fault: late messages, lost connections, a coordinator that
//! does not respond.

use crate::scene::{self, Scene};
use everstep_core::agent::command::{Command, CrewCommand};
use everstep_core::agent::event::{CrewEvent, Event as AgentEvent};
use everstep_core::agent::{Agent, Config};
use everstep_core::coordinator::event::Event;
use everstep_core::id::{Epoch, Generation, Incarnation, NodeId, Rank, Session, Step};
use everstep_core::message::{
    CrewOrder, CrewReport, ExitReason, FirstStep, Hello, Order, Outcome, Place, Report, Running, Slot, Start, Stopped,
};
use everstep_core::severity::Table;
use everstep_core::spec::RestartBudget;
use everstep_core::time::Time;
use std::time::Duration;

const DAILY: RestartBudget = RestartBudget::PerDayAfterFirstStep(10);

fn two_nodes() -> Scene {
    let mut scene = Scene::new();
    for node in 0..2 {
        scene.join(node, 1, 1, Scene::spec((2, 2), DAILY));
    }
    assert_eq!(scene.started(), [1]);
    scene.says(0, Report::Crew(Generation(1), CrewReport::FirstStep(FirstStep { step: Step(1), from: Some(Step(0)) })));
    scene.says(1, Report::Crew(Generation(1), CrewReport::FirstStep(FirstStep { step: Step(1), from: Some(Step(0)) })));
    scene
}

/// Reconnects node 1 in its old life, with its workers still running or ended.
fn back(scene: &mut Scene, session: u64, running: bool) {
    let generation = scene.job().record().generation;
    let hello = Hello {
        node: NodeId("1".into()),
        incarnation: Incarnation(1),
        spec: Scene::spec((2, 2), DAILY),
        host: "h1".into(),
        workers: 1,
        store_port: 1,
        replica_port: 7,
        domain: String::new(),
        role: String::new(),
        seen: generation,
        began: None,
        running: running.then_some(Running {
            generation,
            failures: vec![],
            finished: false,
            progressed: true,
            ended: vec![],
        }),
        stop: None,
        shutdown_grace_ms: 0,
    };
    scene.event(Event::Joined { session: Session(session), hello: Box::new(hello) });
}

#[test]
fn a_node_that_was_only_cut_off_does_not_use_up_the_daily_budget() {
    let mut scene = two_nodes();
    for round in 0..30 {
        scene.event(Event::Lost { session: Session(if round == 0 { 2 } else { 100 + round }) });
        scene.passes(1_000);
        back(&mut scene, 101 + round, true);
        let generation = scene.job().record().generation;
        scene.stopped([0]);
        let stopped = Report::Crew(generation, CrewReport::Stopped(Stopped { store_port: 1, reached: None }));
        scene.event(Event::Report { session: Session(101 + round), report: stopped });
        scene.passes(31_000);
        assert_eq!(scene.over(), None, "round {round}");
        assert_eq!(scene.started().len() as u64, round + 2, "every time it is started again");
        let generation = scene.job().record().generation;
        for session in [1, 101 + round] {
            let report =
                Report::Crew(generation, CrewReport::FirstStep(FirstStep { step: Step(2), from: Some(Step(1)) }));
            scene.event(Event::Report { session: Session(session), report });
        }
    }
    assert_eq!(scene.job().record().restarts_today(everstep_core::time::Time(scene.now)), 0);
}

#[test]
fn what_the_script_does_is_still_counted() {
    let mut scene = two_nodes();
    for round in 0..=10 {
        assert_eq!(scene.over(), None, "round {round}");
        let generation = scene.job().record().generation;
        let failure = scene::failure(0, Outcome::Signal(11), "", 10 + round);
        scene.says(0, Report::Crew(generation, CrewReport::WorkerFailed(failure)));
        scene.stopped([0, 1]);
        scene.passes(40_000);
    }
    assert!(scene.over().unwrap().1.contains("10 restarts within 24 hours"));
}

#[test]
fn restarts_after_nothing_but_lost_connections_are_not_counted_up_to_a_limit() {
    let mut scene = two_nodes();
    let mut rounds = 0;
    while scene.over().is_none() && rounds < 100 {
        let generation = scene.job().record().generation;
        let text = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1234";
        let failure = scene::failure(0, Outcome::Code(1), text, 10 + rounds);
        assert!(failure.verdict.follows);
        scene.says(0, Report::Crew(generation, CrewReport::WorkerFailed(failure)));
        scene.stopped([0, 1]);
        scene.passes(40_000);
        rounds += 1;
    }
    assert!((50..=70).contains(&rounds), "{rounds}");
}

#[test]
fn after_late_lines_a_lost_connection_may_come_back_in_place() {
    let mut scene = two_nodes();
    scene.event(Event::Late { session: Session(2) });
    scene.event(Event::Late { session: Session(2) });
    scene.event(Event::Lost { session: Session(2) });
    scene.passes(4_000);
    back(&mut scene, 9, true);
    scene.passes(10_000);
    assert_eq!(scene.started(), [1], "nothing was restarted");
    // On a good network the node is lost at once, like a machine without power.
    let mut scene = two_nodes();
    scene.event(Event::Lost { session: Session(2) });
    scene.passes(1_000);
    scene.stopped([0]);
    back(&mut scene, 9, false);
    scene.passes(2_000);
    assert_eq!(scene.started(), [1, 2]);
}

fn agent() -> Agent {
    let config = Config {
        node: NodeId("0".into()),
        incarnation: Incarnation(1),
        spec: Scene::spec((1, 1), DAILY),
        host: "h".into(),
        workers: 1,
        store_port: 1,
        replica_port: 7,
        domain: String::new(),
        role: String::new(),
        held: Generation(0),
        named: true,
        shutdown_grace: Duration::from_secs(1),
        stop_signals: vec![],
        table: Table::built_in().clone(),
    };
    let mut agent = Agent::new(config, Time(0));
    let slot = Slot {
        node: NodeId("0".into()),
        incarnation: Incarnation(1),
        first_rank: Rank(0),
        workers: 1,
        host: "h".into(),
        role: String::new(),
        store_port: 1,
    };
    let place = Place {
        slot,
        first_role_rank: 0,
        role_world_size: 1,
        world_size: 1,
        group_rank: 0,
        group_world_size: 1,
        leader_host: "h".into(),
        leader_port: 1,
    };
    agent.handle(Time(0), AgentEvent::Connected);
    let epoch = Epoch(1);
    agent.handle(Time(1), AgentEvent::Order { epoch, order: Order::Welcome { epoch, began: Incarnation(1) } });
    let start = Order::Crew(
        Generation(1),
        CrewOrder::Start(Start { place, began: Incarnation(1), restarts: 0, max_restarts: 3 }),
    );
    agent.handle(Time(2), AgentEvent::Order { epoch, order: start });
    agent.handle(Time(1000), AgentEvent::Disconnected);
    agent
}

fn commands(agent: &mut Agent) -> Vec<Command> {
    std::iter::from_fn(|| agent.poll()).collect()
}

#[test]
fn workers_go_on_for_as_long_as_the_coordinators_process_is_stopped() {
    let mut agent = agent();
    for second in 1..300 {
        agent.handle(Time(second * 1000), AgentEvent::CoordinatorStuck);
        agent.handle(Time(second * 1000 + 500), AgentEvent::Tick);
    }
    assert!(
        !commands(&mut agent)
            .iter()
            .any(|c| matches!(c, Command::Crew(_, CrewCommand::Kill { .. }) | Command::Exit { .. }))
    );
}

#[test]
fn an_agent_that_cannot_know_ends_its_workers_and_waits_for_the_coordinator() {
    let mut agent = agent();
    commands(&mut agent);
    agent.handle(Time(32_000), AgentEvent::Tick);
    assert!(
        commands(&mut agent).iter().any(|c| matches!(c, Command::Crew(_, CrewCommand::Kill { .. }))),
        "others may run in its place"
    );
    agent.handle(Time(33_000), AgentEvent::Crew(Generation(1), CrewEvent::WorkersGone { store_port: 2 }));
    agent.handle(Time(400_000), AgentEvent::Tick);
    assert!(!commands(&mut agent).iter().any(|c| matches!(c, Command::Exit { .. })), "the job is not over");
    agent.handle(Time(632_000), AgentEvent::Tick);
    assert!(
        commands(&mut agent).iter().any(|c| matches!(c, Command::Exit { reason: ExitReason { code: 75, .. }, .. })),
        "--join-timeout"
    );
}
