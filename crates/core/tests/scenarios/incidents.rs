//! From a failure to an action, seen from outside: events in, commands out.

use crate::scene::{self, Scene};
use everstep_core::coordinator::event::Event;
use everstep_core::coordinator::job::Phase;
use everstep_core::id::{Generation, JobId, Rank, Session, Step};
use everstep_core::message::{
    CrewOrder, CrewReport, ExitReason, Failure, Holding, Holdings, Offer, Offers, Order, Outcome, RankOffers,
    Redundancy, Replicated, Report, Restore, Sealed, Stopped, Tier,
};
use everstep_core::spec::RestartBudget;

/// A job of one node, with the default number of restarts.
trait OneNode {
    fn join_anew(&mut self, incarnation: u64, workers: u32);
    fn restores(&mut self, held: &[&[u64]]) -> Option<u64>;
    fn fails(&mut self, failure: Failure);
}

impl OneNode for Scene {
    fn join_anew(&mut self, incarnation: u64, workers: u32) {
        self.join(0, incarnation, workers, Scene::spec((1, 1), RestartBudget::PerDayAfterFirstStep(10)));
    }

    /// Offers what the memory of the node contains; all ranks hold the same state. Returns the step
    /// to restore.
    fn restores(&mut self, held: &[&[u64]]) -> Option<u64> {
        let (generation, world_size) = (Generation(1), u32::try_from(held.len()).unwrap());
        let ranks = || (0..).map(Rank).zip(held);
        let holding = |rank, step| Holding { step: Step(step), generation, rank, world_size, shared: true };
        let all = ranks().flat_map(|(rank, steps)| steps.iter().map(move |s| holding(rank, *s))).collect();
        self.says(0, Report::Crew(generation, CrewReport::Holds(Holdings { held: all, parity: vec![] })));
        for (rank, steps) in ranks() {
            let offers = steps.iter().map(|s| Offer { step: Step(*s), tier: Tier::Memory, generation }).collect();
            self.says(
                0,
                Report::Crew(generation, CrewReport::Offers(RankOffers { rank, offers: Offers::any(offers, true) })),
            );
        }
        self.sent.iter().find_map(|o| {
            if let Order::Crew(_, CrewOrder::Restore(Restore { step, .. })) = o { step.map(|s| s.0) } else { None }
        })
    }

    /// Fails the current generation, which used checkpoints, after a while, and reports that its
    /// workers have ended.
    fn fails(&mut self, failure: Failure) {
        self.passes(61_000);
        let generation = Generation(self.started().last().copied().unwrap());
        self.says(
            0,
            Report::Crew(generation, CrewReport::Offers(RankOffers { rank: Rank(0), offers: Offers::default() })),
        );
        self.says(0, Report::Crew(generation, CrewReport::WorkerFailed(failure)));
        self.stopped([0]);
    }
}

/// Returns the failure of rank 0 after `step` steps.
fn failure(text: &str, step: u64) -> Failure {
    scene::failure(0, Outcome::Code(1), text, step)
}

/// The agent is killed between its worker's first step and its next look at the board.
#[test]
fn a_node_lost_before_it_told_of_a_step_is_replaced() {
    let mut scene = Scene::new();
    scene.join_anew(1, 1);
    assert_eq!(scene.started(), [1]);
    scene.event(Event::Lost { session: Session(1) });
    scene.join_anew(2, 1);
    assert_eq!(scene.started(), [1, 2], "{:?}", scene.core.jobs());
}

#[test]
fn the_same_error_after_the_same_step_twice_is_not_tried_a_third_time() {
    let mut scene = Scene::new();
    scene.join_anew(1, 1);
    scene.fails(failure("IndexError: index 17 is out of bounds at 0x7f31", 40));
    scene.fails(failure("IndexError: index 17 is out of bounds at 0x7e99", 41));
    assert_eq!(scene.over(), None, "another step");
    scene.fails(failure("KeyError: 'lr'", 41));
    assert_eq!(scene.over(), None, "another error");
    scene.fails(failure("IndexError: index 17 is out of bounds at 0x7f31", 41));
    assert_eq!(scene.over(), None, "not twice in a row");
    scene.fails(failure("IndexError: index 17 is out of bounds at 0x0051", 41));
    let (code, why) = scene.over().unwrap();
    assert!(code == 93 && why.contains("IndexError") && why.contains("script-error"), "{code} {why}");
}

#[test]
fn what_the_machine_or_another_rank_has_done_is_tried_again() {
    for text in ["OSError: [Errno 28] No space left on device", "RuntimeError: Connection closed by peer [10.0.0.4]:1"]
    {
        let mut scene = Scene::new();
        scene.join_anew(1, 1);
        for _ in 0..3 {
            scene.fails(failure(text, 7));
        }
        assert_eq!((scene.over(), scene.started().len()), (None, 4), "{text}");
    }
}

#[test]
fn a_script_that_fails_before_its_first_step_is_not_tried_again() {
    let mut scene = Scene::new();
    scene.join_anew(1, 1);
    let failure = Failure { step: None, progressed: false, ..failure("ValueError: no", 0) };
    let report = Report::Crew(Generation(1), CrewReport::WorkerFailed(failure));
    scene.event(Event::Report { session: Session(1), report });
    assert_eq!(scene.started(), [1]);
    let job = scene.core.jobs().values().next().unwrap();
    assert!(
        matches!(&job.phase(), Phase::Over { code: 1, why } if why.contains("ValueError: no")),
        "{:?}",
        job.phase()
    );
}

