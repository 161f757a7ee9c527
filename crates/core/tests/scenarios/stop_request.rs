//! A stop reaches the job whatever happens to its coordinator, and it does not undo what is done.

use crate::lone_agent;
use crate::scene::{self, Scene, failure};
use everstep_core::agent::Agent;
use everstep_core::agent::command::{Command, CrewCommand};
use everstep_core::agent::event::{CrewEvent, Event as AgentEvent};
use everstep_core::agent::observation::Observation;
use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::command::Fact;
use everstep_core::history::{Entry, incidents, narrative};
use everstep_core::id::{Epoch, Generation, Incarnation, Rank, Step};
use everstep_core::message::{
    CrewOrder, CrewReport, Ended, ExitReason, HowEnded, Order, Outcome, Report, Running, Start, Stop,
};
use everstep_core::spec::{JobSpec, RestartBudget};
use everstep_core::time::Time;

const TERM: Stop = Stop { signal: 15, at: Some(Step(70)) };

fn spec() -> JobSpec {
    Scene::spec((2, 2), RestartBudget::PerDayAfterFirstStep(10))
}

/// Returns two nodes with `workers` ranks each.
fn job(workers: u32) -> Scene {
    let mut scene = Scene::new();
    for node in 0..2 {
        scene.join_with(node, node + 10, workers, spec(), |hello| hello.shutdown_grace_ms = 300_000);
    }
    scene.passes(3000);
    scene
}

fn running() -> Running {
    Running { generation: Generation(1), failures: vec![], finished: false, progressed: true, ended: vec![] }
}

fn over(rank: u32, how: HowEnded) -> Ended {
    Ended { rank: Rank(rank), step: Some(Step(60)), total: None, passes: 0, how }
}

/// The coordinator ends, and another one reads what it had stored.
fn coordinator_restarts(scene: &mut Scene) {
    let record = scene.job().record().clone();
    scene.core = Coordinator::new(Epoch(2), vec![(record, scene.version)], Time(scene.now));
    scene.sent.clear();
}

fn returns(scene: &mut Scene, node: u64, running: Option<Running>, stop: Option<Stop>) {
    scene.join_with(node, node + 10, 1, spec(), |hello| {
        hello.seen = Generation(1);
        hello.running = running;
        hello.stop = stop;
    });
}

fn signals(scene: &Scene) -> usize {
    scene.sent.iter().filter(|o| matches!(o, Order::Crew(_, CrewOrder::Signal(TERM)))).count()
}

#[test]
fn a_coordinator_that_has_just_started_learns_of_it() {
    for saving in [true, false] {
        let mut scene = job(1);
        scene.says(0, Report::StopRequested(TERM));
        coordinator_restarts(&mut scene);
        (0..2).for_each(|node| returns(&mut scene, node, saving.then(running), Some(TERM)));
        assert_eq!(scene.over().is_some(), !saving, "workers that are gone have stopped");
        scene.stopped(0..2);
        scene.passes(60_000);
        assert_eq!(scene.over().unwrap().0, 143);
        assert!(scene.started().is_empty());
    }
}

#[test]
fn a_node_that_did_not_hear_of_it_is_told() {
    let mut scene = job(1);
    coordinator_restarts(&mut scene);
    returns(&mut scene, 0, Some(running()), None);
    returns(&mut scene, 1, Some(running()), Some(TERM));
    assert!(signals(&scene) >= 2, "{:?}", scene.sent);
}

#[test]
fn a_node_that_saves_may_lose_its_connection() {
    let mut scene = job(1);
    scene.says(0, Report::StopRequested(TERM));
    scene.leaves(1);
    scene.sent.clear();
    returns(&mut scene, 1, Some(running()), None);
    assert_eq!(signals(&scene), 1, "{:?}", scene.sent);
    assert!(!scene.sent.iter().any(|o| matches!(o, Order::Crew(_, CrewOrder::Fence { .. }))));
    // Its report that the workers have ended is lost with the next connection.
    scene.stopped([0]);
    scene.leaves(1);
    returns(&mut scene, 1, None, Some(TERM));
    assert_eq!(scene.over().unwrap().0, 143);
}

#[test]
fn workers_have_the_time_that_was_given_to_them() {
    let mut scene = job(1);
    scene.says(0, Report::StopRequested(TERM));
    scene.passes(300_000);
    assert!(scene.over().is_none());
    scene.passes(60_000);
    assert_eq!(scene.over().unwrap().0, 143);
}

#[test]
fn a_training_that_is_done_is_not_stopped() {
    let mut scene = job(1);
    for (node, rank) in [(0, 0), (1, 1)] {
        let ended = over(rank, HowEnded::ShuttingDown);
        scene.says(node, Report::Crew(Generation(1), CrewReport::Ended(ended)));
    }
    assert!(scene.over().is_none(), "processes still shut down");
    scene.says(0, Report::StopRequested(TERM));
    assert!(scene.over().is_none(), "exit handlers get their time");
    scene.stopped(0..2);
    assert_eq!(scene.over().unwrap().0, 0);
}

