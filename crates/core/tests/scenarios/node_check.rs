//! When a job's nodes are checked, and what follows from the result.

use crate::scene::{Scene, failure};
use everstep_core::coordinator::command::{Fact, Reason};
use everstep_core::id::Rank;
use everstep_core::message::{Check, Checked, CrewReport, Offers, Order, Outcome, RankOffers, Report};
use everstep_core::node_check::Speed;
use everstep_core::spec::{CheckWhen, JobSpec, RestartBudget};

const CASCADE: &str = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:41234";

/// Four nodes with one rank each.
fn gathered(min: u32, check: CheckWhen) -> Scene {
    let mut scene = Scene::new();
    for node in 0..4 {
        let spec = JobSpec { check, ..Scene::spec((min, 4), RestartBudget::PerDayAfterFirstStep(10)) };
        scene.join(node, 1, 1, spec);
    }
    scene
}

/// Answers every check as nodes do if `bad` is bad; returns the number of rounds.
fn answer(scene: &mut Scene, bad: Option<u64>) -> u32 {
    let mut rounds = 0;
    while !scene.asked.is_empty() {
        for (node, order) in std::mem::take(&mut scene.asked) {
            let Order::Check(Check { check, round, measure, partners }) = order else { unreachable!() };
            rounds = round;
            let well = |with: &str| bad.is_none_or(|b| node != b && with != b.to_string());
            let pairs = partners.iter().map(|p| (p.node.clone(), well(&p.node.0).then_some(900))).collect();
            let speed = measure.then_some(Ok(Speed { compute: 10, memory: 10 }));
            scene.says(node, Report::Checked(Checked { check, round, speed, pairs, cannot: None }));
        }
    }
    rounds
}

#[test]
fn a_bad_node_takes_no_part_in_the_first_world() {
    let mut scene = gathered(3, CheckWhen::First);
    assert!(scene.started().is_empty() && matches!(scene.job().reason(), Reason::Checking { round: 1 }));
    assert_eq!(answer(&mut scene, Some(1)), 2);
    scene.passes(3000);
    assert_eq!(scene.world(), ["0", "2", "3"]);
    assert!(scene.job().record().machines.excluded().iter().all(|e| e.barred && e.class == "check-failed"));
}

#[test]
fn a_node_that_is_gone_in_the_middle_is_not_waited_for() {
    let mut scene = gathered(3, CheckWhen::First);
    let asked: Vec<_> = scene.asked.drain(..).filter(|(node, _)| *node != 3).collect();
    scene.asked = asked;
    answer(&mut scene, None);
    assert!(scene.started().is_empty(), "node 3 may still answer");
    scene.event(everstep_core::coordinator::event::Event::Lost { session: everstep_core::id::Session(4) });
    scene.passes(3000);
    answer(&mut scene, None);
    scene.passes(3000);
    assert_eq!(scene.world(), ["0", "1", "2"]);
    assert!(scene.job().record().machines.excluded().is_empty());
}

#[test]
fn a_check_by_hand_ends_with_what_it_found() {
    for (bad, code, words) in [(None, 0, "nothing is wrong"), (Some(3), 1, "node 3 is bad")] {
        let mut scene = gathered(4, CheckWhen::Only);
        answer(&mut scene, bad);
        let (over, why) = scene.over().unwrap();
        assert!(over == code && why.contains(words), "{over} {why}");
        assert!(scene.started().is_empty());
    }
}

#[test]
fn who_cannot_check_says_so_and_the_job_goes_on() {
    let mut scene = gathered(4, CheckWhen::First);
    let Some((0, Order::Check(Check { check, round, .. }))) = scene.asked.first().cloned() else { unreachable!() };
    let cannot = Some("no torch".into());
    scene.says(0, Report::Checked(Checked { check, round, cannot, ..Checked::default() }));
    assert_eq!(scene.started(), [1]);
    assert!(scene.sent.iter().any(|o| matches!(o, Order::Notice { what } if what.contains("no torch"))));
}

/// Every failure is only a consequence of another one: the second time, the machines are checked.
#[test]
fn a_second_failure_that_nothing_explains_is_followed_by_a_check() {
    let mut scene = gathered(3, CheckWhen::OnTrouble);
    let fails = |scene: &mut Scene| {
        let generation = scene.job().record().generation;
        let failure = failure(2, Outcome::Code(1), CASCADE, 7);
        scene.says(2, Report::Crew(generation, CrewReport::WorkerFailed(failure)));
        scene.stopped(0..4);
    };
    fails(&mut scene);
    assert_eq!(scene.started(), [1, 2], "the first one is followed by a restart at once");
    scene.passes(10_000);
    fails(&mut scene);
    assert_eq!(scene.started(), [1, 2], "whether anything explains it is heard first");
    scene.passes(5000);
    assert!(matches!(scene.job().reason(), Reason::Checking { round: 1 }));
    answer(&mut scene, Some(2));
    scene.passes(3000);
    assert_eq!((scene.started(), scene.world()), (vec![1, 2, 3], vec!["0".into(), "1".into(), "3".into()]));
    let found = scene.facts.iter().find_map(|f| if let Fact::Checked { found, .. } = f { Some(found) } else { None });
    assert_eq!(found.unwrap().to_string(), "node 2 is bad (collectives with two good nodes failed)");
}

#[test]
fn a_failure_that_is_explained_in_time_is_not_followed_by_one() {
    let mut scene = gathered(3, CheckWhen::OnTrouble);
    for round in 1..=3 {
        let generation = scene.job().record().generation;
        // Offers make restarts possible, so that an error of the script does not end the job.
        scene.says(
            0,
            Report::Crew(generation, CrewReport::Offers(RankOffers { rank: Rank(0), offers: Offers::default() })),
        );
        scene.says(2, Report::Crew(generation, CrewReport::WorkerFailed(failure(2, Outcome::Code(1), CASCADE, 7))));
        scene.stopped(0..4);
        if round > 1 {
            let own = failure(1, Outcome::Code(1), "torch.OutOfMemoryError: CUDA out of memory", 7 + round);
            scene.says(1, Report::Crew(generation, CrewReport::WorkerFailed(own)));
        }
        scene.passes(10_000);
    }
    assert!(scene.asked.is_empty());
    assert_eq!(scene.started(), [1, 2, 3, 4]);
}
