//! Whether the training is over when some ranks end and others crash.

use crate::scene::{Scene, failure};
use everstep_core::coordinator::command::Fact;
use everstep_core::history::{Entry, notes};
use everstep_core::id::{Generation, Rank, Step};
use everstep_core::message::{
    Cause, CrewOrder, CrewReport, Ended, Extent, Failure, HowEnded, Offers, Order, Outcome, RankOffers, Report,
};
use everstep_core::spec::RestartBudget;

const PER_DAY: RestartBudget = RestartBudget::PerDayAfterFirstStep(10);

/// Two nodes with one rank each, in their first generation.
fn job(restarts: RestartBudget) -> Scene {
    let mut scene = Scene::new();
    for node in 0..2 {
        scene.join(node, node + 10, 1, Scene::spec((2, 2), restarts));
    }
    scene.passes(3000);
    assert_eq!(scene.started(), [1]);
    scene
}

fn crash(rank: u32, outcome: Outcome, step: u64) -> Failure {
    failure(rank, outcome, "", step)
}

fn crashes(scene: &mut Scene, failure: Failure) {
    let node = u64::from(failure.rank.0);
    scene.says(node, Report::Crew(Generation(1), CrewReport::WorkerFailed(failure)));
}

fn ends(scene: &mut Scene, rank: u32, step: Option<u64>, how: HowEnded) {
    ends_after(scene, rank, Extent { step: step.map(Step), ..Extent::default() }, how);
}

fn ends_after(scene: &mut Scene, rank: u32, extent: Extent, how: HowEnded) {
    let Extent { step, total, passes } = extent;
    let ended = Ended { rank: Rank(rank), step, total, passes, how };
    scene.says(u64::from(rank), Report::Crew(Generation(1), CrewReport::Ended(ended)));
}

fn has_checkpoints(scene: &mut Scene) {
    let offers = Report::Crew(
        Generation(1),
        CrewReport::Offers(RankOffers { rank: Rank(0), offers: Offers::any(vec![], true) }),
    );
    scene.says(0, offers);
}

fn warned(scene: &Scene) -> bool {
    let told = scene.sent.iter().any(|o| matches!(o, Order::Notice { what } if what.contains("counts as finished")));
    told && scene.facts.iter().any(|f| matches!(f, Fact::LateCrash { .. }))
}

#[test]
fn a_crash_at_the_last_step_of_a_rank_that_ended_is_none_whichever_comes_first() {
    for first in [true, false] {
        let mut scene = job(PER_DAY);
        if first {
            ends(&mut scene, 0, Some(60), HowEnded::Exited);
        }
        crashes(&mut scene, crash(1, Outcome::Signal(6), 60));
        scene.passes(if first { 5000 } else { 600 });
        ends(&mut scene, 0, Some(60), HowEnded::Exited);
        assert_eq!(scene.over().unwrap().0, 0, "{:?}", scene.over());
        assert!(warned(&scene) && scene.started() == [1]);
    }
}

#[test]
fn a_rank_whose_interpreter_shuts_down_is_waited_for() {
    let mut scene = job(PER_DAY);
    ends(&mut scene, 0, Some(60), HowEnded::ShuttingDown);
    crashes(&mut scene, crash(1, Outcome::Code(3), 60));
    scene.passes(8000);
    assert_eq!(scene.over(), None, "rank 0 is still at it");
    ends(&mut scene, 0, Some(60), HowEnded::Crashed(Box::new(crash(0, Outcome::Signal(11), 60))));
    assert_eq!(scene.over().unwrap().0, 0);
    assert_eq!(scene.facts.iter().filter(|f| matches!(f, Fact::LateCrash { .. })).count(), 2);
}

#[test]
fn a_rank_in_the_middle_beside_one_that_ended_fails_the_job() {
    for step in [Some(60), None] {
        let mut scene = job(PER_DAY);
        ends(&mut scene, 0, step, HowEnded::Exited);
        crashes(&mut scene, crash(1, Outcome::Signal(9), 59));
        scene.passes(3000);
        let (code, why) = scene.over().unwrap();
        assert!(code == 1 && why.contains("the training is not finished") && scene.started() == [1], "{code} {why}");
    }
}

