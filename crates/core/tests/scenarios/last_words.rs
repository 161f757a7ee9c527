//! A failure elsewhere ends the job: what workers of this node still report.

use crate::lone_agent::{commands, running};
use everstep_core::agent::Agent;
use everstep_core::agent::command::{Command, CrewCommand};
use everstep_core::agent::event::{CrewEvent, Event, Words, WorkerExit};
use everstep_core::agent::observation::{Observation, Script, Trainer, TrainerEnd};
use everstep_core::id::{Epoch, Generation};
use everstep_core::message::{Cause, CrewOrder, CrewReport, ExitReason, HowEnded, Order, Outcome, Report};
use everstep_core::time::Time;
use std::time::Duration;

fn kills(commands: &[Command]) -> usize {
    commands.iter().filter(|c| matches!(c, Command::Crew(_, CrewCommand::Kill { .. }))).count()
}

fn end(agent: &mut Agent, code: i32) -> Vec<Command> {
    commands(agent);
    agent.handle(
        Time(10),
        Event::Order { epoch: Epoch(1), order: Order::End(ExitReason { code, why: "rank 0 failed".into() }) },
    );
    commands(agent)
}

#[test]
fn a_worker_that_is_failing_too_is_not_interrupted() {
    let mut agent = running();
    assert_eq!(kills(&end(&mut agent, 1)), 0);
    let exited = Event::Crew(
        Generation(1),
        CrewEvent::WorkerExited(WorkerExit {
            local_rank: 0,
            pid: 7,
            outcome: Outcome::Code(1),
            asked: false,
            words: "ValueError".to_owned().into(),
        }),
    );
    agent.handle(Time(20), exited);
    assert_eq!(kills(&commands(&mut agent)), 1, "what it has left behind is ended at once");
    agent.handle(Time(21), Event::Crew(Generation(1), CrewEvent::WorkersGone { store_port: 2 }));
    assert!(commands(&mut agent).iter().any(|c| matches!(c, Command::Exit { reason: ExitReason { code: 1, .. }, .. })));
}

#[test]
fn a_worker_that_goes_on_is_ended_soon() {
    let mut agent = running();
    end(&mut agent, 1);
    let at = agent.deadline().unwrap();
    assert_eq!(at, Time(1010), "half of --detect-timeout");
    agent.handle(at, Event::Tick);
    assert!(
        commands(&mut agent)
            .iter()
            .any(|c| matches!(c, Command::Crew(_, CrewCommand::Kill { grace, .. }) if !grace.is_zero()))
    );
}

#[test]
fn what_comes_just_after_a_deadline_does_not_put_it_off() {
    let mut agent = running();
    end(&mut agent, 1);
    let at = agent.deadline().unwrap();
    let late = at.after(Duration::from_millis(1));
    // A sample of the worker, before the tick that was due.
    agent.handle(
        late,
        Event::Crew(Generation(1), CrewEvent::Sample { local_rank: 0, pid: 7, seen: Observation::default() }),
    );
    assert_eq!(agent.deadline(), Some(at), "due since then");
    agent.handle(late, Event::Tick);
    assert_eq!(kills(&commands(&mut agent)), 1);
    assert_eq!(agent.deadline(), None);
}

#[test]
fn a_job_that_is_stopped_or_queued_again_waits_for_nobody() {
    for code in [0, 75, 143] {
        assert_eq!(kills(&end(&mut running(), code)), 1, "code {code}");
    }
}

fn raised_then_fenced(exception: &str) -> Time {
    let mut agent = running();
    let (generation, words) = (Generation(1), exception.to_owned().into());
    agent.handle(Time(10), Event::Crew(generation, CrewEvent::WorkerRaised { local_rank: 0, pid: 7, words }));
    agent.handle(
        Time(20),
        Event::Order { epoch: Epoch(1), order: Order::Crew(generation, CrewOrder::Fence { stacks: false }) },
    );
    assert_eq!(kills(&commands(&mut agent)), 0);
    agent.deadline().unwrap()
}

#[test]
fn a_rank_that_only_lost_its_connection_gets_half_a_second() {
    assert_eq!(raised_then_fenced("RuntimeError: Connection closed by peer [127.0.0.1]:4711"), Time(520));
    assert_eq!(raised_then_fenced("ValueError: no such apple"), Time(3020));
}

/// Returns what is reported of a worker that dies of SIGKILL after the order to end all workers.
fn reported(asked: bool) -> Vec<Outcome> {
    let mut agent = running();
    let fence = Order::Crew(Generation(1), CrewOrder::Fence { stacks: false });
    agent.handle(Time(10), Event::Order { epoch: Epoch(1), order: fence });
    agent.handle(agent.deadline().unwrap_or(Time(10)), Event::Tick);
    assert_eq!(kills(&commands(&mut agent)), 1);
    let exited = Event::Crew(
        Generation(1),
        CrewEvent::WorkerExited(WorkerExit {
            local_rank: 0,
            pid: 7,
            outcome: Outcome::Signal(9),
            asked,
            words: Words::default(),
        }),
    );
    agent.handle(Time(2000), exited);
    let failures = commands(&mut agent).into_iter().filter_map(|c| match c {
        Command::Send(Report::Crew(_, CrewReport::WorkerFailed(failure))) => Some(failure.cause),
        _ => None,
    });
    failures.filter_map(|cause| if let Cause::Exited(outcome) = cause { Some(outcome) } else { None }).collect()
}