#[test]
fn nor_is_one_of_which_the_coordinator_has_yet_to_learn_that_it_is_done() {
    let mut scene = job(1);
    coordinator_restarts(&mut scene);
    for (node, rank) in [(0, 0), (1, 1)] {
        let ended = vec![over(rank, HowEnded::Exited)];
        returns(&mut scene, node, Some(Running { ended, finished: true, ..running() }), Some(TERM));
    }
    assert_eq!(scene.over().unwrap().0, 0);
}

#[test]
fn a_node_that_was_stopped_in_an_earlier_run_does_not_stop_this_one() {
    let mut scene = job(1);
    scene.join_with(1, 99, 1, spec(), |hello| hello.stop = Some(TERM));
    assert!(scene.over().is_none());
    let mut scene = Scene::new();
    scene.join(0, 10, 1, spec());
    scene.join_with(1, 99, 1, spec(), |hello| hello.stop = Some(TERM));
    assert!(scene.over().is_none());
    assert!(scene.sent.iter().any(|o| matches!(o, Order::End(ExitReason { code: 143, .. }))), "{:?}", scene.sent);
}

#[test]
fn a_node_that_is_lost_while_the_job_stops_has_stopped() {
    let mut scene = job(1);
    scene.says(0, Report::StopRequested(TERM));
    scene.stopped([0]);
    scene.leaves(1);
    scene.passes(10_000);
    assert_eq!(scene.over().unwrap().0, 143);
}

#[test]
fn all_crashes_after_the_end_are_known_again_after_a_reconnect() {
    let mut scene = job(3);
    coordinator_restarts(&mut scene);
    let crashes = [1, 2].map(|rank| failure(rank, Outcome::Signal(6), "", 60));
    let running = Running { failures: crashes.into(), ended: vec![over(0, HowEnded::Exited)], ..running() };
    returns(&mut scene, 0, Some(running), None);
    let ended = (3..6).map(|rank| over(rank, HowEnded::Exited)).collect();
    returns(&mut scene, 1, Some(Running { ended, finished: true, ..self::running() }), None);
    scene.passes(20_000);
    assert_eq!(scene.over().unwrap().0, 0);
}

#[test]
fn an_agent_that_nobody_answers_stops_by_itself() {
    let mut agent = lone_agent::running_with(1);
    lone_agent::commands(&mut agent);
    agent.handle(Time(1000), AgentEvent::Signal { signal: 15 });
    assert_eq!(agent.hello().stop.unwrap().signal, 15);
    let stops = |agent: &mut Agent, at| {
        agent.handle(Time(at), AgentEvent::Tick);
        lone_agent::commands(agent)
            .iter()
            .any(|c| matches!(c, Command::Crew(_, CrewCommand::StopAt(Stop { signal: 15, .. }))))
    };
    assert!(!stops(&mut agent, 1500));
    let at = agent.deadline().unwrap();
    assert!(at <= Time(10_000) && stops(&mut agent, at.0), "{at:?}");
}

#[test]
fn an_agent_starts_nothing_after_a_stop_that_overtook_the_start() {
    let mut agent = lone_agent::running_with(1);
    let order = |agent: &mut Agent, order| agent.handle(Time(10), AgentEvent::Order { epoch: Epoch(1), order });
    order(&mut agent, Order::Crew(Generation(1), CrewOrder::Fence { stacks: false }));
    let place = lone_agent::place(1);
    order(
        &mut agent,
        Order::Crew(
            Generation(2),
            CrewOrder::Start(Start { place, began: Incarnation(1), restarts: 1, max_restarts: 3 }),
        ),
    );
    order(&mut agent, Order::Crew(Generation(2), CrewOrder::Signal(TERM)));
    lone_agent::commands(&mut agent);
    agent.handle(Time(20), AgentEvent::Crew(Generation(1), CrewEvent::WorkersGone { store_port: 1 }));
    let commands = lone_agent::commands(&mut agent);
    assert!(!commands.iter().any(|c| matches!(c, Command::Crew(_, CrewCommand::Spawn(_)))), "{commands:?}");
    assert_eq!(agent.seen(), Generation(2));
}

#[test]
fn an_agent_whose_workers_have_not_started_has_stopped() {
    let mut agent = lone_agent::running_with(1);
    let order = |agent: &mut Agent, order| agent.handle(Time(10), AgentEvent::Order { epoch: Epoch(1), order });
    order(&mut agent, Order::Crew(Generation(1), CrewOrder::Fence { stacks: false }));
    agent.handle(Time(20), AgentEvent::Crew(Generation(1), CrewEvent::WorkersGone { store_port: 1 }));
    lone_agent::commands(&mut agent);
    // The coordinator had decided on the next generation, but not announced it yet.
    order(&mut agent, Order::Crew(Generation(2), CrewOrder::Signal(TERM)));
    let stopped = |c: &Command| matches!(c, Command::Send(Report::Crew(Generation(2), CrewReport::Stopped(_))));
    assert!(lone_agent::commands(&mut agent).iter().any(stopped));
}