const LOST: &str =
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:4";

#[test]
fn a_rank_that_ends_before_the_last_step_has_not_finished_what_the_others_fail_at() {
    // Either of the two may know the total, and the other rank may fail in any way.
    for (of_ended, of_crashed) in [(Some(12), None), (None, Some(12)), (Some(12), Some(12))] {
        for error in [failure(0, Outcome::Code(1), LOST, 6), crash(0, Outcome::Signal(6), 6)] {
            let mut scene = job(PER_DAY);
            let extent = Extent { step: Some(Step(6)), total: of_ended.map(Step), passes: 0 };
            ends_after(&mut scene, 1, extent, HowEnded::Exited);
            crashes(&mut scene, Failure { total: of_crashed.map(Step), ..error });
            scene.stopped([0]);
            scene.passes(60_000);
            let (code, why) = scene.over().unwrap();
            assert_eq!((code, scene.started(), warned(&scene)), (1, vec![1], false), "{why}");
            assert!(why.contains("rank 1 finished at step 6 of 12"), "{why}");
        }
    }
}

#[test]
fn a_rank_that_has_begun_the_next_step_has_more_to_do_than_one_that_ended() {
    // A last pass without a step, as after an incomplete batch, is no next step if all ranks have
    // made it.
    for (passes, with, code) in [(1, 0, 1), (3, 2, 1), (0, 0, 0), (2, 2, 0)] {
        let mut scene = job(PER_DAY);
        let extent = Extent { step: Some(Step(6)), total: None, passes: with };
        ends_after(&mut scene, 1, extent, HowEnded::ShuttingDown);
        ends_after(&mut scene, 1, extent, HowEnded::Exited);
        crashes(&mut scene, Failure { passes, ..failure(0, Outcome::Code(1), LOST, 6) });
        scene.stopped([0]);
        scene.passes(60_000);
        let (ended, why) = scene.over().unwrap();
        assert_eq!((ended, scene.started(), warned(&scene)), (code, vec![1], code == 0), "{why}");
        assert_eq!(why.contains("had already begun the next step"), code == 1, "{why}");
    }
}

#[test]
fn an_end_that_is_known_only_after_a_restart_was_ordered_counts() {
    // The loss of a connection is known at once on another node, and the end that led to it is not.
    for (passes, checkpointed, how) in [
        (1, false, HowEnded::Exited),
        (1, true, HowEnded::ShuttingDown),
        (0, false, HowEnded::Exited),
        (0, true, HowEnded::ShuttingDown),
    ] {
        let mut scene = job(PER_DAY);
        if checkpointed {
            has_checkpoints(&mut scene);
        }
        crashes(&mut scene, Failure { passes, ..failure(0, Outcome::Code(1), LOST, 6) });
        assert!(scene.sent.iter().any(|o| matches!(o, Order::Crew(_, CrewOrder::Fence { .. }))));
        ends(&mut scene, 1, Some(6), how);
        scene.stopped([0, 1]);
        scene.passes(60_000);
        let (code, why) = scene.over().unwrap();
        let said = if passes == 0 { "counts as finished" } else { "the training is not finished" };
        assert!(code == passes as i32 && why.contains(said) && scene.started() == [1], "{code} {why}");
    }
}

#[test]
fn a_third_rank_that_has_not_ended_is_started_again() {
    let mut scene = Scene::new();
    for node in 0..3 {
        scene.join(node, node + 10, 1, Scene::spec((3, 3), PER_DAY));
    }
    scene.passes(3000);
    crashes(&mut scene, failure(0, Outcome::Code(1), LOST, 6));
    ends(&mut scene, 1, Some(6), HowEnded::Exited);
    scene.stopped([0, 1, 2]);
    scene.passes(60_000);
    assert_eq!((scene.started(), scene.over()), (vec![1, 2], None));
}

