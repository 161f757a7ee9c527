//! A launched program that exits with 0 where another process has trained in its place.

use crate::lone_agent::{commands, running};
use everstep_core::agent::Agent;
use everstep_core::agent::command::Command;
use everstep_core::agent::event::{CrewEvent, Event, Words, WorkerExit};
use everstep_core::agent::observation::{Observation, Trainer, TrainerEnd};
use everstep_core::id::{Epoch, Generation, Step};
use everstep_core::message::{Cause, CrewOrder, CrewReport, HowEnded, Order, Outcome, Report};
use everstep_core::time::Time;

const VANISHED: Option<TrainerEnd> = Some(TrainerEnd::Vanished);

/// What is seen of process 70, which trains in place of the launched process 7.
fn seen(step: u64, total: Option<u64>, vanished: bool) -> Observation {
    ends_so(step, total, vanished.then_some(TrainerEnd::Vanished))
}

fn ends_so(step: u64, total: Option<u64>, end: Option<TrainerEnd>) -> Observation {
    let trainer = Some(Trainer { pid: 70, end });
    Observation { step: Some(step), total, beats: step, trainer, ..Observation::default() }
}

fn looks(agent: &mut Agent, at: u64, seen: Observation) {
    agent.handle(Time(at), Event::Crew(Generation(1), CrewEvent::Sample { local_rank: 0, pid: 7, seen }));
}

fn exits(agent: &mut Agent, asked: bool) -> Vec<Report> {
    exits_with(agent, Outcome::Code(0), asked)
}

fn exits_with(agent: &mut Agent, outcome: Outcome, asked: bool) -> Vec<Report> {
    commands(agent);
    let generation = Generation(1);
    let exited = Event::Crew(
        generation,
        CrewEvent::WorkerExited(WorkerExit { local_rank: 0, pid: 7, outcome, asked, words: Words::default() }),
    );
    agent.handle(Time(5000), exited);
    let sent = |c| if let Command::Send(report) = c { Some(report) } else { None };
    commands(agent).into_iter().filter_map(sent).collect()
}

/// Returns what is reported when the launched process exits with 0 after these observations.
fn reported(observations: &[Observation]) -> Vec<Report> {
    let mut agent = running();
    for (i, seen) in observations.iter().enumerate() {
        looks(&mut agent, 100 * (i as u64 + 1), *seen);
    }
    exits(&mut agent, false)
}

fn how(reports: &[Report]) -> Option<&HowEnded> {
    reports.iter().find_map(|r| if let Report::Crew(_, CrewReport::Ended(ended)) = r { Some(&ended.how) } else { None })
}

fn is_cut_short(reports: &[Report]) -> bool {
    let cut = |r: &Report| {
        matches!(r, Report::Crew(_, CrewReport::WorkerFailed(failure)) if failure.cause == Cause::TrainerVanished { pid: 70 }
            && failure.step == Some(Step(7)) && failure.verdict.class == "trainer-vanished")
    };
    reports.iter().any(cut) && how(reports).is_none()
}

#[test]
fn a_training_that_vanished_before_its_last_step_is_a_failure() {
    let all = [seen(6, Some(20), false), seen(7, Some(20), true)];
    let reports = reported(&all);
    assert!(is_cut_short(&reports), "{reports:?}");
}

#[test]
fn a_training_that_vanished_at_an_unknown_step_is_not_confirmed() {
    let reports = reported(&[seen(6, None, false), seen(7, None, true)]);
    assert_eq!(how(&reports), Some(&HowEnded::Unconfirmed { pid: 70 }));
    // The steps may all have been made between two looks.
    assert_eq!(how(&reported(&[seen(7, None, true)])), Some(&HowEnded::Unconfirmed { pid: 70 }));
}

#[test]
fn an_exit_code_that_nothing_contradicts_counts() {
    let none = Observation { trainer: None, ..seen(7, Some(20), false) };
    let starts = Observation { step: None, ..seen(0, None, true) };
    let evaluates = Observation { trainer: Some(Trainer { pid: 71, end: VANISHED }), ..seen(20, None, true) };
    let ends: [&[Observation]; 6] = [
        &[seen(7, Some(20), false)],
        &[seen(7, None, false)],
        &[seen(20, Some(20), true)],
        &[none],
        &[starts],
        &[seen(20, None, false), evaluates],
    ];
    for observations in ends {
        assert_eq!(how(&reported(observations)), Some(&HowEnded::Exited), "{observations:?}");
    }
}

#[test]
fn a_launcher_that_starts_the_training_again_is_judged_by_its_last_attempt() {
    let again = |step, vanished| Observation { trainer: Some(another(vanished)), ..seen(step, None, vanished) };
    let reports = reported(&[seen(7, None, true), again(7, false), again(20, false)]);
    assert_eq!(how(&reports), Some(&HowEnded::Exited));
    // Killed before it had made a step of its own: the first attempt was not at its end, either.
    let reports = reported(&[seen(7, None, true), again(7, true)]);
    assert_eq!(how(&reports), Some(&HowEnded::Unconfirmed { pid: 70 }));
}

fn another(vanished: bool) -> Trainer {
    Trainer { pid: 71, end: vanished.then_some(TrainerEnd::Vanished) }
}

/// What is seen of process 71, which came after process 70. It goes on from step 5.
fn later(step: u64, total: Option<u64>, vanished: bool) -> Observation {
    Observation { trainer: Some(another(vanished)), restored: 5, ..seen(step, total, vanished) }
}

/// What is seen of an evaluation that came after process 70 and leaves its numbers as they were.
fn evaluation(vanished: bool) -> Observation {
    Observation { restored: 0, ..later(7, None, vanished) }
}