#[test]
fn a_worker_killed_before_the_order_to_end_it_is_reported_after_that_order() {
    // On a busy machine, the other ranks' lost connections are reported first.
    assert_eq!(reported(false), [Outcome::Signal(9)]);
    assert!(reported(true).is_empty(), "it was killed by that order");
}

#[test]
fn a_worker_that_had_ended_by_itself_before_it_could_be_ended_is_reported() {
    for asked in [false, true] {
        let mut agent = running();
        let fence = Order::Crew(Generation(1), CrewOrder::Fence { stacks: false });
        agent.handle(Time(10), Event::Order { epoch: Epoch(1), order: fence });
        commands(&mut agent);
        let exited = Event::Crew(
            Generation(1),
            CrewEvent::WorkerExited(WorkerExit {
                local_rank: 0,
                pid: 7,
                outcome: Outcome::Code(0),
                asked,
                words: Words::default(),
            }),
        );
        agent.handle(Time(20), exited);
        let ended = |c: &Command| matches!(c, Command::Send(Report::Crew(_, CrewReport::Ended(_))));
        assert_eq!(commands(&mut agent).iter().any(ended), !asked, "a worker that was asked to end may exit with 0");
    }
}

/// Returns what is reported when a worker whose interpreter shuts down exits with 1, and whether
/// another process of it raises an exception before that.
fn reported_at_its_end(raised: bool, fenced: bool) -> Vec<Report> {
    let mut agent = running();
    let generation = Generation(1);
    let seen = Observation { step: Some(7), script: Script::Over, ..Observation::default() };
    agent.handle(Time(5), Event::Crew(generation, CrewEvent::Sample { local_rank: 0, pid: 7, seen }));
    if raised {
        let words = "EOFError: of a helper".to_owned().into();
        agent.handle(Time(10), Event::Crew(generation, CrewEvent::WorkerRaised { local_rank: 0, pid: 7, words }));
    }
    if fenced {
        agent.handle(
            Time(10),
            Event::Order { epoch: Epoch(1), order: Order::Crew(generation, CrewOrder::Fence { stacks: false }) },
        );
    }
    let outcome = Outcome::Code(i32::from(!raised));
    let words = Words::default();
    agent.handle(
        Time(20),
        Event::Crew(
            generation,
            CrewEvent::WorkerExited(WorkerExit { local_rank: 0, pid: 7, outcome, asked: false, words }),
        ),
    );
    assert!(agent.hello().running.is_none_or(|r| raised || r.ended.is_empty()), "a failed script has not ended");
    let sent = |c| if let Command::Send(report) = c { Some(report) } else { None };
    commands(&mut agent).into_iter().filter_map(sent).collect()
}

#[test]
fn an_exit_code_of_a_script_that_is_over_is_a_failure() {
    for fenced in [false, true] {
        let reports = reported_at_its_end(false, fenced);
        assert!(reports.iter().any(|r| matches!(r, Report::Crew(_, CrewReport::WorkerFailed(_)))), "{reports:?}");
    }
}

#[test]
fn an_exception_of_a_helper_that_outlives_the_script_is_none_of_the_script() {
    let reports = reported_at_its_end(true, false);
    assert!(!reports.iter().any(|r| matches!(r, Report::Crew(_, CrewReport::WorkerFailed(_)))), "{reports:?}");
    assert!(reports.iter().any(|r| matches!(r, Report::Crew(_, CrewReport::Finished))), "{reports:?}");
}

#[test]
fn a_crash_after_the_script_was_over_is_none_of_it_whenever_it_is_noticed() {
    // 139: the shell that had started it passes on that it was ended by SIGSEGV.
    for (outcome, trained) in [(Outcome::Signal(11), 7), (Outcome::Code(139), 70)] {
        let mut agent = running();
        let generation = Generation(1);
        let trainer = (trained != 7).then_some(Trainer { pid: trained, end: Some(TrainerEnd::Over) });
        let script = if trainer.is_none() { Script::Over } else { Script::Runs };
        let seen = Observation { step: Some(7), script, trainer, ..Observation::default() };
        agent.handle(Time(5), Event::Crew(generation, CrewEvent::Sample { local_rank: 0, pid: 7, seen }));
        agent.handle(
            Time(10),
            Event::Order { epoch: Epoch(1), order: Order::Crew(generation, CrewOrder::Fence { stacks: false }) },
        );
        commands(&mut agent);
        let words = Words::default();
        agent.handle(
            Time(20),
            Event::Crew(
                generation,
                CrewEvent::WorkerExited(WorkerExit { local_rank: 0, pid: 7, outcome, asked: false, words }),
            ),
        );
        let sent = commands(&mut agent);
        let crashed = |c: &Command| matches!(c, Command::Send(Report::Crew(_, CrewReport::Ended(ended))) if matches!(ended.how, HowEnded::Crashed(_)));
        assert!(sent.iter().any(crashed), "{outcome:?}: {sent:?}");
        assert!(
            !sent.iter().any(|c| matches!(c, Command::Send(Report::Crew(_, CrewReport::WorkerFailed(_))))),
            "{sent:?}"
        );
    }
}
