//! Parity instead of full copies, seen from outside: which node computes what, what is committed,
//! and what is restored from where.

use crate::scene::{self, fresh};
use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::command::Command;
use everstep_core::coordinator::event::Event;
use everstep_core::id::{Epoch, Generation, NodeId, Rank, Session, Step};
use everstep_core::message::{
    CrewOrder, CrewReport, Hello, Holding, Holdings, Offer, Offers, Order, Parity, RankOffers, Redundancy, Replicated,
    Replication, Report, Restore, Sealed, Source, Tier,
};
use everstep_core::spec::RestartBudget;
use everstep_core::time::Time;
use std::collections::{BTreeMap, BTreeSet};

const GENERATION: Generation = Generation(1);
const STEP: Step = Step(20);

/// Nodes with these numbers of workers, just started, and the orders sent to them.
struct Scene {
    core: Coordinator,
    now: u64,
    version: u64,
    workers: Vec<u32>,
    sent: Vec<(Session, Order)>,
}

impl Scene {
    fn new(workers: &[u32]) -> Self {
        let core = Coordinator::new(Epoch(1), vec![], Time(0));
        let mut scene = Scene { core, now: 0, version: 0, workers: workers.to_vec(), sent: vec![] };
        for (node, workers) in workers.iter().enumerate() {
            let nodes = u32::try_from(scene.workers.len()).unwrap();
            let spec = scene::Scene::spec((nodes, nodes), RestartBudget::PerDayAfterFirstStep(10));
            let hello = Hello {
                node: NodeId(format!("{node:02}")),
                host: format!("host{node}"),
                ..fresh(node as u64, 1, *workers, spec)
            };
            scene.event(Event::Joined { session: Session(node as u64), hello: Box::new(hello) });
        }
        scene
    }

    fn event(&mut self, event: Event) {
        self.now += 10;
        let mut next = Some(event);
        while let Some(event) = next.take() {
            self.core.handle(Time(self.now), event);
            while let Some(command) = self.core.poll() {
                match command {
                    Command::Send { session, order, .. } => self.sent.push((session, order)),
                    Command::Persist { id, .. } => {
                        self.version += 1;
                        next = Some(Event::Persisted { id, result: Ok(self.version) });
                    }
                    _ => {}
                }
            }
        }
    }

    fn report(&mut self, node: usize, report: Report) {
        self.event(Event::Report { session: Session(node as u64), report });
    }

    fn sealed(&mut self, node: usize, step: Step, instead: Option<u64>) {
        let wish = Redundancy { replicas: 2, data: 4, shared: false };
        self.report(
            node,
            Report::Crew(GENERATION, CrewReport::Sealed(Sealed { step, wish, instead, committed: None })),
        );
    }

    fn done(&mut self, node: usize, step: Step, round: u64) {
        self.report(
            node,
            Report::Crew(GENERATION, CrewReport::Replicated(Replicated { step, sealed: step, digests: vec![], round })),
        );
    }

    /// Returns the replication plans once all nodes have reported a sealed step, and the round.
    fn plans(&mut self) -> (Vec<Replication>, u64) {
        (0..self.workers.len()).for_each(|node| self.sealed(node, STEP, None));
        let plan = |(session, order): &(Session, Order)| match order {
            Order::Crew(_, CrewOrder::Replicate { plan, round, .. }) => Some((session.0, plan.clone(), round.round)),
            _ => None,
        };
        let told: Vec<_> = self.sent.iter().filter_map(plan).collect();
        (told.iter().map(|(_, plan, _)| plan.clone()).collect(), told.last().unwrap().2)
    }

    fn committed(&self) -> Vec<u64> {
        let step =
            |o: &Order| if let Order::Crew(_, CrewOrder::Committed { step, .. }) = o { Some(step.0) } else { None };
        self.sent.iter().filter(|(session, _)| session.0 == 0).filter_map(|(_, o)| step(o)).collect()
    }

    fn ranks(&self, node: usize) -> std::ops::Range<u32> {
        let first = self.workers.iter().take(node).sum();
        first..first + self.workers.get(node).unwrap()
    }
}

/// Returns the source that each rank is told to restore from after `lost` nodes lost their memory.
fn restored(workers: &[u32], plans: &[Replication], lost: &BTreeSet<usize>) -> BTreeMap<u32, Source> {
    let mut scene = Scene::new(workers);
    let size: u32 = workers.iter().sum();
    let mut parity: BTreeMap<usize, Vec<Parity>> = BTreeMap::new();
    for (node, plan) in plans.iter().enumerate() {
        for stripe in &plan.stripes {
            let keepers = stripe.keepers.iter().map(|k| k.node.0.parse::<usize>().unwrap());
            for (number, keeper) in (0..).zip(std::iter::once(node).chain(keepers)) {
                assert!(plans[keeper].keeps_parity.contains(&stripe.number));
                parity.entry(keeper).or_default().push(Parity {
                    step: STEP,
                    generation: GENERATION,
                    world_size: size,
                    stripe: stripe.number,
                    of: u32::try_from(stripe.keepers.len()).unwrap() + 1,
                    number,
                    members: stripe.members.iter().map(|m| m.rank).collect(),
                });
            }
        }
    }
    for node in 0..workers.len() {
        let there = !lost.contains(&node);
        let holding =
            |rank| Holding { step: STEP, generation: GENERATION, rank: Rank(rank), world_size: size, shared: false };
        let held = scene.ranks(node).filter(|_| there).map(holding).collect();
        let parity = parity.get(&node).filter(|_| there).cloned().unwrap_or_default();
        scene.report(node, Report::Crew(GENERATION, CrewReport::Holds(Holdings { held, parity })));
        for rank in scene.ranks(node) {
            let offer = Offer { step: STEP, tier: Tier::Memory, generation: GENERATION };
            let offers = if there { vec![offer] } else { vec![] };
            scene.report(
                node,
                Report::Crew(
                    GENERATION,
                    CrewReport::Offers(RankOffers { rank: Rank(rank), offers: Offers::any(offers, false) }),
                ),
            );
        }
    }
    let mut found = BTreeMap::new();
    for (session, order) in &scene.sent {
        if let Order::Crew(_, CrewOrder::Restore(Restore { step: Some(step), sources, .. })) = order {
            assert_eq!(*step, STEP);
            found.extend(scene.ranks(usize::try_from(session.0).unwrap()).zip(sources.clone()));
        }
    }
    found
}