#[test]
fn an_evaluation_does_not_hide_a_training_that_vanished_before_it() {
    for vanished in [false, true] {
        let reports = reported(&[seen(6, Some(20), false), seen(7, Some(20), true), evaluation(vanished)]);
        assert!(is_cut_short(&reports), "{reports:?}");
        let total = |r: &Report| matches!(r, Report::Crew(_, CrewReport::WorkerFailed(failure)) if failure.total == Some(Step(20)));
        assert!(reports.iter().any(total), "{reports:?}");
        let reports = reported(&[seen(7, None, true), evaluation(vanished)]);
        assert_eq!(how(&reports), Some(&HowEnded::Unconfirmed { pid: 70 }));
    }
    // The launched process may evaluate itself.
    let itself = Observation { trainer: None, ..evaluation(false) };
    assert!(is_cut_short(&reported(&[seen(7, Some(20), true), itself])));
}

#[test]
fn a_later_process_may_complete_what_one_that_vanished_has_left() {
    let restored = later(5, Some(20), false);
    let complete: [&[Observation]; 4] = [
        &[restored, later(20, Some(20), true)],
        // It has stopped early, as it chose, and was evaluated.
        &[restored, later(9, Some(20), false)],
        &[restored, later(9, Some(20), false), Observation { restored: 5, ..seen(9, None, true) }],
        // Back to where the first one was.
        &[restored, later(6, Some(20), false), later(7, Some(20), false)],
    ];
    for later in complete {
        let all = [&[seen(7, Some(20), true)], later].concat();
        assert_eq!(how(&reported(&all)), Some(&HowEnded::Exited), "{later:?}");
    }
    // Another training, which says nothing about the first.
    let another = [seen(7, Some(20), true), restored, later(6, Some(6), false)];
    assert!(is_cut_short(&reported(&another)));
    // It has restored a checkpoint, and trained no step.
    assert!(is_cut_short(&reported(&[seen(7, Some(20), true), later(5, Some(20), false)])));
    let reports = reported(&[seen(7, None, true), later(5, None, false)]);
    assert_eq!(how(&reports), Some(&HowEnded::Unconfirmed { pid: 70 }));
    let reports = reported(&[seen(7, None, true), later(5, None, false), later(7, None, false)]);
    assert_eq!(how(&reports), Some(&HowEnded::Exited));
}

#[test]
fn what_vanished_before_all_were_ended_is_a_failure_of_its_own() {
    for (asked, fails) in [(false, true), (true, false)] {
        let mut agent = running();
        looks(&mut agent, 100, seen(7, Some(20), false));
        let order = Order::Crew(Generation(1), CrewOrder::Fence { stacks: false });
        agent.handle(Time(200), Event::Order { epoch: Epoch(1), order });
        looks(&mut agent, 300, seen(7, Some(20), true));
        let reports = exits(&mut agent, asked);
        assert_eq!(is_cut_short(&reports), fails, "{reports:?}");
        assert_eq!(how(&reports), None);
    }
}

#[test]
fn a_failure_that_was_reported_is_no_end_because_the_launched_process_exits_with_0() {
    for killing in [false, true] {
        let mut agent = running();
        looks(&mut agent, 100, seen(7, None, false));
        let words = Words::from("ValueError: batch of 31".to_owned());
        agent.handle(Time(200), Event::Crew(Generation(1), CrewEvent::WorkerRaised { local_rank: 0, pid: 70, words }));
        let failed = |c: &_| matches!(c, Command::Send(Report::Crew(_, CrewReport::WorkerFailed(_))));
        assert!(commands(&mut agent).iter().any(failed));
        if killing {
            let order = Order::Crew(Generation(1), CrewOrder::Fence { stacks: false });
            agent.handle(Time(250), Event::Order { epoch: Epoch(1), order });
        }
        let reports = exits(&mut agent, false);
        assert!(
            !reports.iter().any(|r| matches!(r, Report::Crew(_, CrewReport::Ended(_) | CrewReport::Finished))),
            "{reports:?}"
        );
    }
}

/// Returns how the rank ended when its launched process exits like this after these observations.
fn ended(outcome: Outcome, observations: &[Observation]) -> Option<HowEnded> {
    let mut agent = running();
    for (i, seen) in observations.iter().enumerate() {
        looks(&mut agent, 100 * (i as u64 + 1), *seen);
    }
    how(&exits_with(&mut agent, outcome, false)).cloned()
}

#[test]
fn a_crash_of_the_interpreter_after_the_training_may_be_passed_on() {
    let over = ends_so(20, None, Some(TrainerEnd::Over));
    // By a shell, by Python, and by `exec`.
    for outcome in [Outcome::Code(134), Outcome::Code(250), Outcome::Code(120), Outcome::Signal(6)] {
        assert!(matches!(ended(outcome, &[over]), Some(HowEnded::Crashed(_))), "{outcome:?}");
        for end in [None, VANISHED, Some(TrainerEnd::Left)] {
            assert_eq!(ended(outcome, &[ends_so(20, None, end)]), None, "{end:?}");
        }
        // An evaluation was over; the training before it was not.
        let evaluates = Trainer { pid: 71, end: Some(TrainerEnd::Over) };
        let all = [seen(7, Some(20), true), Observation { trainer: Some(evaluates), ..seen(7, None, false) }];
        assert_eq!(ended(outcome, &all), None);
    }
    // What the launched process says itself.
    for code in [1, 3, 128, 255] {
        assert_eq!(ended(Outcome::Code(code), &[over]), None, "{code}");
    }
}