#[test]
fn a_third_rank_that_fails_where_another_one_has_ended_makes_the_end_complete() {
    let mut scene = Scene::new();
    for node in 0..3 {
        scene.join(node, node + 10, 1, Scene::spec((3, 3), PER_DAY));
    }
    scene.passes(3000);
    crashes(&mut scene, failure(0, Outcome::Code(1), LOST, 60));
    ends(&mut scene, 1, Some(60), HowEnded::Exited);
    crashes(&mut scene, failure(2, Outcome::Code(1), LOST, 60));
    scene.stopped([0, 1, 2]);
    scene.passes(60_000);
    let (code, why) = scene.over().unwrap();
    assert!(code == 0 && why.contains("counts as finished") && scene.started() == [1], "{code} {why}");
}

#[test]
fn a_rank_is_not_its_own_proof_that_all_have_ended() {
    let mut scene = job(PER_DAY);
    crashes(&mut scene, failure(0, Outcome::Code(1), "ValueError: batch of 31", 7));
    ends(&mut scene, 0, Some(7), HowEnded::Exited);
    scene.passes(5000);
    assert_eq!((scene.over().unwrap().0, warned(&scene)), (1, false), "{:?}", scene.over());
}

#[test]
fn an_exit_code_that_follows_the_end_of_the_script_is_its_own() {
    // `raise SystemExit(1)` cannot be seen before the process ends with it.
    let mut scene = job(PER_DAY);
    ends(&mut scene, 0, Some(7), HowEnded::ShuttingDown);
    crashes(&mut scene, crash(0, Outcome::Code(1), 7));
    scene.passes(1100);
    scene.stopped([0, 1]);
    scene.passes(5000);
    assert_eq!((scene.over().unwrap().0, warned(&scene)), (1, false), "{:?}", scene.over());
}

#[test]
fn ranks_that_all_exit_with_a_code_have_not_finished() {
    for (checkpointed, code) in [(false, Some(1)), (true, None)] {
        let mut scene = job(PER_DAY);
        if checkpointed {
            has_checkpoints(&mut scene);
        }
        (0..2).for_each(|rank| ends(&mut scene, rank, Some(7), HowEnded::ShuttingDown));
        crashes(&mut scene, crash(0, Outcome::Code(1), 7));
        scene.passes(500);
        assert_eq!(scene.over(), None, "what rank 1 says is waited for");
        crashes(&mut scene, crash(1, Outcome::Code(1), 7));
        scene.stopped([0, 1]);
        scene.passes(3000);
        assert_eq!((scene.over().map(|o| o.0), warned(&scene)), (code, false), "{:?}", scene.over());
        assert_eq!(scene.started().len(), if checkpointed { 2 } else { 1 });
    }
}

#[test]
fn an_exit_code_takes_back_that_a_late_end_finished_the_training() {
    let mut scene = job(PER_DAY);
    has_checkpoints(&mut scene);
    crashes(&mut scene, failure(0, Outcome::Code(1), LOST, 6));
    ends(&mut scene, 1, Some(6), HowEnded::ShuttingDown);
    crashes(&mut scene, crash(1, Outcome::Code(3), 6));
    scene.stopped([0, 1]);
    scene.passes(60_000);
    assert_eq!((scene.started(), scene.over()), (vec![1, 2], None));
}

#[test]
fn an_interpreter_that_takes_long_to_shut_down_is_at_its_end() {
    let mut scene = job(PER_DAY);
    ends(&mut scene, 0, Some(60), HowEnded::ShuttingDown);
    crashes(&mut scene, failure(1, Outcome::Code(1), LOST, 60));
    scene.passes(11_000);
    assert!(warned(&scene) && scene.over().is_none(), "rank 0 is still at it");
    ends(&mut scene, 0, Some(60), HowEnded::Exited);
    assert_eq!((scene.over().unwrap().0, scene.started()), (0, vec![1]));
}