#[test]
fn a_training_that_is_known_to_be_done_is_not_stopped_while_its_end_is_explained() {
    let mut scene = job(1);
    let lost = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:4";
    let failure = scene::failure(0, Outcome::Code(1), lost, 60);
    scene.says(0, Report::Crew(Generation(1), CrewReport::WorkerFailed(failure)));
    let ended = Ended { step: Some(Step(60)), ..over(1, HowEnded::Exited) };
    scene.says(1, Report::Crew(Generation(1), CrewReport::Ended(ended)));
    assert_eq!(scene.over(), None, "the first cause is waited for");
    scene.says(1, Report::StopRequested(TERM));
    let (code, why) = scene.over().unwrap();
    assert!(code == 0 && why.contains("counts as finished"), "{code} {why}");
}

/// Looks at a worker that stops at a step that is named, and was restored at step 60.
fn looks(agent: &mut Agent, at: u64, step: u64) {
    let seen = Observation { step: Some(step), restored: 60, beats: step, flags_stop: true, ..Observation::default() };
    let sample = CrewEvent::Sample { local_rank: 0, pid: 7, seen };
    agent.handle(Time(at), AgentEvent::Crew(Generation(1), sample));
}

/// Returns the step at which the agent asks the ranks to stop, or `None` if it has not asked.
fn asked(agent: &mut Agent) -> Option<Option<Step>> {
    lone_agent::commands(agent).into_iter().find_map(|command| match command {
        Command::Send(Report::StopRequested(stop)) => Some(stop.at),
        _ => None,
    })
}

#[test]
fn right_after_a_restart_the_last_step_is_named_once_a_step_was_timed() {
    let mut agent = lone_agent::running_with(1);
    looks(&mut agent, 800, 60);
    looks(&mut agent, 900, 61);
    agent.handle(Time(1000), AgentEvent::Signal { signal: 15 });
    // Without a name each rank would stop at the step that it is at, which may be another one's
    // next.
    assert_eq!(asked(&mut agent), None);
    assert!(agent.hello().stop.is_none());
    looks(&mut agent, 1100, 65);
    // 50 ms per step, so 20 within a second.
    assert_eq!(asked(&mut agent), Some(Some(Step(65 + 2 + 20))));
    assert_eq!(agent.hello().stop.unwrap().signal, 15);
}

#[test]
fn the_last_step_is_named_without_that_if_a_step_takes_long() {
    for (stepped, at) in [(1, Some(Step(63))), (0, None)] {
        let mut agent = lone_agent::running_with(1);
        looks(&mut agent, 800, 60);
        looks(&mut agent, 900, 60 + stepped);
        agent.handle(Time(1000), AgentEvent::Signal { signal: 15 });
        assert_eq!(asked(&mut agent), None);
        let until = agent.deadline().unwrap();
        assert!(until <= Time(2000), "{until:?}");
        agent.handle(until, AgentEvent::Tick);
        assert_eq!(asked(&mut agent), Some(at));
    }
}

#[test]
fn an_agent_that_was_answered_leaves_the_end_to_the_coordinator() {
    let mut agent = lone_agent::running_with(1);
    agent.handle(Time(1000), AgentEvent::Signal { signal: 15 });
    let order = Order::Crew(Generation(1), CrewOrder::Signal(TERM));
    agent.handle(Time(1100), AgentEvent::Order { epoch: Epoch(1), order });
    lone_agent::commands(&mut agent);
    agent.handle(Time(20_000), AgentEvent::Tick);
    assert!(lone_agent::commands(&mut agent).is_empty());
}

#[test]
fn a_crash_that_was_held_is_told_of_although_the_job_is_stopped() {
    let mut scene = job(2);
    for rank in 0..2 {
        let crash = failure(rank, Outcome::Signal(6), "", 30);
        scene.says(0, Report::Crew(Generation(1), CrewReport::WorkerFailed(crash)));
    }
    let opened =
        |f: &Fact| matches!(f, Fact::IncidentOpened { incident: 1, failure: Some(f), .. } if f.rank == Rank(0));
    assert!(!scene.facts.iter().any(opened), "it may have come after the last step");
    scene.says(0, Report::StopRequested(TERM));
    scene.passes(1000);
    scene.stopped([0, 1]);
    assert_eq!(scene.over().unwrap().0, 143);
    let beside = |f: &Fact| matches!(f, Fact::Blamed { incident: 1, others, .. } if others.values().sum::<u32>() == 1);
    assert!(scene.facts.iter().any(opened) && scene.facts.iter().any(beside), "{:?}", scene.facts);
    let entries: Vec<Entry> = scene.facts.iter().map(|fact| Entry { at: 1, fact: fact.clone() }).collect();
    let text = narrative(&incidents(&entries)[0], "j", "").join("\n");
    assert!(text.contains("did not restart them"), "{text}");
}
