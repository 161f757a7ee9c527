//! Two jobs on one coordinator: the plan exists before a node is lost, and a node moves to the job
//! in which it is worth more.

use crate::scene::Scene;
use everstep_core::coordinator::command::Fact;
use everstep_core::coordinator::event::Event;
use everstep_core::coordinator::job::{Job, Phase};
use everstep_core::coordinator::request::{Remedy, Stage};
use everstep_core::id::{JobId, Session, Step};
use everstep_core::message::{CrewOrder, CrewReport, ExitReason, FirstStep, Order, Report, Stopped};
use everstep_core::spec::{JobSpec, Policy, RestartBudget};
use everstep_core::time::Time;
use everstep_planner::file::read;
use everstep_planner::{Mode, Problem};

/// On three nodes, `large` is worth four times as much as `small`; on two, hardly anything.
fn known() -> Problem {
    let jobs = r#"
        [[job]]
        id = "large"
        weight = 2
        min = 1
        throughput = { 1 = "1 TFLOP/s", 2 = "2 TFLOP/s", 3 = "90 TFLOP/s" }
        regroup = "10s"

        [[job]]
        id = "small"
        min = 1
        throughput = { 1 = "10 TFLOP/s", 2 = "20 TFLOP/s", 3 = "30 TFLOP/s", 4 = "40 TFLOP/s" }
        regroup = "10s"
    "#;
    let cluster = "nodes = 6\ngpus_per_node = 8\npeak = \"100 TFLOP/s\"\nnode_mtbf = \"100d\"";
    read(cluster, jobs, Mode::Floor).unwrap().problem
}

/// Three nodes for each job: 0 to 2 for `large`, 3 to 5 for `small`.
fn both(policy: Policy) -> Scene {
    let mut scene = Scene::new();
    scene.core = scene.core.clone().planning(known(), Time(0));
    for node in 0..6 {
        join(&mut scene, node, if node < 3 { "large" } else { "small" }, policy);
    }
    trains(&mut scene, 0..6);
    scene.passes(5000);
    scene
}

fn join(scene: &mut Scene, node: u64, job: &str, policy: Policy) {
    let of = Scene::spec((1, 4), RestartBudget::PerDayAfterFirstStep(10));
    scene.join(node, 1, 1, JobSpec { job: JobId(job.into()), policy, ..of });
    // Each world forms once its nodes have gathered.
    if node % 3 == 2 {
        scene.passes(60_000);
    }
}

fn trains(scene: &mut Scene, nodes: impl IntoIterator<Item = u64>) {
    for node in nodes {
        let generation = of(scene, if node < 3 { "large" } else { "small" }).record().generation;
        scene.says(
            node,
            Report::Crew(generation, CrewReport::FirstStep(FirstStep { step: Step(1), from: Some(Step(0)) })),
        );
    }
}

fn of<'s>(scene: &'s Scene, job: &str) -> &'s Job {
    &scene.core.jobs()[&JobId(job.into())]
}

fn size(scene: &Scene, job: &str) -> usize {
    let job = of(scene, job);
    if matches!(job.phase(), Phase::Training { .. }) { job.record().world.slots.len() } else { 0 }
}

fn stopped(scene: &mut Scene, job: &str, nodes: impl IntoIterator<Item = u64>) {
    let generation = of(scene, job).record().generation;
    for node in nodes {
        scene.says(node, Report::Crew(generation, CrewReport::Stopped(Stopped { store_port: 1, reached: None })));
    }
}

fn planned(scene: &Scene) -> Vec<(String, bool, Vec<u32>)> {
    let all = scene.facts.iter().filter_map(|f| match f {
        Fact::Planned { change, from_table, units, .. } => {
            Some((change.clone(), *from_table, units.values().copied().collect()))
        }
        _ => None,
    });
    all.collect()
}

fn node_of_large_is_lost(scene: &mut Scene) {
    scene.event(Event::Lost { session: Session(3) });
    scene.passes(1000);
    stopped(scene, "large", 0..2);
    scene.passes(1000);
    trains(scene, 0..2);
}

