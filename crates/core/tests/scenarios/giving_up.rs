//! Which step is the last when a job gives up: the same on all nodes, however late their workers
//! end.

use crate::lone_agent::{commands, running};
use crate::scene::{Scene, failure};
use everstep_core::agent::command::{Command, CrewCommand};
use everstep_core::agent::event::{CrewEvent, Event};
use everstep_core::id::{Epoch, Generation, Step};
use everstep_core::message::{CrewOrder, CrewReport, Order, Outcome, Redundancy, Replicated, Report, Round, Sealed};
use everstep_core::spec::RestartBudget;
use everstep_core::time::Time;

const GENERATION: Generation = Generation(1);

/// Two nodes that have committed step 4 and replicate step 5. Returns the round of the latter.
fn replicating() -> (Scene, u64) {
    let mut scene = Scene::new();
    for node in 0..2 {
        scene.join(node, node + 10, 1, Scene::spec((2, 2), RestartBudget::Exactly(0)));
    }
    scene.passes(3000);
    let wish = Redundancy { replicas: 1, data: 0, shared: false };
    for node in 0..2 {
        scene.says(
            node,
            Report::Crew(
                GENERATION,
                CrewReport::Sealed(Sealed { step: Step(4), wish, instead: None, committed: None }),
            ),
        );
    }
    let round =
        |o: &Order| if let Order::Crew(_, CrewOrder::Replicate { round, .. }) = o { Some(round.round) } else { None };
    let round = scene.sent.iter().rev().find_map(round).unwrap();
    for node in 0..2 {
        replicated(&mut scene, node, 4, round);
    }
    assert_eq!(committed(&scene), [4, 4]);
    (scene, round + 1)
}

fn replicated(scene: &mut Scene, node: u64, step: u64, round: u64) {
    let (step, sealed, digests) = (Step(step), Step(step), vec![]);
    scene.says(node, Report::Crew(GENERATION, CrewReport::Replicated(Replicated { step, sealed, digests, round })));
}

fn committed(scene: &Scene) -> Vec<u64> {
    let step = |o: &Order| if let Order::Crew(_, CrewOrder::Committed { step, .. }) = o { Some(step.0) } else { None };
    scene.sent.iter().filter_map(step).collect()
}

#[test]
fn no_step_is_committed_when_the_job_is_over() {
    let (mut scene, round) = replicating();
    replicated(&mut scene, 1, 5, round);
    scene.says(0, Report::Crew(GENERATION, CrewReport::WorkerFailed(failure(0, Outcome::Code(1), "", 5))));
    scene.passes(20_000);
    assert!(scene.over().is_some());
    assert!(scene.sent.iter().any(|o| matches!(o, Order::End(_))));
    replicated(&mut scene, 0, 5, round);
    assert_eq!(committed(&scene), [4, 4], "the other node may have ended with step 4");
}

/// What the agent of a node is told to persist if the job ends.
fn held_by_all(commands: &[Command]) -> Vec<u64> {
    let step = |c: &Command| if let Command::Crew(_, CrewCommand::HeldByAll(step)) = c { Some(step.0) } else { None };
    commands.iter().filter_map(step).collect()
}

#[test]
fn a_node_whose_workers_are_gone_still_learns_what_all_hold() {
    let mut agent = running();
    let committed = |generation: u64, step: u64| {
        let order = Order::Crew(
            Generation(generation),
            CrewOrder::Committed { step: Step(step), round: Round { next: Step(step + 1), round: 2 } },
        );
        Event::Order { epoch: Epoch(1), order }
    };
    agent.handle(Time(10), committed(1, 4));
    assert_eq!(held_by_all(&commands(&mut agent)), [4]);
    let fence = Order::Crew(GENERATION, CrewOrder::Fence { stacks: false });
    agent.handle(Time(20), Event::Order { epoch: Epoch(1), order: fence });
    agent.handle(Time(30), Event::Crew(GENERATION, CrewEvent::WorkersGone { store_port: 1 }));
    commands(&mut agent);
    agent.handle(Time(40), committed(1, 5));
    let told = commands(&mut agent);
    assert_eq!(held_by_all(&told), [5], "the other node, whose workers still end, keeps this one");
    assert!(
        !told.iter().any(|c| matches!(c, Command::Crew(_, CrewCommand::Committed { .. }))),
        "there is no crew to keep it for"
    );
    agent.handle(Time(50), committed(0, 6));
    assert_eq!(held_by_all(&commands(&mut agent)), [0; 0], "of an earlier generation");
}
