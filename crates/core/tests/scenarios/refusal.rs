//! A job that something outside refuses, such as a checkpoint directory that another job owns.

use crate::lone_agent::{commands, running};
use crate::scene::{Scene, failure};
use everstep_core::agent::Agent;
use everstep_core::agent::command::Command;
use everstep_core::agent::event::{CrewEvent, Event, WorkerExit};
use everstep_core::coordinator::command::Fact;
use everstep_core::coordinator::event::Event as Happens;
use everstep_core::history::{Entry, incidents, notes};
use everstep_core::id::{Epoch, Generation, Incarnation, Session};
use everstep_core::message::{CrewReport, ExitReason, Order, Outcome, Report};
use everstep_core::spec::RestartBudget;
use everstep_core::time::Time;

const WHY: &str = "the directory belongs to job one";

fn refused() -> Report {
    Report::Refused(ExitReason { code: 78, why: WHY.into() })
}

#[test]
fn the_job_ends_everywhere_with_the_reason_and_without_an_incident() {
    let mut scene = Scene::new();
    for node in 0..2 {
        scene.join(node, node + 10, 1, Scene::spec((2, 2), RestartBudget::PerDayAfterFirstStep(10)));
    }
    scene.passes(3000);
    for node in [1, 0] {
        scene.says(node, refused());
    }
    let ends = scene.sent.iter().filter(|o| matches!(o, Order::End(ExitReason { code: 78, why }) if why == WHY));
    assert_eq!((ends.count(), scene.over()), (2, Some((78, WHY.to_owned()))));
    // Neither the workers, which nobody answers, nor the agents, which leave, have failed.
    let error = failure(1, Outcome::Code(1), "CheckpointError", 0);
    scene.says(1, Report::Crew(Generation(1), CrewReport::WorkerFailed(error)));
    for session in [1, 2] {
        scene.event(Happens::Lost { session: Session(session) });
    }
    scene.passes(60_000);
    assert!(!scene.facts.iter().any(|f| matches!(f, Fact::IncidentOpened { .. })), "{:?}", scene.facts);
    let entries: Vec<Entry> = scene.facts.iter().map(|fact| Entry { at: 1, fact: fact.clone() }).collect();
    assert_eq!(notes(&entries), [format!("the job ended with exit code 78: {WHY}")]);
    assert!(incidents(&entries).is_empty() && scene.core.idle());
}

fn is_refused(agent: &mut Agent) -> Vec<Command> {
    commands(agent);
    agent.handle(Time(10), Event::Refused(ExitReason { code: 78, why: WHY.into() }));
    commands(agent)
}

fn exits() -> [Event; 2] {
    let generation = Generation(1);
    let (outcome, words) = (Outcome::Code(1), "CheckpointError".to_owned().into());
    [
        Event::Crew(
            generation,
            CrewEvent::WorkerExited(WorkerExit { local_rank: 0, pid: 7, outcome, asked: false, words }),
        ),
        Event::Crew(generation, CrewEvent::WorkersGone { store_port: 2 }),
    ]
}

#[test]
fn an_agent_reports_it_until_the_coordinator_ends_the_job() {
    let mut agent = running();
    assert_eq!(is_refused(&mut agent), [Command::Send(refused())]);
    // The report may have been lost with the connection.
    agent.handle(Time(20), Event::Disconnected);
    agent.handle(Time(30), Event::Connected);
    agent.handle(
        Time(40),
        Event::Order { epoch: Epoch(1), order: Order::Welcome { epoch: Epoch(1), began: Incarnation(1) } },
    );
    assert!(commands(&mut agent).contains(&Command::Send(refused())));
    let [exited, gone] = exits();
    agent.handle(Time(50), exited);
    let failed = |c: &Command| matches!(c, Command::Send(Report::Crew(_, CrewReport::WorkerFailed(_))));
    assert!(!commands(&mut agent).iter().any(failed), "the worker could not do anything else");
    agent.handle(
        Time(60),
        Event::Order { epoch: Epoch(1), order: Order::End(ExitReason { code: 78, why: WHY.into() }) },
    );
    agent.handle(Time(70), gone);
    assert!(
        commands(&mut agent)
            .iter()
            .any(|c| matches!(c, Command::Exit { reason: ExitReason { code: 78, why }, .. } if why == WHY))
    );
}

#[test]
fn an_agent_that_nobody_answers_ends_by_itself() {
    let mut agent = running();
    is_refused(&mut agent);
    let at = agent.deadline().unwrap();
    agent.handle(at, Event::Tick);
    for event in exits() {
        agent.handle(at, event);
    }
    assert!(
        commands(&mut agent)
            .iter()
            .any(|c| matches!(c, Command::Exit { reason: ExitReason { code: 78, why }, .. } if why == WHY))
    );
}
