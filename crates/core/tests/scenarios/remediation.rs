//! Remedies for machines: reported, requested, carried out; under one number, however often they
//! are requested.

use crate::scene::{Scene, failure};
use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::event::Event;
use everstep_core::coordinator::request::{NotProvisioned, Remedy, Request, Stage};
use everstep_core::id::{Epoch, JobId, Session};
use everstep_core::message::{CrewReport, Order, Outcome, Report};
use everstep_core::spec::{JobSpec, Policy, RestartBudget};
use everstep_core::time::Time;

/// Three nodes that train, of which two are needed.
fn trains(policy: Policy) -> Scene {
    let mut scene = Scene::new();
    for node in 0..3 {
        join(&mut scene, node, policy);
    }
    assert_eq!(scene.started(), [1]);
    scene
}

fn join(scene: &mut Scene, node: u64, policy: Policy) {
    let spec = JobSpec { policy, ..Scene::spec((2, 3), RestartBudget::PerDayAfterFirstStep(10)) };
    scene.join(node, 1, 1, spec);
}

fn is_lost(scene: &mut Scene, node: u64) {
    scene.event(Event::Lost { session: Session(node + 1) });
    scene.passes(1000);
    scene.stopped(0..2);
}

fn answers(scene: &mut Scene, id: u64, result: Result<(), NotProvisioned>) {
    scene.event(Event::Provisioned { job: JobId("j".into()), id, result });
}

fn stages(scene: &Scene) -> Vec<Stage> {
    scene.job().record().machines.requests().iter().map(|r| r.stage.clone()).collect()
}

#[test]
fn by_default_it_is_only_said_and_only_when_a_node_stays_away() {
    let mut scene = trains(Policy::Observe);
    is_lost(&mut scene, 2);
    scene.passes(10_000);
    assert!(scene.job().record().machines.requests().is_empty(), "it may come back");
    scene.passes(60_000);
    assert_eq!(stages(&scene), [Stage::Noted], "once");
    assert!(scene.provisions.is_empty());
    let words = ["--policy act would request", "2 of 3"];
    let said = |o: &&Order| matches!(o, Order::Notice { what } if words.iter().all(|w| what.contains(w)));
    assert_eq!(scene.sent.iter().filter(said).count(), 1);
}

#[test]
fn one_that_is_missed_is_asked_for_until_somebody_takes_it_and_is_there_when_it_joins() {
    let mut scene = trains(Policy::Act);
    is_lost(&mut scene, 2);
    scene.passes(20_000);
    assert!(
        matches!(&scene.provisions[..], [Request { id: 1, remedy: Remedy::Add { .. }, .. }]),
        "{:?}",
        scene.provisions
    );
    scene.passes(60_000);
    assert_eq!(scene.provisions.len(), 1, "it is under way");
    answers(&mut scene, 1, Err(NotProvisioned("no machine is free".into())));
    scene.passes(4000);
    assert_eq!(scene.provisions.len(), 1);
    scene.passes(2000);
    assert_eq!(scene.provisions.iter().map(|r| r.id).collect::<Vec<_>>(), [1, 1], "again, under the same number");
    answers(&mut scene, 1, Ok(()));
    scene.passes(100_000);
    assert_eq!(stages(&scene), [Stage::Taken]);
    join(&mut scene, 7, Policy::Act);
    assert_eq!(stages(&scene), [Stage::Done]);
    scene.passes(100_000);
    assert_eq!(scene.provisions.len(), 2, "all are there");
}

#[test]
fn what_cannot_be_done_is_said_after_some_tries() {
    let mut scene = trains(Policy::Act);
    is_lost(&mut scene, 2);
    for tries in 1..=5 {
        scene.passes(90_000);
        assert_eq!(scene.provisions.len(), tries);
        answers(&mut scene, 1, Err(NotProvisioned("quota".into())));
    }
    assert_eq!(stages(&scene), [Stage::Failed { why: "quota".into() }]);
    assert!(scene.sent.iter().any(|o| matches!(o, Order::Notice { what } if what.contains("quota"))));
}

#[test]
fn a_bad_machine_waits_for_a_yes() {
    let mut scene = trains(Policy::Advise);
    let generation = scene.job().record().generation;
    let text = "RuntimeError: CUDA error: uncorrectable ECC error encountered";
    scene.says(1, Report::Crew(generation, CrewReport::WorkerFailed(failure(1, Outcome::Code(1), text, 9))));
    scene.stopped(0..3);
    let requests = scene.job().record().machines.requests();
    assert!(
        matches!(requests, [Request { remedy: Remedy::Cordon { node, host, .. }, stage: Stage::Asked, .. }] if node.0 == "1" && host == "h1"),
        "{requests:?}"
    );
    assert!(scene.provisions.is_empty());
    scene.event(Event::Approved { job: JobId("j".into()), id: 1 });
    assert_eq!(scene.provisions.len(), 1);
    assert!(scene.job().may_approve(1).unwrap_err().to_string().contains("already been decided"));
    answers(&mut scene, 1, Ok(()));
    assert_eq!(stages(&scene).first(), Some(&Stage::Done));
}

#[test]
fn a_coordinator_that_starts_again_asks_again_under_the_same_number() {
    let mut scene = trains(Policy::Act);
    is_lost(&mut scene, 2);
    scene.passes(20_000);
    let record = scene.job().record().clone();
    scene.core = Coordinator::new(Epoch(2), vec![(record, scene.version)], Time(scene.now));
    scene.passes(100);
    assert_eq!(scene.provisions.iter().map(|r| r.id).collect::<Vec<_>>(), [1, 1]);
}
