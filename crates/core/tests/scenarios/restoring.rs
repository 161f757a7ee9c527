//! What happens where the ranks have found checkpoints and have none in common.

use crate::scene::{Scene, failure};
use everstep_core::coordinator::command::Fact;
use everstep_core::id::{Generation, Rank, Step};
use everstep_core::message::{
    CrewOrder, CrewReport, Holdings, Offer, Offers, Order, Outcome, RankOffers, Report, Restore, Tier,
};
use everstep_core::spec::RestartBudget;

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
        scene.says(node, Report::Crew(generation, CrewReport::Holds(Holdings { held: vec![], parity: vec![] })));
        let rank = Rank(u32::try_from(node).unwrap());
        scene.says(node, Report::Crew(generation, CrewReport::Offers(RankOffers { rank, offers })));
    }
    let step = |o: &Order| {
        if let Order::Crew(_, CrewOrder::Restore(Restore { step, found, .. })) = o {
            Some((step.map(|s| s.0), *found))
        } else {
            None
        }
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
        assert!(scene.job().record().restored.is_empty(), "a fresh start would make what came before another past");
    }
}

#[test]
fn without_any_checkpoint_all_ranks_start_fresh() {
    let (scene, told) = told([durable(&[]), durable(&[])]);
    assert_eq!(told, [(None, false); 2]);
    assert_eq!(scene.job().record().restored, [(Generation(1), Step(0))]);
}

#[test]
fn ranks_that_read_different_checkpoints_restore_the_newest_that_all_read() {
    let (_, told) = told([durable(&[20, 15, 10, 5]), durable(&[10, 5])]);
    assert_eq!(told, [(Some(10), true); 2]);
}

/// One rank that has published step 20 and failed, and offers this in its second life.
fn after_20_was_durable(offers: Offers) -> Scene {
    let (mut scene, generation) = (Scene::new(), Generation(2));
    scene.join(0, 10, 1, Scene::spec((1, 1), RestartBudget::Exactly(3)));
    scene.passes(3000);
    scene.says(0, Report::Crew(Generation(1), CrewReport::Holds(Holdings { held: vec![], parity: vec![] })));
    scene.says(0, Report::Crew(Generation(1), CrewReport::Offers(RankOffers { rank: Rank(0), offers: durable(&[]) })));
    scene.says(0, Report::Crew(Generation(1), CrewReport::Published(Step(20))));
    assert_eq!(scene.job().record().durable, Some(Step(20)));
    let failure = failure(0, Outcome::Code(7), "", 25);
    scene.says(0, Report::Crew(Generation(1), CrewReport::WorkerFailed(failure)));
    scene.stopped([0]);
    scene.passes(10_000);
    assert_eq!(scene.started(), [1, 2]);
    scene.sent.clear();
    scene.says(0, Report::Crew(generation, CrewReport::Holds(Holdings { held: vec![], parity: vec![] })));
    scene.says(0, Report::Crew(generation, CrewReport::Offers(RankOffers { rank: Rank(0), offers })));
    scene
}

/// Whether what is restored must be written to durable storage.
fn is_in_memory_only(scene: &Scene) -> Option<bool> {
    scene.sent.iter().find_map(|o| {
        if let Order::Crew(_, CrewOrder::Restore(Restore { persist, .. })) = o { Some(*persist) } else { None }
    })
}

#[test]
fn a_checkpoint_of_an_abandoned_branch_is_not_the_newest_any_more() {
    let mut back = after_20_was_durable(Offers { wanted: Some(Step(10)), ..durable(&[20, 10]) });
    assert_eq!((back.job().record().durable, is_in_memory_only(&back)), (Some(Step(10)), Some(false)));
    back.facts.clear();
    back.says(0, Report::Crew(Generation(2), CrewReport::Published(Step(15))));
    assert_eq!(back.job().record().durable, Some(Step(15)));
    assert_eq!(back.facts, [Fact::Published { step: Step(15) }]);
    let on = after_20_was_durable(durable(&[20, 10]));
    assert_eq!((on.job().record().durable, is_in_memory_only(&on)), (Some(Step(20)), Some(false)));
}

#[test]
fn what_is_restored_from_memory_past_a_damaged_checkpoint_is_made_durable() {
    let captured = Offer { step: Step(15), tier: Tier::Memory, generation: Generation(1) };
    let mut offers = durable(&[10]);
    offers.held.push(captured);
    let scene = after_20_was_durable(offers);
    assert_eq!((scene.job().record().durable, is_in_memory_only(&scene)), (Some(Step(10)), Some(true)));
    let nothing_older = after_20_was_durable(Offers::any(vec![captured], false));
    assert_eq!((nothing_older.job().record().durable, is_in_memory_only(&nothing_older)), (None, Some(true)));
}
