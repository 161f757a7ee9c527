//! When a durable checkpoint is complete, and what the coordinator remembers of it until then.

use crate::scene::Scene;
use everstep_core::id::{Generation, Rank, Step};
use everstep_core::message::{CrewOrder, CrewReport, Order, Publish, Purpose, Report, ShardFile, ShardWritten};
use everstep_core::spec::RestartBudget;

const GENERATION: Generation = Generation(1);

fn two_nodes() -> Scene {
    let mut scene = Scene::new();
    for node in 0..2 {
        scene.join(node, node + 10, 1, Scene::spec((2, 2), RestartBudget::Exactly(0)));
    }
    scene.passes(3000);
    assert_eq!(scene.started(), [1]);
    scene
}

fn written(scene: &mut Scene, rank: u32, step: u64) {
    written_of(scene, rank, step, GENERATION);
}

fn written_of(scene: &mut Scene, rank: u32, step: u64, captured: Generation) {
    let shard = ShardFile {
        rank: Rank(rank),
        file: format!("rank-{rank}.safetensors"),
        bytes: 1,
        crc: "0".repeat(16),
        purpose: Purpose::Recovery,
        objects: std::collections::BTreeSet::new(),
    };
    scene.says(
        rank.into(),
        Report::Crew(
            GENERATION,
            CrewReport::ShardWritten(ShardWritten { step: Step(step), captured, directory: "out".into(), shard }),
        ),
    );
}

fn publications(scene: &Scene) -> Vec<u64> {
    let step =
        |o: &Order| if let Order::Crew(_, CrewOrder::Publish(Publish { step, .. })) = o { Some(step.0) } else { None };
    scene.sent.iter().filter_map(step).collect()
}

/// A step that the user saves after it was due is written after later steps, on some nodes before
/// one of them is published and on others afterwards.
#[test]
fn publishing_a_step_forgets_nothing_of_an_older_one() {
    let mut scene = two_nodes();
    written(&mut scene, 0, 10);
    written(&mut scene, 0, 20);
    written(&mut scene, 1, 20);
    assert_eq!(publications(&scene), [20]);
    scene.says(0, Report::Crew(GENERATION, CrewReport::Published(Step(20))));
    written(&mut scene, 1, 10);
    assert_eq!(publications(&scene), [20, 10]);
    // The durable step is still the newest one.
    scene.says(0, Report::Crew(GENERATION, CrewReport::Published(Step(10))));
    assert_eq!(scene.job().record().durable, Some(Step(20)));
}

/// A rank of an earlier generation had a step in memory, and another one did not: what both save
/// later under the same number is not completed by it.
#[test]
fn shards_of_several_generations_are_no_checkpoint() {
    let mut scene = two_nodes();
    let captured = |scene: &Scene| {
        let of = |o: &Order| match o {
            Order::Crew(_, CrewOrder::Publish(Publish { step, captured, .. })) => Some((step.0, captured.0)),
            _ => None,
        };
        scene.sent.iter().filter_map(of).collect::<Vec<_>>()
    };
    written_of(&mut scene, 0, 5, Generation(0));
    written(&mut scene, 1, 5);
    assert!(captured(&scene).is_empty());
    written(&mut scene, 0, 5);
    assert_eq!(captured(&scene), [(5, 1)]);
    // What every rank still had of an earlier generation is complete.
    written_of(&mut scene, 0, 6, Generation(0));
    written_of(&mut scene, 1, 6, Generation(0));
    assert_eq!(captured(&scene), [(5, 1), (6, 0)]);
}

/// Shards of steps that other ranks could not write are not kept forever.
#[test]
fn incomplete_steps_are_forgotten_in_the_end() {
    let mut scene = two_nodes();
    for step in 1..100 {
        written(&mut scene, 0, step);
    }
    written(&mut scene, 0, 100);
    written(&mut scene, 1, 100);
    scene.says(0, Report::Crew(GENERATION, CrewReport::Published(Step(100))));
    written(&mut scene, 1, 1);
    assert_eq!(publications(&scene), [100]);
    written(&mut scene, 1, 99);
    assert_eq!(publications(&scene), [100, 99]);
}
