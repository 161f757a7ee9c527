//! A step that all nodes hold is what training goes on from, whatever messages and coordinators are
//! lost meanwhile.

use crate::lone_agent;
use crate::scene::{Scene, failure};
use everstep_core::agent::command::{Command as AgentCommand, CrewCommand};
use everstep_core::agent::event::{CrewEvent, Event as AgentEvent};
use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::event::Event;
use everstep_core::id::{Epoch, Generation, Incarnation, Rank, Step};
use everstep_core::message::{
    CrewOrder, CrewReport, Holding, Holdings, Offer, Offers, Order, Outcome, RankOffers, Redundancy, Replication,
    Report, Restore, Round, Running, Tier, Unreadable,
};
use everstep_core::spec::RestartBudget;
use everstep_core::time::Time;

const NEWEST: Step = Step(15);
const DURABLE: Step = Step(10);

fn spec() -> everstep_core::spec::JobSpec {
    Scene::spec((2, 2), RestartBudget::Exactly(9))
}

/// The node reports what is in its memory, and what its rank could restore: this, or what is
/// durable.
fn says(scene: &mut Scene, node: u64, generation: u64, held: Vec<Holding>, offer: Option<Offer>) {
    let durable = Offer { step: DURABLE, tier: Tier::Durable, generation: Generation(0) };
    let offers = Offers::any(offer.into_iter().chain([durable]).collect(), false);
    let rank = Rank(u32::try_from(node).unwrap());
    for report in
        [CrewReport::Holds(Holdings { held, parity: vec![] }), CrewReport::Offers(RankOffers { rank, offers })]
    {
        scene.says(node, Report::Crew(Generation(generation), report));
    }
}

/// Node 0 has the newest step, with node 1's copy; node 1 has nothing in memory.
fn tell(scene: &mut Scene, generation: u64) {
    tells(scene, 0, generation);
    tells(scene, 1, generation);
}

fn tells(scene: &mut Scene, node: u64, generation: u64) {
    let holding = |rank| Holding { step: NEWEST, generation: Generation(1), rank, world_size: 2, shared: false };
    let own = Offer { step: NEWEST, tier: Tier::Memory, generation: Generation(1) };
    match node {
        0 => says(scene, node, generation, vec![holding(Rank(0)), holding(Rank(1))], Some(own)),
        _ => says(scene, node, generation, vec![], None),
    }
}

/// The step that each node was told to restore since the last call.
fn restored(scene: &mut Scene) -> Vec<Option<Step>> {
    let step = |o: &Order| {
        if let Order::Crew(_, CrewOrder::Restore(Restore { step, .. })) = o { Some(*step) } else { None }
    };
    scene.sent.drain(..).collect::<Vec<_>>().iter().filter_map(step).collect()
}

/// Two nodes trained to step 15, and rank 1 failed with all its memory. The second generation is
/// told to restore that step.
fn restoring() -> Scene {
    let mut scene = Scene::new();
    for node in 0..2 {
        scene.join(node, node + 10, 1, spec());
    }
    scene.passes(3000);
    for node in 0..2 {
        says(&mut scene, node, 1, vec![], None);
    }
    scene.says(1, Report::Crew(Generation(1), CrewReport::WorkerFailed(failure(1, Outcome::Signal(9), "", 16))));
    scene.stopped([0, 1]);
    scene.passes(10_000);
    restored(&mut scene);
    tell(&mut scene, 2);
    assert_eq!(restored(&mut scene), [Some(NEWEST); 2]);
    scene
}

#[test]
fn a_coordinator_that_starts_again_during_a_restore_waits_for_who_holds_the_step() {
    let mut scene = restoring();
    let record = scene.job().record().clone();
    scene.core = Coordinator::new(Epoch(2), vec![(record, scene.version)], Time(scene.now));
    scene.event(Event::Tick);
    // The one that holds nothing is the first to come back, and asks.
    let running = || {
        Some(Running { generation: Generation(2), failures: vec![], finished: false, progressed: false, ended: vec![] })
    };
    scene.join_running(1, 11, 1, spec(), running());
    tells(&mut scene, 1, 2);
    scene.join_running(0, 10, 1, spec(), running());
    scene.stopped([0, 1]);
    scene.passes(10_000);
    let generation = scene.job().record().generation.0;
    restored(&mut scene);
    tell(&mut scene, generation);
    assert_eq!(restored(&mut scene), [Some(NEWEST); 2], "generation {generation}");
}