#[test]
fn all_steps_of_the_script_are_the_end_of_it() {
    let mut scene = job(PER_DAY);
    let extent = Extent { step: Some(Step(12)), total: Some(Step(12)), passes: 0 };
    ends_after(&mut scene, 1, extent, HowEnded::Exited);
    crashes(&mut scene, Failure { total: extent.total, ..failure(0, Outcome::Code(1), LOST, 12) });
    assert!(scene.over().unwrap().0 == 0 && warned(&scene));
}

#[test]
fn an_end_that_nothing_confirms_is_told_once_and_changes_nothing() {
    let mut scene = job(PER_DAY);
    for _ in 0..2 {
        ends(&mut scene, 1, Some(7), HowEnded::Unconfirmed { pid: 70 });
    }
    ends(&mut scene, 0, Some(7), HowEnded::Exited);
    let (code, why) = scene.over().unwrap();
    assert!(code == 0 && why.contains("process 70, which trained up to step 7 as rank 1"), "{code} {why}");
    // One node shows it because the rank is its own, the other because it is the first.
    let told = scene.sent.iter().filter(|o| matches!(o, Order::Notice { what } if what.contains("process 70")));
    let facts = scene.facts.iter().filter(|f| matches!(f, Fact::EndUnconfirmed { pid: 70, .. }));
    assert_eq!((told.count(), facts.count()), (2, 1));
    let entries: Vec<Entry> = scene.facts.iter().map(|fact| Entry { at: 1, fact: fact.clone() }).collect();
    let said = notes(&entries);
    assert!(matches!(&said[..], [one] if one.contains("process 70")), "{said:?}");
}

#[test]
fn a_crash_before_the_last_step_is_not_held() {
    let mut scene = job(PER_DAY);
    crashes(&mut scene, Failure { total: Some(Step(60)), ..crash(1, Outcome::Signal(6), 30) });
    assert!(scene.sent.iter().any(|o| matches!(o, Order::Crew(_, CrewOrder::Fence { .. }))));
}

#[test]
fn a_count_of_restarts_is_honoured_for_what_is_not_finished() {
    let mut scene = job(RestartBudget::Exactly(1));
    ends(&mut scene, 0, Some(60), HowEnded::Exited);
    crashes(&mut scene, crash(1, Outcome::Signal(9), 59));
    scene.passes(1100);
    scene.stopped([0, 1]);
    scene.passes(3000);
    assert_eq!((scene.started(), scene.over()), (vec![1, 2], None));
}

#[test]
fn nobody_ends_so_a_crash_is_a_failure_after_a_moment() {
    let mut scene = job(PER_DAY);
    crashes(&mut scene, crash(1, Outcome::Signal(6), 30));
    assert!(!scene.sent.iter().any(|o| matches!(o, Order::Crew(_, CrewOrder::Fence { .. }))));
    scene.passes(1100);
    assert!(scene.sent.iter().any(|o| matches!(o, Order::Crew(_, CrewOrder::Fence { .. }))));
    scene.stopped([0, 1]);
    scene.passes(3000);
    assert_eq!(scene.started(), [1, 2]);
}

#[test]
fn what_follows_from_a_crash_shows_that_the_others_are_not_at_their_end() {
    let mut scene = job(PER_DAY);
    crashes(&mut scene, crash(1, Outcome::Signal(6), 30));
    crashes(&mut scene, failure(0, Outcome::Code(1), LOST, 30));
    assert!(scene.sent.iter().any(|o| matches!(o, Order::Crew(_, CrewOrder::Fence { .. }))), "at once");
}

#[test]
fn a_kill_is_never_held() {
    let mut scene = job(PER_DAY);
    crashes(&mut scene, crash(1, Outcome::Signal(9), 30));
    assert!(scene.sent.iter().any(|o| matches!(o, Order::Crew(_, CrewOrder::Fence { .. }))));
}

