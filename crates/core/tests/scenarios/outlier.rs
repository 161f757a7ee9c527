//! A detector names a machine: the finding is reported, and with `--policy act` the job continues
//! without the machine from a step that all ranks hold.

use crate::scene::Scene;
use everstep_core::coordinator::command::{Action, Fact};
use everstep_core::coordinator::event::Event;
use everstep_core::coordinator::finding::Finding;
use everstep_core::coordinator::job::Phase;
use everstep_core::coordinator::request::{Remedy, Stage};
use everstep_core::history::{Entry, incidents, narrative};
use everstep_core::id::{JobId, NodeId, Step};
use everstep_core::message::{CrewReport, FirstStep, Order, Report};
use everstep_core::spec::{JobSpec, Policy, RestartBudget};

/// Four nodes that train, of which `least` are needed.
fn four(policy: Policy, least: u32) -> Scene {
    let mut scene = Scene::new();
    for node in 0..4 {
        join(&mut scene, node, policy, least);
    }
    scene.passes(60_000);
    trains(&mut scene, 0..4);
    scene.passes(5000);
    assert_eq!(scene.world(), ["0", "1", "2", "3"]);
    scene
}

fn join(scene: &mut Scene, node: u64, policy: Policy, least: u32) {
    let of = Scene::spec((least, 4), RestartBudget::PerDayAfterFirstStep(10));
    scene.join(node, 1, 1, JobSpec { policy, ..of });
}

fn trains(scene: &mut Scene, nodes: impl IntoIterator<Item = u64>) {
    let generation = scene.job().record().generation;
    for node in nodes {
        scene.says(
            node,
            Report::Crew(generation, CrewReport::FirstStep(FirstStep { step: Step(1), from: Some(Step(0)) })),
        );
    }
}

/// Waits until all nodes are told to end their workers, and lets them do so.
fn forms_anew(scene: &mut Scene, nodes: u64) {
    for _ in 0..600 {
        if matches!(scene.job().phase(), Phase::Forming { .. }) {
            break;
        }
        scene.passes(100);
    }
    assert!(matches!(scene.job().phase(), Phase::Forming { .. }), "{:?}", scene.job().phase());
    scene.stopped(0..nodes);
    scene.passes(5000);
}

fn finds(scene: &mut Scene, nodes: &[&str], sure: bool, group: bool) {
    let nodes = nodes.iter().map(|n| NodeId((*n).into())).collect();
    let metrics = vec!["net-queue".into(), "cpu".into()];
    let finding = Finding { nodes, metrics, score: 1234, group, sure, picture: "/p.svg".into() };
    scene.event(Event::Unlike { job: JobId("j".into()), finding });
}

fn told(scene: &Scene) -> usize {
    scene.facts.iter().filter(|f| matches!(f, Fact::Unlike { .. })).count()
}

fn stages(scene: &Scene) -> Vec<&'static str> {
    scene.job().record().machines.requests().iter().map(|r| r.stage.name()).collect()
}

#[test]
fn observing_says_it_and_trains_on() {
    let mut scene = four(Policy::Observe, 2);
    finds(&mut scene, &["2"], true, false);
    scene.passes(60_000);
    assert_eq!((told(&scene), stages(&scene)), (1, vec!["noted"]));
    assert_eq!(scene.started(), [1], "nothing was restarted");
    let said = |o: &&Order| matches!(o, Order::Notice { what } if what.contains("node 2 behaves unlike its peers: net-queue, cpu (12.3"));
    assert!(scene.sent.iter().any(|o| said(&o)), "{:?}", scene.sent);
    let entries: Vec<Entry> = scene.facts.iter().map(|f| Entry { at: 1, fact: f.clone() }).collect();
    let all = incidents(&entries);
    let [one] = &all[..] else { panic!("{all:?}") };
    assert_eq!((one.at_fault().0.as_str(), one.class(), one.action), ("2", "machine-outlier", Action::Tell));
    let lines = narrative(one, "j", "now").join("\n");
    assert!(lines.contains("training continues") && lines.contains("net-queue"), "{lines}");
    assert!(lines.contains("Picture  /p.svg"), "{lines}");
}

#[test]
fn acting_goes_on_without_it_from_a_step_boundary_and_marks_it() {
    let mut scene = four(Policy::Act, 2);
    finds(&mut scene, &["2"], true, false);
    forms_anew(&mut scene, 4);
    assert_eq!(scene.world(), ["0", "1", "3"]);
    trains(&mut scene, [0, 1, 3]);
    scene.passes(60_000);
    assert_eq!(scene.world(), ["0", "1", "3"], "it is not taken in again");
    assert!(scene.provisions.iter().any(|r| matches!(&r.remedy, Remedy::Cordon { node, .. } if node.0 == "2")));
    assert!(scene.provisions.iter().any(|r| matches!(&r.remedy, Remedy::Add { .. })), "another one is asked for");
    assert_eq!(scene.job().record().restarts(), 0, "no failure, no restart");
}

#[test]
fn a_machine_that_is_needed_stays_until_another_one_is_there() {
    let mut scene = four(Policy::Act, 4);
    finds(&mut scene, &["2"], true, false);
    scene.passes(60_000);
    assert_eq!((scene.world().len(), scene.started()), (4, vec![1]));
    join(&mut scene, 4, Policy::Act, 4);
    forms_anew(&mut scene, 4);
    assert_eq!(scene.world(), ["0", "1", "3", "4"]);
}

#[test]
fn one_witness_is_a_suspect_and_a_group_is_nobodys_fault() {
    for (nodes, sure, group, words) in [
        (&["2"][..], false, false, "node 2 may be behaving unlike its peers (only one family"),
        (&["1", "2", "3"][..], true, true, "nodes 1, 2, 3 deviate from their peers together: net-queue, cpu (12.3"),
        (&["2"][..], true, true, "node 2 deviates from its peers, together with others: "),
    ] {
        let mut scene = four(Policy::Act, 1);
        finds(&mut scene, nodes, sure, group);
        scene.passes(60_000);
        assert_eq!((told(&scene), scene.started(), stages(&scene)), (1, vec![1], vec![]));
        let said = |o: &Order| matches!(o, Order::Notice { what } if what.contains(words));
        assert!(scene.sent.iter().any(said), "{:?}", scene.sent);
    }
}

#[test]
fn a_person_decides_where_one_is_asked() {
    let mut scene = four(Policy::Advise, 2);
    finds(&mut scene, &["2"], true, false);
    finds(&mut scene, &["7"], true, false);
    assert_eq!((told(&scene), stages(&scene)), (1, vec!["waiting"]), "nobody knows a node 7");
    scene.event(Event::Approved { job: JobId("j".into()), id: 1 });
    forms_anew(&mut scene, 4);
    assert_eq!(scene.world(), ["0", "1", "3"]);
    let marked: Vec<&Stage> = scene
        .job()
        .record()
        .machines
        .requests()
        .iter()
        .filter(|r| matches!(r.remedy, Remedy::Cordon { .. }))
        .map(|r| &r.stage)
        .collect();
    assert_eq!(marked.len(), 1, "marked once: {marked:?}");
}