#[test]
fn a_copy_that_cannot_be_fetched_for_a_moment_is_tried_again_and_given_up_in_the_end() {
    let mut scene = restoring();
    for (generation, then) in [(2, NEWEST), (3, NEWEST), (4, DURABLE)] {
        let missing = Unreadable { step: NEWEST, tier: Tier::Peer };
        scene.says(1, Report::Crew(Generation(generation), CrewReport::FetchFailed(Rank(1), missing)));
        scene.stopped([0, 1]);
        scene.passes(10_000);
        assert_eq!(scene.job().record().generation, Generation(generation + 1));
        restored(&mut scene);
        tell(&mut scene, generation + 1);
        assert_eq!(restored(&mut scene), [Some(then); 2], "after generation {generation}");
    }
}

#[test]
fn a_node_that_missed_that_a_step_is_held_by_all_hears_it_with_the_next_plan() {
    let mut agent = lone_agent::running();
    let wish = Redundancy { replicas: 1, data: 0, shared: false };
    let mut ask = |event: Option<CrewEvent>, order: Option<CrewOrder>| -> Vec<CrewCommand> {
        let generation = Generation(1);
        if let Some(event) = event {
            agent.handle(Time(5), AgentEvent::Crew(generation, event));
        }
        if let Some(order) = order {
            let order = Order::Crew(generation, order);
            agent.handle(Time(5), AgentEvent::Order { epoch: Epoch(1), order });
        }
        let crew = |c: AgentCommand| if let AgentCommand::Crew(_, c) = c { Some(c) } else { None };
        lone_agent::commands(&mut agent).into_iter().filter_map(crew).collect()
    };
    ask(Some(CrewEvent::Sealed { local_rank: 0, step: Step(7), wish }), None);
    let plan = Replication { keepers: vec![], keeps: vec![], stripes: vec![], keeps_parity: vec![] };
    let round = Round { next: Step(6), round: 3 };
    let commands = ask(None, Some(CrewOrder::Replicate { plan, round, committed: Some(Step(5)) }));
    assert!(commands.contains(&CrewCommand::HeldByAll(Step(5))), "{commands:?}");
    let bases = commands.iter().filter_map(|c| match c {
        CrewCommand::Replicate { base, .. } => Some(*base),
        _ => None,
    });
    assert_eq!(bases.collect::<Vec<_>>(), [Some(Step(5))], "what all hold must not be overwritten");
}

#[test]
fn each_run_of_a_job_has_an_identity_of_its_own_that_a_restart_keeps() {
    let began = |scene: &Scene| -> Vec<Incarnation> {
        let began = |o: &Order| {
            if let Order::Crew(_, CrewOrder::Start(start)) = o { Some(start.began) } else { None }
        };
        scene.sent.iter().filter_map(began).collect()
    };
    let scene = restoring();
    assert_eq!(scene.job().record().began, Incarnation(10));
    let mut one = Scene::new();
    one.join(0, 10, 1, Scene::spec((1, 1), RestartBudget::Exactly(3)));
    one.passes(3000);
    one.says(0, Report::Crew(Generation(1), CrewReport::WorkerFailed(failure(0, Outcome::Code(1), "", 3))));
    one.stopped([0]);
    one.passes(10_000);
    assert_eq!(began(&one), [Incarnation(10); 2]);
    one.says(0, Report::Crew(Generation(2), CrewReport::Finished));
    one.leaves(0);
    one.passes(1000);
    assert!(one.over().is_some());
    one.join(0, 20, 1, Scene::spec((1, 1), RestartBudget::Exactly(3)));
    one.passes(3000);
    assert_eq!(began(&one).last(), Some(&Incarnation(20)));
}