#[test]
fn an_exception_of_a_script_without_checkpoints_ends_the_job() {
    let error = |step| failure(1, Outcome::Code(1), "ValueError: batch of 31", step);
    let mut scene = job(PER_DAY);
    crashes(&mut scene, error(30));
    scene.passes(1100);
    let (code, why) = scene.over().unwrap();
    assert!(code == 1 && why.contains("no rank has used an everstep.CheckpointManager"), "{code} {why}");
    let mut scene = job(PER_DAY);
    crashes(&mut scene, Failure { progressed: false, ..error(0) });
    scene.passes(1100);
    let (code, why) = scene.over().unwrap();
    assert!(code == 1 && why.contains("no optimizer step was completed"), "{code} {why}");
    // With checkpoints, or with a number of restarts, the job is restarted.
    for (restarts, checkpointed) in [(PER_DAY, true), (RestartBudget::Exactly(2), false)] {
        let mut scene = job(restarts);
        if checkpointed {
            has_checkpoints(&mut scene);
        }
        crashes(&mut scene, error(30));
        scene.passes(1100);
        scene.stopped([0, 1]);
        scene.passes(3000);
        assert_eq!((scene.started(), scene.over()), (vec![1, 2], None));
    }
}

#[test]
fn an_exception_that_was_noticed_after_its_echo_ends_the_job_too() {
    let mut scene = job(PER_DAY);
    crashes(&mut scene, failure(0, Outcome::Code(1), LOST, 30));
    crashes(&mut scene, failure(1, Outcome::Code(1), "ValueError: batch of 31", 30));
    scene.stopped([0, 1]);
    scene.passes(5000);
    assert_eq!((scene.started(), scene.over().map(|o| o.0)), (vec![1], Some(1)));
}

#[test]
fn an_unclear_exception_beside_a_kill_is_not_the_scripts() {
    let mut scene = job(PER_DAY);
    crashes(&mut scene, failure(0, Outcome::Code(1), "RuntimeError: it did not work", 30));
    crashes(&mut scene, crash(1, Outcome::Signal(9), 30));
    scene.stopped([0, 1]);
    scene.passes(6000);
    assert_eq!((scene.started(), scene.over()), (vec![1, 2], None));
}

#[test]
fn what_explains_an_unclear_exception_counts_although_an_echo_came_first() {
    let unclear = "RuntimeError: it did not work";
    for (error, lost, restarted) in
        [(unclear, true, true), (unclear, false, true), ("ValueError: batch of 31", true, false)]
    {
        let mut scene = Scene::new();
        for node in 0..3 {
            scene.join(node, node + 10, 1, Scene::spec((2, 3), PER_DAY));
        }
        scene.passes(5000);
        if lost {
            scene.leaves(2);
        }
        crashes(&mut scene, failure(0, Outcome::Code(1), LOST, 30));
        crashes(&mut scene, failure(1, Outcome::Code(1), error, 30));
        if !lost {
            crashes(&mut scene, crash(2, Outcome::Signal(9), 30));
        }
        scene.stopped([0, 1]);
        scene.passes(30_000);
        let code = if restarted { None } else { Some(1) };
        let started = if restarted { vec![1, 2] } else { vec![1] };
        assert_eq!((scene.over().map(|o| o.0), scene.started()), (code, started), "{error}, lost: {lost}");
        assert_eq!(scene.job().record().restarts(), 1, "the restart that was ordered first is the one that is made");
    }
}

#[test]
fn a_node_that_is_lost_after_its_scripts_have_ended_does_not_undo_that() {
    let mut scene = job(PER_DAY);
    (0..2).for_each(|rank| ends(&mut scene, rank, Some(60), HowEnded::ShuttingDown));
    scene.leaves(1);
    scene.passes(60_000);
    assert!(scene.over().is_none(), "node 0 is still at its end");
    ends(&mut scene, 0, Some(60), HowEnded::Exited);
    let (code, why) = scene.over().unwrap();
    assert!(code == 0 && why.contains("node 1 was lost after the scripts of its ranks had ended"), "{why}");
    assert_eq!(scene.started(), [1]);
}

#[test]
fn a_node_that_is_lost_with_steps_left_has_not_finished() {
    let mut scene = job(PER_DAY);
    let extent = Extent { step: Some(Step(30)), total: Some(Step(60)), passes: 0 };
    (0..2).for_each(|rank| ends_after(&mut scene, rank, extent, HowEnded::ShuttingDown));
    scene.leaves(1);
    scene.passes(60_000);
    assert_eq!(scene.over().unwrap().0, 1, "{:?}", scene.over());
}

