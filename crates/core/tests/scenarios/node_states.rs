//! What each node does, as metrics show it: in training, and between generations.

use crate::scene::{Scene, failure};
use everstep_core::coordinator::event::Event;
use everstep_core::id::JobId;
use everstep_core::message::{CrewReport, Outcome, Report};
use everstep_core::spec::RestartBudget;

/// Two nodes train, and a third one is a spare.
fn trains() -> Scene {
    let mut scene = Scene::new();
    for node in 0..3 {
        let spec = Scene::spec((2, 2), RestartBudget::PerDayAfterFirstStep(10));
        scene.join(node, 1, 1, spec);
        if node == 0 {
            assert_eq!(states(&scene), ["waiting"], "it waits for another node");
        }
    }
    assert_eq!(scene.started(), [1]);
    assert_eq!(states(&scene), ["active", "active", "spare"]);
    scene
}

fn states(scene: &Scene) -> Vec<&'static str> {
    scene.job().nodes().iter().map(|(_, node)| scene.job().state_of(node).name()).collect()
}

fn is_killed(scene: &mut Scene, node: u32) {
    let report = CrewReport::WorkerFailed(failure(node, Outcome::Signal(9), "", 40));
    let generation = scene.job().record().generation;
    scene.says(node.into(), Report::Crew(generation, report));
}

#[test]
fn members_of_a_job_that_restarts_are_no_spares() {
    let mut scene = trains();
    is_killed(&mut scene, 1);
    assert_eq!(states(&scene), ["waiting", "waiting", "spare"]);
    scene.stopped(0..2);
    scene.passes(5000);
    assert_eq!(states(&scene), ["active", "active", "spare"]);
}

#[test]
fn members_of_a_job_that_stops_are_no_spares() {
    let mut scene = trains();
    scene.event(Event::StopJob { job: JobId("j".into()), signal: 15 });
    assert_eq!(scene.over(), None);
    assert_eq!(states(&scene), ["waiting", "waiting", "spare"]);
}

#[test]
fn a_lost_node_is_neither_waiting_nor_a_spare() {
    let mut scene = trains();
    scene.leaves(1);
    assert_eq!(states(&scene), ["active", "lost", "spare"]);
}