#[test]
fn any_two_of_a_group_may_be_lost() {
    for workers in [vec![1; 6], vec![2, 1, 2, 2, 1, 2], vec![1; 9], vec![1; 13], vec![3, 1, 1, 1], vec![2, 2]] {
        let (plans, _) = Scene::new(&workers).plans();
        let nodes = workers.len();
        for (a, b) in (0..nodes).flat_map(|a| (0..nodes).map(move |b| (a, b))) {
            let lost = BTreeSet::from([a, b]);
            let found = restored(&workers, &plans, &lost);
            if lost.len() == nodes {
                assert!(found.is_empty());
                continue;
            }
            let scene = Scene::new(&workers);
            assert_eq!(found.len() as u32, workers.iter().sum::<u32>(), "{workers:?} without {lost:?}");
            for node in 0..nodes {
                for rank in scene.ranks(node) {
                    let source = &found[&rank];
                    let tier = if lost.contains(&node) { Tier::Parity } else { Tier::Memory };
                    assert_eq!(source.tier, tier, "rank {rank} of {workers:?} without {lost:?}");
                    for stripe in source.rebuild.iter().flat_map(|r| &r.stripes) {
                        let address = |n: &usize| format!("host{n}:7");
                        let dead: Vec<String> = lost.iter().map(address).collect();
                        let used: Vec<&String> = stripe.data.iter().chain(&stripe.parity).flatten().collect();
                        assert!(used.iter().all(|a| !dead.contains(a)), "{stripe:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn three_of_a_group_are_too_many() {
    let workers = [1; 6];
    let (plans, _) = Scene::new(&workers).plans();
    assert!(restored(&workers, &plans, &BTreeSet::from([0, 2, 3])).is_empty());
    // In two groups, three nodes may be lost if they are spread well.
    let workers = [1; 12];
    let (plans, _) = Scene::new(&workers).plans();
    assert_eq!(restored(&workers, &plans, &BTreeSet::from([0, 2, 7])).len(), 12);
}

#[test]
fn nobody_keeps_more_than_half_a_shard_for_others() {
    let (plans, _) = Scene::new(&[1; 6]).plans();
    for plan in &plans {
        // The node keeps two parity shards of a quarter of a shard each, and no full copy.
        assert_eq!((plan.stripes.len(), plan.keeps_parity.len()), (1, 2));
        assert!(plan.keepers.is_empty() && plan.keeps.is_empty());
        assert!(plan.stripes.iter().all(|s| s.members.len() == 4));
    }
}

/// Work for an abandoned round does not count: the node may have dropped that step for the next
/// one.
#[test]
fn what_comes_from_an_earlier_round_is_not_counted() {
    let mut scene = Scene::new(&[1; 6]);
    let (_, first) = scene.plans();
    (0..5).for_each(|node| scene.done(node, STEP, first));
    // The sixth node cannot replicate it, so another step is named.
    scene.sealed(5, STEP, Some(first));
    let named = |scene: &Scene| {
        let next = |o: &Order| {
            if let Order::Crew(_, CrewOrder::Replicate { round, .. }) = o {
                Some((round.next.0, round.round))
            } else {
                None
            }
        };
        scene.sent.iter().filter_map(|(_, o)| next(o)).next_back().unwrap()
    };
    let (next, second) = named(&scene);
    assert_eq!((next, second), (STEP.0 + 1, first + 1));
    // Late reports about the first round do not name a new step, and nothing of the first round
    // counts.
    scene.sealed(4, STEP, Some(first));
    scene.done(5, STEP, first);
    assert_eq!(named(&scene), (next, second));
    assert!(scene.committed().is_empty());
    (0..6).for_each(|node| scene.done(node, Step(next), second));
    assert_eq!(scene.committed(), [next]);
}

/// A node took a later step than the named one (which was gone) before it reported that all its
/// workers had sealed it. The next step named is not one that all nodes already hold.
#[test]
fn what_is_held_by_all_is_not_named_again() {
    let mut scene = Scene::new(&[1; 6]);
    let (_, round) = scene.plans();
    let later = Step(STEP.0 + 1);
    for node in 0..6 {
        let report = Report::Crew(
            GENERATION,
            CrewReport::Replicated(Replicated { step: later, sealed: STEP, digests: vec![], round }),
        );
        scene.report(node, report);
    }
    assert_eq!(scene.committed(), [later.0]);
    let next =
        |o: &Order| if let Order::Crew(_, CrewOrder::Committed { round, .. }) = o { Some(round.next) } else { None };
    assert!(scene.sent.iter().filter_map(|(_, o)| next(o)).all(|next| next > later));
}