#[test]
fn an_agent_that_is_started_again_after_its_scripts_have_ended_undoes_nothing() {
    let mut scene = job(PER_DAY);
    (0..2).for_each(|rank| ends(&mut scene, rank, Some(60), HowEnded::ShuttingDown));
    // Another life of the same node, within the time that the first one has to reconnect.
    scene.leaves(1);
    scene.join(1, 21, 1, Scene::spec((2, 2), PER_DAY));
    ends(&mut scene, 0, Some(60), HowEnded::Exited);
    scene.passes(60_000);
    assert_eq!((scene.over().unwrap().0, scene.started()), (0, vec![1]), "{:?}", scene.over());
}

#[test]
fn an_end_that_nothing_confirms_is_the_cause_when_another_rank_fails() {
    let errors = [LOST, "ValueError: batch of 31"];
    for (unconfirmed_first, passes, error) in [(true, 0, 0), (true, 1, 0), (true, 0, 1), (false, 0, 0), (false, 1, 0)] {
        let mut scene = job(PER_DAY);
        if unconfirmed_first {
            ends(&mut scene, 0, Some(7), HowEnded::Unconfirmed { pid: 70 });
        }
        crashes(&mut scene, Failure { passes, ..failure(1, Outcome::Code(1), errors[error], 7) });
        if !unconfirmed_first {
            ends(&mut scene, 0, Some(7), HowEnded::Unconfirmed { pid: 70 });
        }
        scene.stopped([0, 1]);
        scene.passes(60_000);
        assert_eq!((scene.started(), scene.over(), warned(&scene)), (vec![1, 2], None, false));
        let vanished = |f: &Failure| f.cause == Cause::TrainerVanished { pid: 70 } && f.rank == Rank(0);
        let first = |f: &Fact| matches!(f, Fact::IncidentOpened { failure: Some(f), .. } if vanished(f));
        let blamed = |f: &Fact| matches!(f, Fact::Blamed { failure: Some(f), .. } if vanished(f));
        assert_eq!(scene.facts.iter().any(first), unconfirmed_first);
        assert!(scene.facts.iter().any(|f| error == 1 || blamed(f)), "{:?}", scene.facts);
    }
}

#[test]
fn what_was_not_known_about_an_earlier_generation_is_not_told_after_it() {
    let mut scene = job(PER_DAY);
    ends(&mut scene, 0, Some(7), HowEnded::Unconfirmed { pid: 70 });
    crashes(&mut scene, failure(1, Outcome::Code(1), LOST, 7));
    scene.stopped([0, 1]);
    scene.passes(3000);
    let entries: Vec<Entry> = scene.facts.iter().map(|fact| Entry { at: 1, fact: fact.clone() }).collect();
    assert!(scene.facts.iter().any(|f| matches!(f, Fact::EndUnconfirmed { .. })));
    assert_eq!((scene.started(), notes(&entries)), (vec![1, 2], vec![]));
}

#[test]
fn a_job_at_its_end_takes_no_node_in() {
    for how in [None, Some(HowEnded::ShuttingDown), Some(HowEnded::Exited)] {
        let mut scene = Scene::new();
        for node in 0..2 {
            scene.join(node, node + 10, 1, Scene::spec((2, 3), PER_DAY));
        }
        // The last call for a third node passes.
        scene.passes(10_000);
        assert_eq!(scene.started(), [1]);
        let at_its_end = how.is_some();
        if let Some(how) = how.clone() {
            ends(&mut scene, 0, Some(60), how);
        }
        scene.join(2, 12, 1, Scene::spec((2, 3), PER_DAY));
        scene.passes(10_000);
        scene.stopped(0..2);
        scene.passes(10_000);
        assert_eq!(scene.started().len(), if at_its_end { 1 } else { 2 }, "{how:?}");
    }
}
