//! What happens where the ranks have found checkpoints and have none in common.
#![allow(clippy::unwrap_used)]

mod scene;

use everstep_core::id::{Generation, Rank, Step};
use everstep_core::message::{Offer, Offers, Order, Report, Tier};
use everstep_core::spec::RestartBudget;
use scene::Scene;

fn durable(steps: &[u64]) -> Offers {
    let offer = |s: &u64| Offer { step: Step(*s), tier: Tier::Durable, generation: Generation(0) };
    Offers::any(steps.iter().map(offer).collect(), false)
}

/// Two nodes with one rank each that offer this. Returns the step that each is told, and whether
/// checkpoints were found.
fn told(offers: [Offers; 2]) -> (Scene, Vec<(Option<u64>, bool)>) {
    let mut scene = Scene::new();
    let generation = Generation(1);
    for node in 0..2 {
        scene.join(node, node + 10, 1, Scene::spec((2, 2), RestartBudget::Exactly(0)));
    }
    scene.passes(3000);
    for (node, offers) in (0..).zip(offers) {
        scene.says(node, Report::Holds { generation, held: vec![], parity: vec![] });
        let rank = Rank(u32::try_from(node).unwrap());
        scene.says(node, Report::Offers { generation, rank, offers });
    }
    let step = |o: &Order| {
        if let Order::Restore { step, found, .. } = o { Some((step.map(|s| s.0), *found)) } else { None }
    };
    let told = scene.sent.iter().filter_map(step).collect();
    (scene, told)
}

#[test]
fn no_rank_starts_fresh_where_one_has_found_checkpoints() {
    let unreadable = Offers { found: true, ..durable(&[]) };
    let apart = [[durable(&[20, 15]), durable(&[10, 5])], [durable(&[20]), durable(&[])], [unreadable, durable(&[])]];
    for offers in apart {
        let (scene, told) = told(offers.clone());
        assert_eq!(told, [(None, true); 2], "{offers:?}");
        assert!(scene.job().record.restored.is_empty(), "a fresh start would make what came before another past");
    }
}

#[test]
fn without_any_checkpoint_all_ranks_start_fresh() {
    let (scene, told) = told([durable(&[]), durable(&[])]);
    assert_eq!(told, [(None, false); 2]);
    assert_eq!(scene.job().record.restored, [(Generation(1), Step(0))]);
}

#[test]
fn ranks_that_read_different_checkpoints_restore_the_newest_that_all_read() {
    let (_, told) = told([durable(&[20, 15, 10, 5]), durable(&[10, 5])]);
    assert_eq!(told, [(Some(10), true); 2]);
}
