//! What must not be forgotten when a coordinator restarts or a node comes back: which ranks have
//! ended, that the job is not to go on, and that it is over.

use crate::scene::{Scene, failure};
use everstep_core::id::{Generation, Incarnation, Rank, Step};
use everstep_core::message::{CrewReport, Ended, Failure, Hello, HowEnded, Order, Outcome, Report, Running};
use everstep_core::spec::{JobSpec, RestartBudget};

const LOST: &str =
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:4";
/// An error that says nothing about its cause.
const UNCLEAR: &str = "RuntimeError: it did not work";
const LAST: u64 = 60;

fn spec() -> JobSpec {
    Scene::spec((2, 2), RestartBudget::PerDayAfterFirstStep(10))
}

/// Two nodes with one rank each, in their first generation.
fn job() -> Scene {
    let mut scene = Scene::new();
    for node in 0..2 {
        scene.join(node, node + 10, 1, spec());
    }
    assert_eq!(scene.started(), [1]);
    scene
}

fn ended(rank: u32) -> Ended {
    Ended { rank: Rank(rank), step: Some(Step(LAST)), total: None, passes: 0, how: HowEnded::Exited }
}

fn lost_connection(rank: u32) -> Failure {
    failure(rank, Outcome::Code(1), LOST, LAST)
}

fn running(failures: Vec<Failure>, ended: Vec<Ended>) -> Option<Running> {
    let finished = !ended.is_empty();
    Some(Running { generation: Generation(1), failures, finished, progressed: true, ended })
}

/// Node 0 comes back, whose rank has ended.
fn node_0_returns(scene: &mut Scene) {
    scene.returns(0, 10, spec(), running(vec![], vec![ended(0)]));
}

/// Node 1 comes back, whose rank has failed because rank 0 was gone.
fn node_1_returns(scene: &mut Scene) {
    scene.returns(1, 11, spec(), running(vec![lost_connection(1)], vec![]));
}

fn crew(scene: &mut Scene, node: u64, report: CrewReport) {
    scene.says(node, Report::Crew(Generation(1), report));
}

fn is_not_repeated(scene: &mut Scene) {
    scene.stopped([0, 1]);
    scene.passes(60_000);
    let (code, why) = scene.over().unwrap();
    assert!(code == 0 && why.contains("counts as finished") && scene.started() == [1], "{code} {why}");
}

#[test]
fn an_end_is_heard_whichever_node_comes_back_first() {
    for order in [[0, 1], [1, 0]] {
        let mut scene = job();
        scene.restarts();
        for node in order {
            if node == 0 { node_0_returns(&mut scene) } else { node_1_returns(&mut scene) }
        }
        scene.stopped([0, 1]);
        scene.passes(60_000);
        assert_eq!((scene.over().unwrap().0, scene.started()), (0, vec![1]), "{order:?}: {:?}", scene.over());
    }
}

#[test]
fn an_end_is_heard_that_a_broken_connection_held_up() {
    let mut scene = job();
    scene.leaves(0);
    crew(&mut scene, 1, CrewReport::WorkerFailed(lost_connection(1)));
    node_0_returns(&mut scene);
    is_not_repeated(&mut scene);
}

#[test]
fn a_decision_to_end_the_job_outlives_the_coordinator() {
    for (finished, expected) in [(false, 1), (true, 0)] {
        let mut scene = job();
        if finished {
            crew(&mut scene, 1, CrewReport::WorkerFailed(lost_connection(1)));
            crew(&mut scene, 0, CrewReport::Ended(ended(0)));
        } else {
            crew(&mut scene, 1, CrewReport::WorkerFailed(failure(1, Outcome::Code(1), UNCLEAR, 30)));
            scene.passes(1100);
        }
        assert_eq!(scene.over(), None, "others are heard for a moment");
        scene.restarts();
        // The workers are gone, so the nodes know nothing more about them.
        (0..2).for_each(|node| scene.returns(node, node + 10, spec(), None));
        scene.passes(60_000);
        let (code, why) = scene.over().unwrap();
        assert_eq!((code, scene.started()), (expected, vec![1]), "{why}");
        let says = if finished { "counts as finished" } else { "no rank has used an everstep.CheckpointManager" };
        assert!(why.contains(says) && why.starts_with("rank 1 "), "{why}");
    }
}

#[test]
fn a_lost_node_whose_ranks_had_ended_is_not_waited_for_after_a_restart() {
    for how in [HowEnded::Exited, HowEnded::ShuttingDown] {
        let mut scene = job();
        crew(&mut scene, 1, CrewReport::Ended(Ended { how: how.clone(), ..ended(1) }));
        scene.leaves(1);
        scene.passes(10_000);
        scene.restarts();
        scene.returns(0, 10, spec(), running(vec![], vec![]));
        scene.passes(30_000);
        assert_eq!((scene.over(), scene.started()), (None, vec![1]), "{how:?}");
        crew(&mut scene, 0, CrewReport::Ended(ended(0)));
        assert_eq!((scene.over().unwrap().0, scene.started()), (0, vec![1]), "{how:?}");
    }
}

/// A node joins that was welcomed to the run that this agent began.
fn joins_from(scene: &mut Scene, node: u64, incarnation: u64, began: Option<u64>) {
    let spec = Scene::spec((1, 2), RestartBudget::PerDayAfterFirstStep(10));
    let began = began.map(Incarnation);
    scene.join_with(node, incarnation, 1, spec, |hello: &mut Hello| hello.began = began);
}

#[test]
fn a_node_that_was_away_when_its_run_ended_does_not_start_it_again() {
    for restarted in [false, true] {
        let mut scene = Scene::new();
        (0..2).for_each(|node| joins_from(&mut scene, node, node + 10, None));
        scene.passes(3000);
        let welcomed = |o: &Order| matches!(o, Order::Welcome { began: Incarnation(10), .. });
        assert_eq!(scene.sent.iter().filter(|o| welcomed(o)).count(), 2);
        scene.leaves(1);
        scene.passes(1000);
        scene.stopped([0]);
        scene.passes(3000);
        assert_eq!((scene.world(), scene.started()), (vec!["0".to_owned()], vec![1, 2]));
        scene.says(0, Report::Crew(Generation(2), CrewReport::Ended(ended(0))));
        scene.leaves(0);
        scene.passes(10_000);
        assert_eq!(scene.over().unwrap().0, 0);
        if restarted {
            scene.restarts();
        }
        scene.sent.clear();
        joins_from(&mut scene, 1, 11, Some(10));
        scene.passes(10_000);
        assert!(scene.started().is_empty() && scene.sent.iter().any(|o| matches!(o, Order::End(r) if r.code == 0)));
        // Whoever was never part of it wants a new run.
        scene.leaves(1);
        scene.passes(10_000);
        joins_from(&mut scene, 1, 21, None);
        scene.passes(10_000);
        assert_eq!(scene.started(), [3]);
    }
}