/// A DDP rank dies before it has sealed the step that the others have. A copy of another rank's
/// capture would contain that rank's random state, and the run would continue differently from one
/// without a failure.
#[test]
fn a_rank_goes_on_from_what_it_captured_itself_when_that_is_older() {
    let restored = |held: &[&[u64]]| {
        let mut scene = Scene::new();
        scene.join_anew(1, 2);
        scene.restores(held)
    };
    assert_eq!(restored(&[&[25, 24, 23], &[24, 23, 22]]), Some(24));
    // However far back: captures may be many steps apart, or skipped.
    assert_eq!(restored(&[&[25, 24, 23], &[23, 22, 21]]), Some(23));
    assert_eq!(restored(&[&[152, 148], &[148, 144]]), Some(148));
    // A rank whose captures are all lost continues from another's.
    assert_eq!(restored(&[&[25, 24], &[]]), Some(25));
}

/// Silent corruption: the digest of one rank's state differs from the others'.
#[test]
fn who_holds_something_else_than_the_others_is_named_once() {
    let mut scene = Scene::new();
    scene.join_anew(1, 3);
    let (generation, session) = (Generation(1), Session(1));
    let mut named = |step: u64, digests: &[u64]| {
        scene.sent.clear();
        let step = Step(step);
        let wish = Redundancy { replicas: 1, data: 0, shared: true };
        let sealed =
            Report::Crew(generation, CrewReport::Sealed(Sealed { step, wish, instead: None, committed: None }));
        scene.event(Event::Report { session, report: sealed });
        let round = |o: &Order| {
            if let Order::Crew(_, CrewOrder::Replicate { round, .. }) = o { Some(round.round) } else { None }
        };
        let round = scene.sent.iter().find_map(round).unwrap();
        let digests = (0..).map(Rank).zip(digests.iter().copied()).collect();
        let done = Report::Crew(generation, CrewReport::Replicated(Replicated { step, sealed: step, digests, round }));
        scene.event(Event::Report { session, report: done });
        let notice = |o: &Order| if let Order::Notice { what } = o { Some(what.clone()) } else { None };
        scene.sent.iter().find_map(notice)
    };
    assert_eq!(named(1, &[5, 5, 5]), None);
    let said = named(2, &[6, 7, 6]).unwrap();
    assert!(said.starts_with("rank 1 on node 0 has a different state than all other ranks at step 2"), "{said}");
    // The rank still differs, but is not named again until all ranks have agreed in between.
    assert_eq!(named(3, &[8, 9, 8]), None);
    assert_eq!(named(4, &[1, 1, 1]), None);
    assert!(named(5, &[2, 2, 3]).unwrap().starts_with("rank 2 "));
    // Some of the ranks have not reported a digest, so nothing is compared.
    assert_eq!(named(6, &[1, 2]), None);
}

#[test]
fn a_job_started_again_right_after_it_was_stopped_runs() {
    let mut scene = Scene::new();
    scene.join_anew(1, 1);
    scene.event(Event::StopJob { job: JobId("j".into()), signal: 15 });
    let stopped = Report::Crew(Generation(1), CrewReport::Stopped(Stopped { store_port: 1, reached: None }));
    scene.event(Event::Report { session: Session(1), report: stopped });
    let code = |order: &Order| if let Order::End(ExitReason { code, .. }) = order { Some(*code) } else { None };
    assert_eq!(scene.sent.iter().filter_map(code).collect::<Vec<_>>(), [143]);
    scene.event(Event::Lost { session: Session(1) });
    // The same life returns after its run is over. A new life begins the next run.
    scene.join_anew(1, 1);
    assert_eq!(scene.sent.iter().filter_map(code).count(), 2);
    scene.event(Event::Lost { session: Session(1) });
    scene.join_anew(2, 1);
    assert_eq!(scene.sent.iter().filter_map(code).count(), 2);
    assert_eq!(scene.started(), [1, 2]);
}

/// A script that goes back to an earlier step does not get a newer one only because some memory
/// contains it (its own node's included).
#[test]
fn a_script_that_goes_back_gets_that_step_or_none() {
    for (wanted, expected) in [(10, Some(Step(10))), (20, None)] {
        let mut scene = Scene::new();
        scene.join_anew(1, 1);
        let (generation, rank) = (Generation(1), Rank(0));
        let held = vec![Holding { step: Step(25), generation, rank, world_size: 1, shared: true }];
        scene.says(0, Report::Crew(generation, CrewReport::Holds(Holdings { held, parity: vec![] })));
        let durable = vec![Offer { step: Step(10), tier: Tier::Durable, generation: Generation(0) }];
        let offers = Offers { wanted: Some(Step(wanted)), ..Offers::any(durable, true) };
        scene.says(0, Report::Crew(generation, CrewReport::Offers(RankOffers { rank, offers })));
        let step_of = |o: &Order| {
            if let Order::Crew(_, CrewOrder::Restore(Restore { step, .. })) = o { Some(*step) } else { None }
        };
        assert_eq!(scene.sent.iter().find_map(step_of), Some(expected));
    }
}
