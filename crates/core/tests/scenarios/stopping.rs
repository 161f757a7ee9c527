//! A job that is asked to stop while its ranks wait for the step to restore.

use crate::lone_agent;
use crate::scene::Scene;
use everstep_core::agent::Agent;
use everstep_core::agent::command::{Command, CrewCommand};
use everstep_core::agent::event::{CrewEvent, Event as AgentEvent, Words, WorkerExit};
use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::event::Event;
use everstep_core::id::{Epoch, Generation, Rank, Step};
use everstep_core::message::{
    CrewOrder, CrewReport, ExitReason, Holdings, Offers, Order, Outcome, RankOffers, Report, Restore, Running, Stop,
    Stopped,
};
use everstep_core::spec::{JobSpec, RestartBudget};
use everstep_core::time::Time;

/// What a job is asked for.
const TERM: Stop = Stop { signal: 15, at: None };

fn spec() -> JobSpec {
    Scene::spec((2, 2), RestartBudget::PerDayAfterFirstStep(10))
}

/// Two nodes with one rank each.
fn job() -> Scene {
    let mut scene = Scene::new();
    for node in 0..2 {
        scene.join(node, node + 10, 1, spec());
    }
    scene.passes(3000);
    scene
}

fn offers(scene: &mut Scene, rank: u32) {
    let offers = Offers::any(vec![], false);
    scene.says(
        u64::from(rank),
        Report::Crew(Generation(1), CrewReport::Offers(RankOffers { rank: Rank(rank), offers })),
    );
}

fn holds(scene: &mut Scene, node: u64) {
    scene.says(node, Report::Crew(Generation(1), CrewReport::Holds(Holdings { held: vec![], parity: vec![] })));
}

fn stops(scene: &mut Scene, node: u64) {
    scene.says(
        node,
        Report::Crew(Generation(1), CrewReport::Stopped(Stopped { store_port: 1, reached: Some(Step(0)) })),
    );
}

#[test]
fn it_does_not_wait_for_a_rank_that_waits_for_one_on_a_node_that_has_stopped() {
    let mut scene = job();
    holds(&mut scene, 0);
    offers(&mut scene, 0);
    scene.says(0, Report::StopRequested(TERM));
    stops(&mut scene, 1);
    assert_eq!(scene.over().unwrap().0, 143);
}

#[test]
fn it_waits_for_ranks_that_may_have_work_to_save() {
    for restored in [true, false] {
        let mut scene = job();
        if restored {
            (0..2).for_each(|node| holds(&mut scene, node));
            (0..2).for_each(|rank| offers(&mut scene, rank));
        }
        scene.says(0, Report::StopRequested(TERM));
        stops(&mut scene, 1);
        scene.event(Event::Tick);
        assert!(scene.over().is_none(), "restored: {restored}");
        stops(&mut scene, 0);
        assert_eq!(scene.over().unwrap().0, 143);
    }
}

#[test]
fn a_coordinator_that_did_not_decide_itself_lets_ranks_save() {
    let mut scene = job();
    (0..2).for_each(|node| holds(&mut scene, node));
    (0..2).for_each(|rank| offers(&mut scene, rank));
    // The next life of the coordinator, to which a node says again what it could restore.
    let record = scene.job().record().clone();
    scene.core = Coordinator::new(Epoch(2), vec![(record, scene.version)], Time(scene.now));
    for node in 0..2 {
        let running =
            Running { generation: Generation(1), failures: vec![], finished: false, progressed: true, ended: vec![] };
        scene.join_running(node, node + 10, 1, spec(), Some(running));
    }
    offers(&mut scene, 0);
    scene.says(0, Report::StopRequested(TERM));
    stops(&mut scene, 1);
    assert!(scene.over().is_none());
}

/// Orders that node 0 gets while the store takes nothing, and whether the coordinator is idle once
/// it is gone.
fn stopped_without_store(milliseconds: u64) -> (Vec<Order>, bool) {
    let mut scene = job();
    scene.store_fails = true;
    scene.says(0, Report::StopRequested(TERM));
    (0..2).for_each(|node| stops(&mut scene, node));
    scene.sent.clear();
    scene.passes(milliseconds);
    let sent = scene.sent.clone();
    (0..2).for_each(|node| scene.leaves(node));
    scene.passes(if sent.is_empty() { 0 } else { 30_000 });
    (sent, scene.core.idle())
}

#[test]
fn its_end_waits_for_the_store_for_a_while_only() {
    let (sent, idle) = stopped_without_store(5000);
    assert!(sent.is_empty() && !idle, "{sent:?}");
    let (sent, idle) = stopped_without_store(20_000);
    assert_eq!(sent.iter().filter(|o| matches!(o, Order::End(ExitReason { code: 143, .. }))).count(), 2, "{sent:?}");
    assert!(idle);
}

fn ordered(agent: &mut Agent, order: Order) {
    agent.handle(Time(10), AgentEvent::Order { epoch: Epoch(1), order });
}

fn offered(agent: &mut Agent) {
    let offers = Offers::any(vec![], false);
    agent.handle(Time(10), AgentEvent::Crew(Generation(1), CrewEvent::Offers(RankOffers { rank: Rank(1), offers })));
}

/// The second worker of the node ends by the signal.
fn exited(agent: &mut Agent) {
    let (generation, outcome) = (Generation(1), Outcome::Signal(15));
    let words = Words::default();
    agent.handle(
        Time(20),
        AgentEvent::Crew(
            generation,
            CrewEvent::WorkerExited(WorkerExit { local_rank: 1, pid: 8, outcome, asked: true, words }),
        ),
    );
}

fn stopping() -> Agent {
    let mut agent = lone_agent::running_with(2);
    ordered(&mut agent, Order::Crew(Generation(1), CrewOrder::Signal(TERM)));
    lone_agent::commands(&mut agent);
    agent
}

fn kills(agent: &mut Agent) -> bool {
    lone_agent::commands(agent).iter().any(|c| matches!(c, Command::Crew(_, CrewCommand::Kill { .. })))
}

#[test]
fn an_agent_ends_a_rank_that_waits_for_one_that_is_gone() {
    for exits_first in [true, false] {
        let mut agent = stopping();
        if exits_first {
            exited(&mut agent);
            assert!(!kills(&mut agent), "the other may have work to save");
            offered(&mut agent);
        } else {
            offered(&mut agent);
            assert!(!kills(&mut agent), "all can still offer");
            exited(&mut agent);
        }
        assert!(kills(&mut agent), "exits first: {exits_first}");
    }
}

#[test]
fn an_agent_lets_a_rank_that_was_told_what_to_restore_stop_by_itself() {
    let mut agent = stopping();
    offered(&mut agent);
    ordered(
        &mut agent,
        Order::Crew(
            Generation(1),
            CrewOrder::Restore(Restore { step: None, sources: vec![], persist: false, best: None, found: false }),
        ),
    );
    exited(&mut agent);
    assert!(!kills(&mut agent));
}