#[test]
fn the_plan_is_there_before_the_node_is_lost() {
    let mut scene = both(Policy::Observe);
    assert_eq!((size(&scene, "large"), size(&scene, "small")), (3, 3));
    assert_eq!(scene.core.plans_ready(), 6, "lose and finish by job, join, lose an idle one");
    assert!(planned(&scene).is_empty(), "{:?}", planned(&scene));
    node_of_large_is_lost(&mut scene);
    assert_eq!(planned(&scene), [("job large has lost a node".to_owned(), true, vec![3, 2])]);
    assert_eq!(size(&scene, "large"), 2, "it goes on with what is there");
    scene.passes(20_000);
    let moves: Vec<&Stage> = of(&scene, "small").record().machines.requests().iter().map(|r| &r.stage).collect();
    assert_eq!(moves, [&Stage::Noted], "only said");
    assert_eq!(size(&scene, "small"), 3);
    assert!(
        scene
            .sent
            .iter()
            .any(|o| matches!(o, Order::Notice { what } if what.contains("move node 5 (h5) to job large")))
    );
}

#[test]
fn a_node_that_comes_back_at_once_moves_nothing() {
    let mut scene = both(Policy::Act);
    node_of_large_is_lost(&mut scene);
    assert_eq!(planned(&scene).len(), 1);
    scene.join(2, 2, 1, of(&scene, "large").record().spec.clone());
    scene.passes(120_000);
    assert!(of(&scene, "small").record().machines.requests().is_empty());
}

#[test]
fn its_job_goes_on_without_it_before_anybody_is_asked_to_move_it() {
    let mut scene = both(Policy::Act);
    node_of_large_is_lost(&mut scene);
    scene.passes(20_000);
    assert!(scene.provisions.iter().all(|r| !matches!(r.remedy, Remedy::Move { .. })), "it still trains there");
    let fenced = scene.sent.iter().filter(|o| matches!(o, Order::Crew(_, CrewOrder::Fence { .. }))).count();
    assert!(fenced >= 3, "small forms anew");
    stopped(&mut scene, "small", 3..6);
    scene.passes(1000);
    assert_eq!(size(&scene, "small"), 2);
    assert!(
        scene.sent.iter().any(|o| matches!(o, Order::Leave(ExitReason { code: 0, why }) if why.contains("node 5")))
    );
    trains(&mut scene, 3..5);
    scene.passes(1000);
    let moved: Vec<_> = scene.provisions.iter().filter(|r| matches!(r.remedy, Remedy::Move { .. })).collect();
    assert!(
        matches!(&moved[..], [r] if matches!(&r.remedy, Remedy::Move { node, to, .. } if node.0 == "5" && to.0 == "large")),
        "{:?}",
        scene.provisions
    );
    let id = moved[0].id;
    scene.event(Event::Provisioned { job: JobId("small".into()), id, result: Ok(()) });
    assert_eq!(of(&scene, "small").record().restarts(), 0, "no failure of that job");
    // The node's agent comes back as a node of the other job.
    scene.join(9, 1, 1, of(&scene, "large").record().spec.clone());
    scene.passes(60_000);
    stopped(&mut scene, "large", [0, 1, 9]);
    scene.passes(60_000);
    assert_eq!((size(&scene, "large"), size(&scene, "small")), (3, 2));
    let asks = |job: &str| {
        of(&scene, job).record().machines.requests().iter().filter(|r| matches!(r.remedy, Remedy::Add { .. })).count()
    };
    assert_eq!(asks("small"), 0, "what was given away is not missed");
}

#[test]
fn jobs_that_nobody_has_described_are_left_alone() {
    let mut scene = Scene::new();
    let mut few = known();
    few.jobs.truncate(1);
    scene.core = scene.core.clone().planning(few, Time(0));
    for node in 0..6 {
        join(&mut scene, node, if node < 3 { "large" } else { "small" }, Policy::Act);
    }
    trains(&mut scene, 0..6);
    scene.passes(5000);
    assert_eq!(scene.core.plans_ready(), 0, "one job has nobody to share with");
    node_of_large_is_lost(&mut scene);
    scene.passes(120_000);
    assert!(of(&scene, "small").record().machines.requests().is_empty());
}
